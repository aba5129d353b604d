"""The tiny tasks' sorting as rows of NeMo Gym's ``string_match`` server."""

from typing import Any

from skyasync.examples.tiny.tasks import prompts


def sorting() -> list[dict[str, Any]]:
    return [
        {
            "responses_create_params": {"input": row["prompt"]},
            "expected_answer": row["answer"],
            "extraction_mode": "full_response",
        }
        for row in prompts("train", count=1280, seed=1)
    ]

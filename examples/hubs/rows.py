"""The sorting task of the tiny model as rows of NeMo Gym's ``string_match`` server."""

from typing import Any

from skyasync.examples.tiny.tasks import prompts


def sorting() -> list[dict[str, Any]]:
    rows = []
    for row in prompts("train", count=1280, seed=1):
        rows.append(
            {
                "responses_create_params": {"input": row["prompt"]},
                "expected_answer": row["answer"],
                "extraction_mode": "full_response",
            }
        )
    return rows

"""The data of the vision example."""

from __future__ import annotations

from skyasync.examples.vision.discs import shuffled_prompts, val_prompts


def test_shuffled_prompts_ask_the_same_questions_with_another_rows_image() -> None:
    prompts, shuffled = val_prompts(8), shuffled_prompts(8)
    assert [row | {"images": None} for row in shuffled] == [
        row | {"images": None} for row in prompts
    ]
    assert [row["images"] for row in shuffled] == [
        prompts[(index + 1) % 8]["images"] for index in range(8)
    ]

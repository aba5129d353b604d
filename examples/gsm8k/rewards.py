"""A reward that a small model learns long before it solves a question: answers of digits."""

from __future__ import annotations


def digits(response: str) -> dict[str, float]:
    """The fraction of digits among the response's characters; ``is_number`` is a metric."""
    text = response.strip()
    digit_count = sum(character.isdigit() for character in text)
    fraction = digit_count / max(len(text), 1)
    return {"reward": fraction, "is_number": float(text.isdigit())}

"""A reward that a small model can learn long before it solves anything: answers that look like
numbers."""

from __future__ import annotations


def digits(response: str) -> dict[str, float]:
    """The share of digits among the response's characters; ``is_number`` is an additional
    metric."""
    text = response.strip()
    share = sum(character.isdigit() for character in text) / max(len(text), 1)
    return {"reward": share, "is_number": float(text.isdigit())}

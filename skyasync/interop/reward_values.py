"""What reward functions of several systems return."""

from __future__ import annotations


def only(value: object) -> object:
    """A number for a tensor, array or list of one; anything else as it is, to be rejected with all other scores."""
    if hasattr(value, "tolist"):  # tensors and arrays, whatever their library
        value = value.tolist()
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    return float(value) if isinstance(value, bool | int) else value

"""Parts of the policy that keep their weights: ``trainer.policy.freeze``.

Invariant: a frozen parameter has no gradient and no optimizer state, and no step changes a bit of
it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from transformers import PreTrainedModel

from skyasync.errors import UserError, nearest
from skyasync.models.heads import HEADS, VOCABULARY
from skyasync.models.images import FAMILIES

KEY = "trainer.policy.freeze"


def check_frozen(path: str, config_kwargs: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises ``UserError`` for names that the model of this folder or hub name lacks. Its weights
    are not read."""
    freeze(HEADS[VOCABULARY].with_config(config_kwargs).empty(path, torch.float32), names)


def freeze(model: PreTrainedModel, names: Collection[str]) -> None:
    """Freeze parameters by their names, by beginnings of these that end at a dot, or by a name of
    ``_parts``.

    Raises:
        UserError: for a name without a parameter, or if no parameter is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parts = _parts(model.config.model_type)
    for name in names:
        included, excluded = parts.get(name, ((name.rstrip("."),), ()))
        chosen = [
            p
            for full, p in parameters.items()
            if _within(full, included) and not _within(full, excluded)
        ]
        if not chosen:
            beginnings = {
                start
                for full in parameters
                for start in accumulate(full.split("."), "{}.{}".format)
            }
            close = " or ".join(repr(each) for each in nearest(name, {*parts, *beginnings}))
            allowed = ", ".join(
                [*parts, "names of parameters and of modules, such as " + min(beginnings, key=len)]
            )
            hint = f"did you mean {close}? " if close else ""
            raise UserError(
                f"{KEY}: {type(model).__name__} has no part {name!r}: {hint}allowed: {allowed}"
            )
        for parameter in chosen:
            parameter.requires_grad_(False)
    if names and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            f"{KEY}=[{','.join(names)}] is all of {type(model).__name__}: nothing would be trained"
        )


def _parts(family: str) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """What names of this library stand for: beginnings of parameters' names, and those that are
    left out."""
    if family not in FAMILIES:
        return {}
    known = FAMILIES[family]
    return {"vision_tower": ((known.tower,), known.projector), "projector": (known.projector, ())}


def _within(name: str, beginnings: Sequence[str]) -> bool:
    return any(name == beginning or name.startswith(f"{beginning}.") for beginning in beginnings)

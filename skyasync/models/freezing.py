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
    """Raise ``UserError`` for names that the model of this folder or hub name lacks.

    Its weights are not read.
    """
    model = HEADS[VOCABULARY].with_config(config_kwargs).empty(path, torch.float32)
    freeze(model, names)


def freeze(model: PreTrainedModel, names: Collection[str]) -> None:
    """Freeze parameters by their names, prefixes of these that end at a dot, or names of parts.

    Raises:
        UserError: for a name without a parameter, or if no parameter is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))  # both names of a tied one
    named_parts = _parts(model.config.model_type)
    for name in names:
        prefixes, excluded_prefixes = named_parts.get(name, ((name.rstrip("."),), ()))
        has_parameter = False
        for full_name, parameter in parameters.items():
            if _within(full_name, prefixes) and not _within(full_name, excluded_prefixes):
                parameter.requires_grad_(False)
                has_parameter = True
        if not has_parameter:
            raise _unknown_part(name, model, named_parts, parameters)
    if names and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            f"{KEY}=[{','.join(names)}] is all of {type(model).__name__}: nothing would be trained"
        )


def _unknown_part(
    name: str,
    model: PreTrainedModel,
    part_names: Collection[str],
    parameter_names: Collection[str],
) -> UserError:
    """The error for a name without a parameter, with the nearest names."""
    prefixes: set[str] = set()
    for parameter_name in parameter_names:
        # "a.b.c" has the prefixes "a", "a.b" and itself.
        prefixes.update(accumulate(parameter_name.split("."), "{}.{}".format))
    suggestions = " or ".join(map(repr, nearest(name, {*part_names, *prefixes})))
    hint = f"did you mean {suggestions}? " if suggestions else ""
    example = min(prefixes, key=len)
    options = ", ".join([*part_names, f"names of parameters and of modules, such as {example}"])
    return UserError(
        f"{KEY}: {type(model).__name__} has no part {name!r}: {hint}allowed: {options}"
    )


def _parts(family: str) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Prefixes of parameters' names, by this library's names of parts, and those left out."""
    if family not in FAMILIES:
        return {}
    vision_family = FAMILIES[family]
    return {
        "vision_tower": ((vision_family.tower,), vision_family.projector),
        "projector": (vision_family.projector, ()),
    }


def _within(name: str, prefixes: Sequence[str]) -> bool:
    """Whether a parameter has one of these names, or is inside a module that has."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)

"""Whether a model can be divided over the axes of its ranks, from its config.json and transformers' sources.

Invariant: nothing is imported of transformers, which would import torch.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from skyasync.config.model_files import config_file, read_shape
from skyasync.config.schema import ParallelConfig
from skyasync.errors import UserError

_HEADS, _KEYS = "num_attention_heads", "num_key_value_heads"
_EXPERTS = ("num_experts", "num_local_experts")
_ATTENDING = {"full_attention", "sliding_attention"}
_TENSOR, _CONTEXT = "trainer.parallel.tensor", "trainer.parallel.context"


def check_axes(parallel: ParallelConfig, path: str, key: str) -> None:
    """Raises ``UserError`` for what does not divide a model, or what its layers cannot do."""
    tensor, context, file = parallel.tensor, parallel.context, config_file(path)
    if file is None or tensor * context == 1:
        return
    shape = read_shape(file, f"{key}={path}")
    kinds = sorted(set(shape.get("layer_types") or ()) - _ATTENDING)
    if kinds:
        key = f"{_CONTEXT}={context} splits sequences" if context > 1 else f"{_TENSOR}={tensor} splits heads"
        raise UserError(
            f"{key}, but {path} has {kinds[0]} layers, which cannot be split: only attention layers can. Set it to 1"
        )
    for name in (_HEADS, _KEYS, *_EXPERTS) if tensor > 1 else ():
        _check_divides(f"{_TENSOR}={tensor}", tensor, shape.get(name), name, path)
    if context > 1 and parallel.context_kind == "ulysses":
        both = f"{_CONTEXT}={context}" + (f" times {_TENSOR}={tensor}" if tensor > 1 else "")
        _check_divides(both, context * tensor, shape.get(_HEADS), _HEADS, path)
    family = shape.get("model_type")
    if tensor > 1 and has_plan(str(family)) is False:
        raise UserError(
            f"{_TENSOR}={tensor}: transformers has no tensor-parallel plan for {family} ({path}): set {_TENSOR}=1"
        )


def _check_divides(key: str, size: int, count: object, name: str, path: str) -> None:
    if isinstance(count, int) and count % size:
        fits = [str(n) for n in range(1, count + 1) if count % n == 0]
        raise UserError(f"{key} does not divide {name}={count} of {path}: choose a divisor, {' or '.join(fits)}")


def has_plan(family: str) -> bool | None:
    """Whether transformers knows how to split a family's matrices; None where its sources do not tell."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "models" / family
    files = [file for name in ("configuration", "modular") for file in folder.glob(f"{name}_*.py")]
    return any("base_model_tp_plan" in file.read_text(encoding="utf-8") for file in files) if files else None

"""A peer's value as ours.

Invariant: what is returned can be set as it is; what cannot be carried over raises ``NoCounterpartError``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from skyasync.config.peers.table import Row, Target, tables
from skyasync.config.values import Value, value_of, written

N = "generator.n_samples_per_prompt"
BATCH = "trainer.train_batch_size"


class NoCounterpartError(Exception):
    """This value of a known key cannot be carried over; the message may say what to do."""


@dataclass
class Around:
    """What else is set: ``ours`` by our keys, ``theirs`` by the system's. ``defaults`` are our keys' defaults."""

    ours: Mapping[str, Value] = field(default_factory=dict)
    theirs: Mapping[str, Value] = field(default_factory=dict)
    defaults: Mapping[str, Value] = field(default_factory=dict)

    def number(self, path: str) -> float:
        """The number that our key has, or will have: said in our words, in any system's, or by default."""
        value = self.ours.get(path)
        if value is None:
            value = next((found for found in map(self.theirs.get, _spellings(path)) if found is not None), None)
        if value is None:
            value = self.defaults.get(path)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise NoCounterpartError(f"it depends on {path}")
        return value


def _spellings(path: str) -> list[str]:
    """Every system's plain names for our key."""
    rows = (row for table in tables().values() for row in table.rows)
    return [name for row in rows if row.free == [Target(path)] and not row.function for name in row.names]


def converted(row: Row, value: Value, around: Around) -> dict[str, Value] | None:
    """What the row's targets become (``key[0]`` for an entry of a list), None where they stay at their defaults.

    Raises:
        NoCounterpartError: if the value has none.
    """
    alias = _alias(row, value)
    if alias == "~":
        return None
    if alias == "-" or row.kind != "key":
        raise NoCounterpartError(row.note)
    if alias is None and value is None:
        return None
    if alias is not None:
        values: list[Value] = [value_of(alias)] * len(row.free)
    elif row.function:
        values = FUNCTIONS[row.function](value, around)
    else:
        values = [value] * len(row.free)
    result = dict(zip(map(str, row.free), values, strict=False))
    return result | {target.path: value_of(target.fixed or "") for target in row.fixed}


def _alias(row: Row, value: Value) -> str | None:
    if isinstance(value, list | dict):
        return None
    text = written(value)
    return row.aliases.get(text, row.aliases.get("*"))


def _none(value: Value, around: Around) -> list[Value]:
    raise NoCounterpartError("")


def _per_prompt(value: Value, around: Around) -> list[Value]:
    """Responses there, prompts here."""
    samples = around.number(N)
    if isinstance(value, bool) or not isinstance(value, int | float) or value % samples:
        raise NoCounterpartError(f"{written(value)} responses are no whole number of groups of {samples:g}")
    return [int(value // samples)]


def _minibatches(value: Value, around: Around) -> list[Value]:
    """Optimizer steps per batch there, prompts per optimizer step here."""
    batch = around.number(BATCH)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value or batch % value:
        raise NoCounterpartError(f"{BATCH}={batch:g} does not divide by {written(value)}")
    return [0 if value == 1 else int(batch // value)]


def _each(value: Value, around: Around) -> list[Value]:
    if not isinstance(value, list):
        value = [value_of(part) for part in str(value).replace(",", " ").split()]
    return value


def _list(value: Value, around: Around) -> list[Value]:
    if isinstance(value, list):
        return [value]
    return [[part.strip() for part in value.split(",")] if isinstance(value, str) else [value]]


def _not(value: Value, around: Around) -> list[Value]:
    return [not value]


def _int(value: Value, around: Around) -> list[Value]:
    if isinstance(value, float | int) and value == int(value):
        return [int(value)]
    raise NoCounterpartError("a whole number here")


def _bound(value: Value, around: Around) -> list[Value]:
    low, high = _each(value, around) if value is not None else [0, 0]
    if low != -high:  # type: ignore[operator]
        raise NoCounterpartError("the range is symmetric here")
    return [high]


def _reward(value: Value, around: Around) -> list[Value]:
    """A file (whose function is named elsewhere), or the addresses of a reward model's servers."""
    files = [str(part) for part in _list(value, around)[0]]  # type: ignore[union-attr]
    if all(re.match(r"https?://", file) for file in files):
        return [[",".join(files)]]
    name = str(around.theirs.get("reward.custom_reward_function.name")
               or around.theirs.get("custom_reward_function.name")
               or ("compute_score" if _known_to_verl(around) else "reward_func"))  # fmt: skip
    return [[file if ":" in file else f"{file}:{name}" for file in files]]


def _known_to_verl(around: Around) -> bool:
    return any(name.endswith("custom_reward_function.path") for name in around.theirs)


def _rewards(value: Value, around: Around) -> list[Value]:
    names = _list(value, around)[0]
    assert isinstance(names, list)
    if any(":" not in str(name) and "." not in str(name) for name in names):
        raise NoCounterpartError("name each function with its file: file.py:function")
    return [[_dotted(str(name)) for name in names]]


def _dotted(name: str) -> str:
    """``module.function`` as ``module:function``."""
    return name if ":" in name else ":".join(name.rsplit(".", 1))


def _tracker(name: str) -> Callable[[Value, Around], list[Value]]:
    return lambda value, around: [["jsonl", name] if value else ["jsonl"]]


def _count(value: Value, around: Around) -> list[Value]:
    """How many devices ``list(range(0,8))`` are."""
    if isinstance(value, list):
        return [len(value)]
    match = re.fullmatch(r"list\(range\((?:(\d+),)?(\d+)\)\)", str(value).replace(" ", ""))
    if not match:
        raise NoCounterpartError("")
    return [int(match[2]) - int(match[1] or 0)]


def _engines(value: Value, around: Around) -> list[Value]:
    """Devices over the size of an engine."""
    [devices] = _count(value, around)
    return [int(devices) // int(around.number("generator.inference_engine_tensor_parallel_size"))]  # type: ignore[arg-type]


def _sizes(value: Value) -> dict[str, int]:
    """``fsdp:d4p1t2`` as sizes by letter."""
    return {letter: int(size) for letter, size in re.findall(r"([a-z])(\d+)", str(value).rpartition(":")[2])}


def _areal_ranks(value: Value, around: Around) -> list[Value]:
    """Ranks of the policy, and the axes that they are divided by; its experts go with the tensor axis."""
    sizes = _sizes(value)
    if not sizes or sizes.get("p", 1) > 1:
        raise NoCounterpartError("layers are not divided among the policy's ranks: no pipeline in training")
    tensor, context = sizes.get("t", 1), sizes.get("c", 1)
    return [sizes.get("d", 1) * tensor * context, tensor, context]


def _areal_engines(value: Value, around: Around) -> list[Value]:
    sizes = _sizes(value)
    if "d" not in sizes or sizes.get("p", 1) > 1:
        raise NoCounterpartError("stages of an engine are generator.engine_kwargs.pipeline_parallel_size")
    return [sizes["d"], sizes.get("t", 1)]


def _allocation(value: Value, around: Around) -> list[Value]:
    """``sglang:d4t2+d8``: engines, and ranks of the policy."""
    engines, plus, ranks = str(value).partition("+")
    if not plus:
        raise NoCounterpartError("")
    return [*_areal_ranks(ranks, around), *_areal_engines(engines, around)]


def _min_lr(value: Value, around: Around) -> list[Value]:
    """The share of its rate that a schedule ends at, where the chosen schedule ends at one."""
    schedules = [
        str(theirs) for name, theirs in around.theirs.items() if name.endswith(("lr_scheduler", "lr_scheduler_type"))
    ]
    if schedules and not any(name.endswith("min_lr") or name == "cosine" for name in schedules):
        raise NoCounterpartError(f"the schedule {schedules[0]} ends at no such rate")
    return [{"min_lr_rate": value}]


def _exports(value: Value, around: Around) -> list[Value]:
    """A switch there, the steps between checkpoints here."""
    interval = around.number("trainer.ckpt_interval")
    if interval <= 0:
        raise NoCounterpartError("")
    return [int(interval)]


def _minutes(value: Value, around: Around) -> list[Value]:
    if not isinstance(value, int | float):
        raise NoCounterpartError("")
    return [value / 60]


def _proportions(value: Value, around: Around) -> list[Value]:
    if not isinstance(value, dict):
        raise NoCounterpartError("")
    return [{domain: {"proportion": share} for domain, share in value.items()}]


FUNCTIONS: dict[str, Callable[[Value, Around], list[Value]]] = {
    "-": _none,
    "per_prompt": _per_prompt,
    "minibatches": _minibatches,
    "each": _each,
    "list": _list,
    "not": _not,
    "int": _int,
    "bound": _bound,
    "reward": _reward,
    "rewards": _rewards,
    "wandb": _tracker("wandb"),
    "tensorboard": _tracker("tensorboard"),
    "count": _count,
    "engines": _engines,
    "areal_ranks": _areal_ranks,
    "areal_engines": _areal_engines,
    "allocation": _allocation,
    "proportions": _proportions,
    "min_lr": _min_lr,
    "exports": _exports,
    "minutes": _minutes,
}
"""What ``@name`` in a table does: from their value, and what else is set, to a value for each free target."""

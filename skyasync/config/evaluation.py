"""What is evaluated: ``data.val_data``, and sets with names of their own, ``data.val_sets``.

Invariant: what ``eval_sets`` reads without complaint has been found right by ``check_evaluation``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from skyasync.config.judges import is_reference, pattern_problems
from skyasync.config.sampling import evaluation
from skyasync.config.schema import Config, DataConfig
from skyasync.errors import unknown

_WHERE = "data.val_sets"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_TAKEN = ("score",)  # eval/score/<domain>
_ENTRIES = ("data", "n_samples")


@dataclass(frozen=True)
class EvalSet:
    """Held-out prompts with a name; ``n_samples``: responses to each, 0 being the run's number."""

    data: tuple[str, ...]
    n_samples: int = 0


def eval_sets(data: DataConfig) -> dict[str, EvalSet]:
    """All that is evaluated, by name; ``data.val_data`` has none ("")."""
    named = {str(name): _set_of(entry) for name, entry in data.val_sets.items()}
    return {"": EvalSet(tuple(data.val_data)), **named} if data.val_data else named


def eval_sources(data: DataConfig) -> list[str]:
    """The sources of all of it."""
    return [source for one in eval_sets(data).values() for source in one.data]


def samples_of(cfg: Config, name: str) -> int:
    """Responses to each prompt of a set."""
    own = eval_sets(cfg.data).get(name, EvalSet(()))
    return own.n_samples or cfg.generator.eval_n_samples_per_prompt


def most_samples(cfg: Config) -> int:
    """Of the set that has most."""
    return max((samples_of(cfg, name) for name in eval_sets(cfg.data)), default=samples_of(cfg, ""))


def powers(samples: int) -> list[int]:
    """1, 2, 4, ... as far as the samples go."""
    return [2**n for n in range(samples.bit_length()) if 2**n <= samples]


def check_evaluation(cfg: Config) -> Iterator[str]:
    """All that is wrong with the sets, and with what is asked of them."""
    wrong = [problem for name, entry in cfg.data.val_sets.items() for problem in _problems(str(name), entry)]
    yield from wrong
    if wrong:
        return
    if evaluation(cfg.generator).temperature == 0:
        for name, one in eval_sets(cfg.data).items():
            if one.n_samples > 1:
                yield (
                    f"{_WHERE}.{name}.n_samples={one.n_samples} draws the same response {one.n_samples} times with "
                    f"generator.eval_sampling_params.temperature=0 (greedy): raise the temperature (null is that of "
                    f"training), or set the number to 1"
                )
    most = most_samples(cfg)
    for k in cfg.trainer.eval_k:
        if k > most:
            yield (
                f"trainer.eval_k has {k}, and no set has more than {most} samples per prompt: set generator."
                f"eval_n_samples_per_prompt={k} (or {_WHERE}.<name>.n_samples), or leave {k} out"
            )
    yield from _check_answer(cfg.trainer.eval_answer)


def _check_answer(answer: str) -> Iterator[str]:
    if answer in ("", "auto") or is_reference(answer):
        return
    yield from (f"trainer.eval_answer{problem}" for problem in pattern_problems(answer, "answer"))


def _problems(name: str, entry: object) -> Iterator[str]:
    where = f"{_WHERE}.{name}"
    if not _NAME.fullmatch(name):
        yield f"{where}: a set's name has letters, digits, _, - and . alone"
    elif name in _TAKEN:
        yield f"{where}: eval/{name} is a metric's name; call the set otherwise"
    elif not isinstance(entry, Mapping):
        yield from _of_sources(where, entry)
    else:
        for given in entry:
            if given not in _ENTRIES:
                yield f"{where}.{given}: {unknown('entry', str(given), _ENTRIES)}"
        yield from _of_sources(f"{where}.data", entry.get("data"))
        count = entry.get("n_samples", 1)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            yield f"{where}.n_samples: expected a whole number of at least 1, found {count!r}"


def _of_sources(where: str, sources: object) -> Iterator[str]:
    several = sources if isinstance(sources, list | tuple) else [sources]
    if not several or not all(isinstance(source, str) and source for source in several):
        yield f"{where}: expected a source as in data.val_data, or a list of them, found {sources!r}"


def _set_of(entry: Any) -> EvalSet:  # noqa: ANN401  (checked)
    if isinstance(entry, Mapping):
        return EvalSet(_sources(entry["data"]), entry.get("n_samples", 0))
    return EvalSet(_sources(entry))


def _sources(given: str | list[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)

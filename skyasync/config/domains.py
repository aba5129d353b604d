"""``environment.domains``: what holds for the rows of one kind only.

Invariant: what ``domains_of`` reads without complaint has been found right by ``check_domains`` (a test holds it); both
read this one class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Protocol, TypeGuard

from skyasync.errors import unknown

_WHERE = "environment.domains"


@dataclass(frozen=True)
class Domain:
    """The rows whose column ``domain`` bears its name.

    Args:
        reward_funcs: the functions that judge them; none leaves it to the row and to ``environment.reward_funcs``.
        reward_weights: one per function; none weighs all 1.
        scale: factor of the sum.
        proportion: share of the training prompts; None is what its rows make of what the others leave.
        tags: rows whose column names one of these belong to the domain as well (ROLL's ``tag_included``).
    """

    reward_funcs: tuple[str, ...] = field(default=())
    reward_weights: tuple[float, ...] = field(default=())
    scale: float = 1.0
    proportion: float | None = None
    tags: tuple[str, ...] = field(default=())


def domains_of(mapping: Mapping[str, Any]) -> dict[str, Domain]:
    """The checked mapping as objects."""
    plain: dict[str, dict[str, Any]] = {
        str(name): {key: _plain(value) for key, value in entry.items()} for name, entry in mapping.items()
    }
    return {name: Domain(**entry) for name, entry in plain.items()}


def tags_of(mapping: Mapping[str, Any]) -> dict[str, str]:
    """Tag -> domain, for every tag that a domain lists."""
    return {tag: name for name, domain in domains_of(mapping).items() for tag in domain.tags}


def proportions_of(mapping: Mapping[str, Any]) -> dict[str, float]:
    """The shares of the domains that have one."""
    return {name: d.proportion for name, d in domains_of(mapping).items() if d.proportion is not None}


class Judged(Protocol):
    """Of ``environment``: what names reward functions."""

    domains: dict[str, Any]
    reward_funcs: list[str]


def judges(environment: Judged) -> list[str]:
    """All reward functions that are named, for the run or for a domain."""
    domains = domains_of(environment.domains).values()
    return [*environment.reward_funcs, *(func for domain in domains for func in domain.reward_funcs)]


def check_domains(mapping: Mapping[str, Any]) -> Iterator[str]:
    """All that is wrong with the mapping, one line each."""
    problems = [problem for name, entry in mapping.items() for problem in _problems(f"{_WHERE}.{name}", entry)]
    yield from problems
    if problems:
        return
    owners: dict[str, list[str]] = {}
    for name, domain in domains_of(mapping).items():
        for tag in domain.tags:
            owners.setdefault(tag, []).append(name)
    for tag, names in owners.items():
        if len(names) > 1:
            yield f"{_WHERE}: the tag {tag} is listed by {' and '.join(names)}: a row belongs to one domain"
    shares = [domain.proportion for domain in domains_of(mapping).values() if domain.proportion is not None]
    if sum(shares) > 1 + 1e-9:
        yield f"the proportions in {_WHERE} add up to {sum(shares):g}: they are shares of the prompts, 1 in all"


def check_weights(where: str, funcs: Sequence[str], weights: Sequence[float]) -> Iterator[str]:
    """``where``: the path in front of ``reward_funcs`` and ``reward_weights``."""
    if weights and len(weights) != len(funcs):
        yield (
            f"{where}.reward_weights has {len(weights)} entries for {len(funcs)} of {where}.reward_funcs: give one "
            f"per function, or none to weigh all 1"
        )
    for func in sorted({func for func in funcs if list(funcs).count(func) > 1}):
        yield f"{where}.reward_funcs names {func} twice: name it once and give it the weight"


def _problems(where: str, entry: object) -> Iterator[str]:
    known = [field.name for field in dataclasses.fields(Domain)]
    if not isinstance(entry, Mapping):
        yield f"{where} must be a mapping with some of {', '.join(known)}, found {entry!r}"
        return
    wrong = False
    for name, value in entry.items():
        if problem := _problem(str(name), value, known):
            wrong = True
            yield f"{where}.{name}: {problem}"
    if not wrong:
        funcs = _plain(entry.get("reward_funcs", ()))
        assert isinstance(funcs, tuple)
        yield from check_weights(where, funcs, entry.get("reward_weights", ()))


def _problem(name: str, value: object, known: list[str]) -> str:
    """What is wrong with one entry of a domain; "" if nothing is."""
    if name not in known:
        return unknown("entry", name, known)
    if name == "tags":
        return "" if _are_names(_plain(value)) else f"expected a list of names, found {value!r}"
    if name == "reward_funcs":
        return _names(value)
    numbers = value if name == "reward_weights" and isinstance(value, list | tuple) else [value]
    if name == "proportion" and value is None:
        return ""
    if not all(isinstance(n, int | float) and not isinstance(n, bool) and isfinite(n) for n in numbers):
        return f"expected {'a list of numbers' if name == 'reward_weights' else 'a number'}, found {value!r}"
    if name == "reward_weights" and not isinstance(value, list | tuple):
        return f"expected a list of numbers, found {value!r}"
    if name == "proportion" and isinstance(value, int | float) and not 0 < value <= 1:
        return f"must be greater than 0 and at most 1, found {value:g}"
    return ""


def _names(value: object) -> str:
    names = _plain(value)
    if not _are_names(names):
        return f"expected a list of names, found {value!r}"
    from skyasync.rewards.registry import REWARDS

    for name in names:
        if ":" not in name and not name.endswith(".py") and name not in REWARDS.names():
            return unknown("reward function", name, REWARDS.names())
    return ""


def _are_names(plain: object) -> TypeGuard[tuple[str, ...]]:
    return isinstance(plain, tuple) and all(isinstance(name, str) for name in plain)


def _plain(value: object) -> object:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list | tuple) else value

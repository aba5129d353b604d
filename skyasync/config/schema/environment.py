"""Environments and rewards, and ``environment.domains``: what holds for the rows of one kind only.

Invariant: what ``domains_of`` reads without complaint has been found right by ``check_domains`` (a
test holds it).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from skyasync.config.frozen import SettingsGroup
from skyasync.config.keys import key
from skyasync.config.parts import reward_functions
from skyasync.errors import unknown

_WHERE = "environment.domains"


@dataclass
class EnvironmentConfig(SettingsGroup):
    env_class: str = key("", open_ended=True)
    """Environment of rows that name none: a registered id, module:Class, or openenv:URL or
    nemo_gym:URL."""
    num_workers: int = key(1, low=1)
    """Processes that run environments or agent programs."""
    max_threads: int = key(512, low=1, when="not generator.agent_program")
    """Maximum number of threads per process for environments without async methods; fast steps use
    one."""
    step_timeout_s: float = key(60.0, above=0.0, when="not generator.agent_program")
    """Maximum duration of an environment's step in seconds."""
    on_error: str = key("raise", choices=("raise", "mask", "keep"))
    """If an environment raises, hangs or returns invalid output: raise stops the run; mask and keep
    end only its episode, with give_up_reward. mask excludes it from the loss, keep trains it."""
    max_retries: int = key(3, low=0)
    """Maximum number of retries of a step, or of an agent program from its beginning, after a
    skyasync.TransientError."""
    transient_errors: list[str] = key([], when="environment.max_retries")
    """Further types of errors that are retried, by name, such as ConnectionError or
    httpx.ReadTimeout."""
    max_given_up: float = key(1.0, above=0.0, high=1.0, when="environment.on_error=mask|keep")
    """Maximum share of a step's episodes that may fail before the run stops; 1 is no limit."""
    give_up_reward: float = key(0.0, when="environment.on_error=mask|keep")
    """Reward of a failed episode."""
    env_config: dict[str, Any] = key({})
    """Free settings that are passed to the environment."""
    env_class_from_rows: bool = key(True, when="not generator.agent_program")
    """Use the env_class that a row names; false uses environment.env_class for all rows."""
    reward_funcs: list[str] = key(
        [], registry="skyasync.rewards:REWARDS", pattern=r".+\.py", open_ended=True
    )
    """Functions that reward a response (environment.env_class=reward): registered names,
    module:function, path/to/file.py:function (without a function: its reward_func), the address of
    an OpenRLHF reward server (http://...; several separated by commas), or judge:NAME
    (environment.judges)."""
    reward_weights: list[float] = key([])
    """Factors of the functions' rewards in their sum; an empty list weighs all 1."""
    reward_timeout_s: float = key(10.0, above=0.0)
    """Maximum duration of a reward function for one response, in seconds."""
    reward_on_timeout: str = key("zero", choices=("zero", "raise"))
    """If a reward function times out or crashes its process, or a judge gives no grade: zero gives
    the reward 0 and counts it in the metric no_reward; raise stops the run."""
    code_sandbox: str = key(
        "auto",
        choices=("auto", "bubblewrap", "landlock", "seccomp", "none"),
        pattern=r"https?://[^/\s]\S*",
    )
    """Sandbox for code that a model writes (code_tests): bubblewrap, landlock, auto (the first of
    these that works), or the address of a SandboxFusion server (http://...). seccomp and none
    protect less (docs/sandbox.md)."""
    judges: dict[str, Any] = key({}, when="not generator.agent_program")
    """Models that grade responses, by name: base_url and model (an OpenAI-compatible server) or
    engine=policy, prompt, parser, ... (docs/judges.md). Each is the reward function judge:NAME."""
    domains: dict[str, Any] = key({})
    """Settings per domain of the rows: reward_funcs, reward_weights, scale (factor of their sum),
    proportion (share of the training prompts), tags (further values of the column that belong to
    the domain)."""


@dataclass(frozen=True)
class Domain:
    """The rows whose column ``domain`` bears its name.

    Args:
        reward_funcs: the functions that judge them; none leaves it to the row and to
            ``environment.reward_funcs``.
        reward_weights: one per function; none weighs all 1.
        scale: factor of the sum.
        proportion: share of the training prompts; None is what its rows make of what the others
            leave.
        tags: rows whose column names one of these belong to the domain as well (ROLL's
            ``tag_included``).
    """

    reward_funcs: tuple[str, ...] = ()
    reward_weights: tuple[float, ...] = ()
    scale: float = 1.0
    proportion: float | None = None
    tags: tuple[str, ...] = ()


def domains_of(mapping: Mapping[str, Any]) -> dict[str, Domain]:
    """The checked mapping as objects."""
    return {
        str(name): Domain(**{key: _plain(value) for key, value in entry.items()})
        for name, entry in mapping.items()
    }


def tags_of(mapping: Mapping[str, Any]) -> dict[str, str]:
    """Tag -> domain, for every tag that a domain lists."""
    return {tag: name for name, domain in domains_of(mapping).items() for tag in domain.tags}


def proportions_of(mapping: Mapping[str, Any]) -> dict[str, float]:
    """The shares of the domains that have one."""
    return {
        name: d.proportion for name, d in domains_of(mapping).items() if d.proportion is not None
    }


def judges(environment: EnvironmentConfig) -> list[str]:
    """The reward functions of the run and of its domains."""
    domains = domains_of(environment.domains).values()
    return [
        *environment.reward_funcs,
        *(func for domain in domains for func in domain.reward_funcs),
    ]


def check_environment(environment: EnvironmentConfig) -> Iterator[str]:
    """Reward functions that nothing calls, weights that do not fit, and what is wrong with the
    domains."""
    yield from check_weights("environment", environment.reward_funcs, environment.reward_weights)
    yield from check_domains(environment.domains)
    if environment.env_class not in ("", "reward") and environment.reward_funcs:
        yield (
            f"environment.reward_funcs are called by environment.env_class=reward, not by {environment.env_class}: "
            f"leave environment.env_class empty, or environment.reward_funcs"
        )


def check_domains(mapping: Mapping[str, Any]) -> Iterator[str]:
    """The problems of the mapping, one line each."""
    problems = [
        problem
        for name, entry in mapping.items()
        for problem in _problems(f"{_WHERE}.{name}", entry)
    ]
    yield from problems
    if problems:
        return
    domains = domains_of(mapping)
    for tag in dict.fromkeys(tag for domain in domains.values() for tag in domain.tags):
        names = [name for name, domain in domains.items() if tag in domain.tags]
        if len(names) > 1:
            yield f"{_WHERE}: the tag {tag} is listed by {' and '.join(names)}: a row belongs to one domain"
    total = sum(proportions_of(mapping).values())
    if total > 1 + 1e-9:
        yield f"the proportions in {_WHERE} add up to {total:g}: they are shares of the prompts, 1 in all"


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
    field_names = [field.name for field in dataclasses.fields(Domain)]
    if not isinstance(entry, Mapping):
        yield f"{where} must be a mapping with some of {', '.join(field_names)}, found {entry!r}"
        return
    problems = []
    for name, value in entry.items():
        problem = ""
        number = _is_number(value)
        if name not in field_names:
            problem = unknown("entry", str(name), field_names)
        elif name in ("tags", "reward_funcs"):
            names = _plain(value)
            if not isinstance(names, tuple) or not all(
                isinstance(func_name, str) for func_name in names
            ):
                problem = f"expected a list of names, found {value!r}"
            elif name == "reward_funcs":
                registered = [
                    func for func in names if ":" not in func and not func.endswith(".py")
                ]
                func_names = reward_functions().names()
                wrong = [func for func in registered if func not in func_names]
                if wrong:
                    problem = unknown("reward function", wrong[0], func_names)
                else:
                    problem = ""
        elif name == "reward_weights":
            if not isinstance(value, list | tuple) or not all(map(_is_number, value)):
                problem = f"expected a list of numbers, found {value!r}"
        elif not number and not (name == "proportion" and value is None):
            problem = f"expected a number, found {value!r}"
        elif name == "proportion" and number and not 0 < value <= 1:
            problem = f"must be greater than 0 and at most 1, found {value:g}"
        if problem:
            problems.append(f"{where}.{name}: {problem}")
    yield from problems or check_weights(
        where, _plain(entry.get("reward_funcs", ())), entry.get("reward_weights", ())
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _plain(value: Any) -> Any:  # noqa: ANN401  (what the user has written)
    """A list, or a single text, as a tuple."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        return tuple(value)
    return value

"""Which reward functions apply to a row, with which weights; and the checks of both before a run.

A row's functions are decided here, in this order: those of its domain, its own (the column
``reward_funcs``), those of the run. Rows that could not be rewarded are found before a run starts
(``RowChecks``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyasync.config.schema import EnvironmentConfig
from skyasync.config.schema.environment import Domain, domains_of, judges
from skyasync.config.schema.judges import (
    PREFIX,
    JudgeConfig,
    is_judge,
    is_reference,
    is_text,
    judges_of,
    shows_response,
)
from skyasync.errors import UserError, unknown
from skyasync.registry import absolute_reference
from skyasync.rewards import REWARDS, capabilities_of, is_remote, sandbox
from skyasync.rewards.judge_prompts import (
    check_placeholders,
    known_to_judge,
    parser_function,
    prompt_text,
)
from skyasync.rewards.reward_functions import RewardFunction, reward_function
from skyasync.rewards.signature import CODE_SANDBOX, seen

ENV_KEY = "rewards"  # where an environment finds these settings in its env_config


@dataclass(frozen=True)
class RewardSettings:
    """``environment.reward_*`` and ``environment.domains``; ``registered``: the functions that the
    program added."""

    funcs: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    timeout_s: float = 10.0
    on_timeout: str = "zero"
    code_sandbox: str = "auto"
    domains: Mapping[str, Domain] = field(default_factory=dict)
    registered: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, environment: EnvironmentConfig) -> RewardSettings:
        """The settings of a run."""
        return cls(
            tuple(environment.reward_funcs),
            tuple(environment.reward_weights),
            environment.reward_timeout_s,
            environment.reward_on_timeout,
            environment.code_sandbox,
            domains_of(environment.domains),
            REWARDS.user_parts(),
        )

    def named(self) -> list[str]:
        """All functions that the run itself names, but for judges; its rows may name others."""
        named = {
            *self.funcs,
            *(func for domain in self.domains.values() for func in domain.reward_funcs),
        }
        return sorted(func for func in named if not is_judge(func))

    def weighted(self, row: Mapping[str, Any]) -> list[tuple[str, float]]:
        """The names and weights of all functions that apply to a row with these columns.

        Raises:
            UserError: if there are none.
        """
        name = row.get("domain") or ""
        domain = self.domains.get(name, Domain())
        own = row.get("reward_funcs") or ()
        if domain.reward_funcs:
            funcs = domain.reward_funcs
            weights = domain.reward_weights
        elif own:
            funcs = (own,) if isinstance(own, str) else tuple(own)
            weights = ()
        else:
            funcs = self.funcs
            weights = self.weights
        if not funcs and name and self.domains and name not in self.domains:
            message = unknown("domain", name, self.domains)
            raise UserError(
                f"{message} (environment.domains), and environment.reward_funcs is empty"
            )
        if not funcs:
            raise UserError(
                f"no reward function applies to {f'domain {name!r}' if name else 'a row without a domain'}: set "
                f"environment.reward_funcs{f' or environment.domains.{name}.reward_funcs' if name else ''}"
            )
        return [
            (func, weight * domain.scale)
            for func, weight in zip(funcs, weights or [1.0] * len(funcs), strict=True)
        ]


def env_settings(environment: EnvironmentConfig) -> dict[str, Any]:
    """The ``env_config`` of environments: the user's, and these settings."""
    return {**environment.env_config, ENV_KEY: RewardSettings.of(environment)}


def settle_references(environment: EnvironmentConfig) -> None:
    """Make the paths of files absolute, and look up every function once, before any process starts.

    Raises:
        UserError: for a function that does not exist.
    """
    environment.reward_funcs = [
        absolute_reference(_with_function_name(func)) for func in environment.reward_funcs
    ]
    for entry in environment.domains.values():
        if "reward_funcs" in entry:
            funcs = entry["reward_funcs"]
            funcs = [funcs] if isinstance(funcs, str) else funcs
            entry["reward_funcs"] = [
                absolute_reference(_with_function_name(func)) for func in funcs
            ]
    for func in judges(environment):
        if not is_judge(func):
            RewardFunction.of(func)
    if "code_tests" in judges(environment):
        chosen = sandbox.choose(environment.code_sandbox)
        print(
            f"code_tests runs the model's code under {chosen} (environment.code_sandbox)",
            file=sys.stderr,
        )
    for name, judge in environment.judges.items():
        if judge.get("prompt") and not is_text(judge["prompt"]):
            judge["prompt"] = str(Path(judge["prompt"]).expanduser().resolve())
            text = prompt_text(str(name), JudgeConfig(**judge))
            for problem in shows_response(text):
                raise UserError(f"environment.judges.{name}{problem} ({judge['prompt']})")
        if is_reference(judge.get("parser", "")):
            judge["parser"] = absolute_reference(judge["parser"])
            parser_function(judge["parser"])


class RowChecks:
    """A row passes if it has all that its judges' prompts show, the columns that its reward
    functions take as parameters, and all that they check themselves (``Capabilities.check``)."""

    def __init__(self, environment: EnvironmentConfig) -> None:
        self._settings = RewardSettings.of(environment)
        self._prompts = {
            name: prompt_text(name, judge) for name, judge in judges_of(environment.judges).items()
        }

    def check(self, known: Mapping[str, Any]) -> None:
        """Raise ``UserError`` for what is missing.

        Args:
            known: what judges and functions get, with an empty response.
        """
        for func, _ in self._settings.weighted(known):
            if is_judge(func):
                name = func.removeprefix(PREFIX)
                if name not in self._prompts:
                    raise UserError(f"{unknown('judge', name, self._prompts)} (environment.judges)")
                check_placeholders(name, self._prompts[name], known_to_judge(known))
                continue
            function = reward_function(func, self._settings.registered.get(func))
            if function.looks_at_tokens:
                tokens = seen("", "", [], [], known.get("label"))
            else:
                tokens = {}
            shown = {**known, CODE_SANDBOX: self._settings.code_sandbox, **tokens}
            function.arguments(shown)  # raises for one that is missing
            capabilities_of(function.function).check(shown)

    def check_metric(self, metric: str, known: Mapping[str, Any]) -> None:
        """Raises ``UserError`` if no function of the row can report this metric: names start with
        the function's."""
        names = short_names([func for func, _ in self._settings.weighted(known)])
        own = metric.removeprefix(f"{known.get('domain')}/")
        if own.partition("/")[0] not in {name.partition("/")[0] for name in names}:
            raise UserError(
                unknown("metric in trainer.algorithm.dynamic_sampling.metric", metric, names)
            )


def short_names(funcs: Sequence[str]) -> list[str]:
    """The functions' names in metrics: of a reference its attribute, if that is unique."""
    short = ["remote_reward" if is_remote(func) else func.rpartition(":")[2] for func in funcs]
    return [
        name if short.count(name) == 1 else func for name, func in zip(short, funcs, strict=True)
    ]


def _with_function_name(func: str) -> str:
    """A file alone means its ``reward_func``."""
    if func.endswith(".py") and not is_remote(func):
        return f"{func}:reward_func"
    return func

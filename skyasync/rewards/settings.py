"""The reward functions of a row and their weights; and the checks of both before a run.

A row's functions are those of its domain, or else those of its column ``reward_funcs``, or else
those of the run. Rows that could not be rewarded are found before a run starts (``RowChecks``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
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
    judge_inputs,
    parser_function,
    prompt_text,
)
from skyasync.rewards.reward_functions import RewardFunction, reward_function
from skyasync.rewards.signature import CODE_SANDBOX, Function, Inputs, seen

ENV_KEY = "rewards"  # where an environment finds these settings in its env_config


@dataclass(frozen=True)
class RewardSettings:
    """``environment.reward_*`` and ``environment.domains``.

    Args:
        registered: the functions that the program registered, by name.
    """

    funcs: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    timeout_s: float = 10.0
    on_timeout: str = "zero"
    code_sandbox: str = "auto"
    domains: Mapping[str, Domain] = field(default_factory=dict)
    registered: Mapping[str, Function] = field(default_factory=dict)

    @classmethod
    def of(cls, environment: EnvironmentConfig) -> RewardSettings:
        """The settings of a run."""
        return cls(
            funcs=tuple(environment.reward_funcs),
            weights=tuple(environment.reward_weights),
            timeout_s=environment.reward_timeout_s,
            on_timeout=environment.reward_on_timeout,
            code_sandbox=environment.code_sandbox,
            domains=domains_of(environment.domains),
            registered=REWARDS.user_parts(),
        )

    def named(self) -> list[str]:
        """All functions except judges that the run's settings name; its rows may name others."""
        funcs = set(self.funcs)
        for domain in self.domains.values():
            funcs.update(domain.reward_funcs)
        return sorted(func for func in funcs if not is_judge(func))

    def weighted(self, row: Mapping[str, Any]) -> list[tuple[str, float]]:
        """The names and weights of all functions that apply to a row with these columns.

        Raises:
            UserError: if there are none.
        """
        name = row.get("domain") or ""
        domain = self.domains.get(name, Domain())
        row_funcs = row.get("reward_funcs") or ()
        if domain.reward_funcs:
            funcs = domain.reward_funcs
            weights = domain.reward_weights
        elif row_funcs:
            funcs = (row_funcs,) if isinstance(row_funcs, str) else tuple(row_funcs)
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
            subject = "a row without a domain"
            fix = "environment.reward_funcs"
            if name:
                subject = f"domain {name!r}"
                fix += f" or environment.domains.{name}.reward_funcs"
            raise UserError(f"no reward function applies to {subject}: set {fix}")
        weights = weights or (1.0,) * len(funcs)
        return [(func, weight * domain.scale) for func, weight in zip(funcs, weights, strict=True)]


def env_settings(environment: EnvironmentConfig) -> dict[str, Any]:
    """The ``env_config`` of environments: the user's, and these settings."""
    return {**environment.env_config, ENV_KEY: RewardSettings.of(environment)}


def settle_references(environment: EnvironmentConfig) -> None:
    """Make the paths of files absolute, and look up every function once, before any process starts.

    Other processes of the run work in other folders.

    Raises:
        UserError: for a function that does not exist.
    """
    environment.reward_funcs = _absolute(environment.reward_funcs)
    for entry in environment.domains.values():
        if "reward_funcs" in entry:
            funcs = entry["reward_funcs"]
            entry["reward_funcs"] = _absolute([funcs] if isinstance(funcs, str) else funcs)
    for func in judges(environment):
        if not is_judge(func):
            RewardFunction.of(func)  # raises if it does not exist
    if "code_tests" in judges(environment):
        backend = sandbox.choose(environment.code_sandbox)
        print(
            f"code_tests runs the model's code under {backend} (environment.code_sandbox)",
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
    """Checks that a row can be rewarded.

    It needs the columns that its judges' prompts show and that its reward functions take as
    parameters, and must pass the functions' ``Capabilities.check``.
    """

    def __init__(self, environment: EnvironmentConfig) -> None:
        self._settings = RewardSettings.of(environment)
        self._prompts: dict[str, str] = {}
        for name, judge in judges_of(environment.judges).items():
            self._prompts[name] = prompt_text(name, judge)

    def check(self, inputs: Inputs) -> None:
        """Raise ``UserError`` if the row cannot be rewarded.

        Args:
            inputs: the inputs of judges and functions, with an empty response.
        """
        for func, _ in self._settings.weighted(inputs):
            if is_judge(func):
                name = func.removeprefix(PREFIX)
                if name not in self._prompts:
                    raise UserError(f"{unknown('judge', name, self._prompts)} (environment.judges)")
                check_placeholders(name, self._prompts[name], judge_inputs(inputs))
                continue
            function = reward_function(func, self._settings.registered.get(func))
            function_inputs = dict(inputs)
            function_inputs[CODE_SANDBOX] = self._settings.code_sandbox
            if function.looks_at_tokens:
                function_inputs |= seen("", "", [], [], inputs.get("label"))
            function.arguments(function_inputs)  # raises for one that is missing
            capabilities_of(function.function).check(function_inputs)

    def check_metric(self, metric: str, inputs: Inputs) -> None:
        """Raise ``UserError`` if no function of the row can report this metric.

        A metric's name begins with its function's.
        """
        names = short_names([func for func, _ in self._settings.weighted(inputs)])
        reporters = {name.partition("/")[0] for name in names}
        short_metric = metric.removeprefix(f"{inputs.get('domain')}/")
        if short_metric.partition("/")[0] not in reporters:
            raise UserError(
                unknown("metric in trainer.algorithm.dynamic_sampling.metric", metric, names)
            )


def short_names(funcs: Sequence[str]) -> list[str]:
    """The functions' names in metrics: a reference's attribute if that is unique, or all of it."""
    short = ["remote_reward" if is_remote(func) else func.rpartition(":")[2] for func in funcs]
    return [
        name if short.count(name) == 1 else func for name, func in zip(short, funcs, strict=True)
    ]


def _absolute(funcs: Sequence[str]) -> list[str]:
    """Names of functions, files with their absolute paths; a file alone means ``reward_func``."""
    names = []
    for func in funcs:
        if func.endswith(".py") and not is_remote(func):
            func = f"{func}:reward_func"
        names.append(absolute_reference(func))
    return names

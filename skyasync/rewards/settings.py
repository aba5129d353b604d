"""Which reward functions judge a row, with which weights.

Invariant: a row's functions are decided in one place and in this order: its domain's, its own (the column
``reward_funcs``), the run's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyasync.config.schema import EnvironmentConfig
from skyasync.config.schema.environment import Domain, domains_of, judges
from skyasync.config.schema.judges import JudgeConfig, is_judge, is_reference, is_text, shows_response
from skyasync.errors import UserError, unknown
from skyasync.registry import absolute_reference
from skyasync.rewards.panel import Member
from skyasync.rewards.registry import REWARDS, is_remote

ENV_KEY = "rewards"  # where an environment finds these settings in its env_config


@dataclass(frozen=True)
class RewardSettings:
    """``environment.reward_*`` and ``environment.domains``; ``registered``: the functions that the program added."""

    funcs: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    timeout_s: float = 10.0
    unjudged: str = "zero"
    code_sandbox: str = "auto"
    domains: Mapping[str, Domain] = field(default_factory=dict)
    registered: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, environment: EnvironmentConfig) -> RewardSettings:
        """From an ``EnvironmentConfig``."""
        return cls(
            tuple(environment.reward_funcs),
            tuple(environment.reward_weights),
            environment.reward_timeout_s,
            environment.reward_unjudged,
            environment.code_sandbox,
            domains_of(environment.domains),
            REWARDS.user_parts(),
        )

    def named(self) -> list[str]:
        """All functions that the run itself names, but for judges; its rows may name others."""
        named = {*self.funcs, *(func for domain in self.domains.values() for func in domain.reward_funcs)}
        return sorted(func for func in named if not is_judge(func))

    def functions(self, row: Mapping[str, Any]) -> list[tuple[str, float]]:
        """Those of them that are no judges."""
        return [(func, weight) for func, weight in self.weighted(row) if not is_judge(func)]

    def weighted(self, row: Mapping[str, Any]) -> list[tuple[str, float]]:
        """The names and weights of the functions that judge a row with these columns.

        Raises:
            UserError: if there are none.
        """
        name = row.get("domain") or ""
        domain = self.domains.get(name, Domain())
        own = row.get("reward_funcs") or ()
        if domain.reward_funcs:
            funcs, weights = domain.reward_funcs, domain.reward_weights
        elif own:
            funcs, weights = (own,) if isinstance(own, str) else tuple(own), ()
        else:
            funcs, weights = self.funcs, self.weights
        if not funcs:
            raise UserError(_nobody(name, self.domains))
        return [
            (func, weight * domain.scale) for func, weight in zip(funcs, weights or [1.0] * len(funcs), strict=True)
        ]


def env_settings(environment: EnvironmentConfig) -> dict[str, Any]:
    """What environments are handed: the user's ``env_config``, and these settings."""
    return {**environment.env_config, ENV_KEY: RewardSettings.of(environment)}


def settle_references(environment: EnvironmentConfig) -> None:
    """Files by their absolute path, and every function found once, before any process starts.

    Raises:
        UserError: for a function that does not exist.
    """
    environment.reward_funcs = [absolute_reference(_whole(func)) for func in environment.reward_funcs]
    for entry in environment.domains.values():
        if "reward_funcs" in entry:
            funcs = entry["reward_funcs"]
            funcs = [funcs] if isinstance(funcs, str) else funcs
            entry["reward_funcs"] = [absolute_reference(_whole(func)) for func in funcs]
    for func in judges(environment):
        if not is_judge(func):
            Member.of(func)
    if "code_tests" in judges(environment):
        from skyasync.rewards import sandbox

        chosen = sandbox.choose(environment.code_sandbox)
        print(f"code_tests runs the model's code under {chosen} (environment.code_sandbox)", file=sys.stderr)
    for name, judge in environment.judges.items():
        _settle_judge(str(name), judge)


def _settle_judge(name: str, judge: dict[str, Any]) -> None:
    from skyasync.rewards.llm_judge import prompt_text
    from skyasync.rewards.verdicts import Reader

    if judge.get("prompt") and not is_text(judge["prompt"]):
        judge["prompt"] = str(Path(judge["prompt"]).expanduser().resolve())
        text = prompt_text(name, JudgeConfig(**judge))
        for problem in shows_response(text):
            raise UserError(f"environment.judges.{name}{problem} ({judge['prompt']})")
    if is_reference(judge.get("parser", "")):
        judge["parser"] = absolute_reference(judge["parser"])
        Reader(judge["parser"]).check()


def short_names(funcs: Sequence[str]) -> list[str]:
    """The names that the functions' metrics bear: of a reference the attribute, where no other bears it."""
    short = ["remote_reward" if is_remote(func) else func.rpartition(":")[2] for func in funcs]
    return [name if short.count(name) == 1 else func for name, func in zip(short, funcs, strict=True)]


def _whole(func: str) -> str:
    """A file alone means its ``reward_func``."""
    return f"{func}:reward_func" if func.endswith(".py") and not is_remote(func) else func


def _nobody(domain: str, domains: Mapping[str, Domain]) -> str:
    if domain and domains and domain not in domains:
        return f"{unknown('domain', domain, domains)} (environment.domains), and environment.reward_funcs is empty"
    return (
        f"no reward function judges {f'domain {domain!r}' if domain else 'a row without a domain'}: set "
        f"environment.reward_funcs{f' or environment.domains.{domain}.reward_funcs' if domain else ''}"
    )

"""Rows that nothing could judge, found before a run begins.

Invariant: a row without complaint has all that its judges' prompts show, the columns that its reward functions take as
parameters, and all that they have looked for (``checking``); a function that looks for nothing is not called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyasync.config.schema import EnvironmentConfig
from skyasync.config.schema.judges import PREFIX, is_judge, judges_of
from skyasync.errors import UserError, unknown
from skyasync.rewards.llm_judge import prompt_text
from skyasync.rewards.panel import member_of
from skyasync.rewards.settings import RewardSettings, short_names
from skyasync.rewards.signature import CODE_SANDBOX, seen
from skyasync.rewards.verdicts import check_placeholders, known_to_judge


class RowChecks:
    """Looks at rows as ``environment.*`` has them judged."""

    def __init__(self, environment: EnvironmentConfig) -> None:
        self._settings = RewardSettings.of(environment)
        self._prompts = {
            name: prompt_text(name, judge) for name, judge in judges_of(environment.judges).items()
        }  # fmt: skip

    def check(self, known: Mapping[str, Any]) -> None:
        """Raises ``UserError`` for what is missing.

        Args:
            known: as judges and functions are told, the response being empty.
        """
        for func, _ in self._settings.weighted(known):
            if is_judge(func):
                name = func.removeprefix(PREFIX)
                if name not in self._prompts:
                    raise UserError(f"{unknown('judge', name, self._prompts)} (environment.judges)")
                check_placeholders(name, self._prompts[name], known_to_judge(known))
                continue
            member = member_of(func, self._settings.registered.get(func))
            tokens = seen("", "", [], [], known.get("label")) if member.looks_at_tokens else {}
            shown = {**known, CODE_SANDBOX: self._settings.code_sandbox, **tokens}
            member.check(shown)
            if check := getattr(member.function, "check", None):
                check(shown)

    def check_metric(self, metric: str, known: Mapping[str, Any]) -> None:
        """Raises ``UserError`` if none of a row's functions can report this metric; what follows ``name/`` they choose
        themselves."""
        names = short_names([func for func, _ in self._settings.weighted(known)])
        own = metric.removeprefix(f"{known.get('domain')}/")
        if own.partition("/")[0] not in {name.partition("/")[0] for name in names}:
            raise UserError(unknown("metric in trainer.algorithm.dynamic_sampling.metric", metric, names))

"""One turn, judged by reward functions: the sum of their weighted scores.

Invariant: every function's own score is a metric under its name, unweighted, and again under its domain's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput, Conversation
from skyasync.envs.registry import ENVS
from skyasync.rewards.forms import seen
from skyasync.rewards.panel import Member, judge, load
from skyasync.rewards.score import Score
from skyasync.rewards.settings import ENV_KEY, RewardSettings, short_names


@ENVS.register("reward")
class RewardEnv(BaseTextEnv):
    """The functions are those of ``environment.domains``, the row's ``reward_funcs``, or ``environment.reward_funcs``.

    Args:
        env_config: ``RewardSettings`` under the key ``rewards``.
        extras: the row's columns. The right answer is ``label``, or else ``reward_spec.ground_truth``, or ``answer``.

    Raises:
        UserError: if no function judges the row, or one that does not exist.
        TimeoutError: if a function gives no verdict in time, and ``environment.reward_unjudged`` is raise.
    """

    @classmethod
    def instant(cls, env_config: dict[str, Any], extras: dict[str, Any]) -> bool:
        """Where all functions are marked as quick."""
        settings: RewardSettings = env_config.get(ENV_KEY, RewardSettings())
        return all(_member(name, settings.registered.get(name)).quick for name, _ in settings.weighted(extras))

    @classmethod
    def sees_tokens(cls, env_config: dict[str, Any], extras: dict[str, Any]) -> bool:
        """Where a function looks at them."""
        settings: RewardSettings = env_config.get(ENV_KEY, RewardSettings())
        return any(
            _member(name, settings.registered.get(name)).looks_at_tokens for name, _ in settings.weighted(extras)
        )

    @classmethod
    def load(cls, env_config: dict[str, Any]) -> None:
        """Import the functions that the run names, here and where they are called."""
        settings: RewardSettings = env_config.get(ENV_KEY, RewardSettings())
        load([_member(name, settings.registered.get(name)) for name in settings.named()])

    def __init__(self, env_config: dict[str, Any] | None = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        self._settings: RewardSettings = self.env_config.get(ENV_KEY, RewardSettings())
        weighted = self._settings.weighted(self.extras)
        self._weights = [weight for _, weight in weighted]
        self._members = [_member(name, self._settings.registered.get(name)) for name, _ in weighted]
        self._messages: Conversation = []
        self._scores: list[Score] = []

    def init(self, prompt: Conversation) -> tuple[Conversation, dict[str, Any]]:
        self._messages = prompt
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        known = {
            **self.extras,
            "prompt": _text(self._messages[-1]["content"]) if self._messages else "",
            "messages": self._messages,
            "response": action,
            "label": right_answer(self.extras),
        }
        if self.seen is not None:
            known |= seen(*self.seen, label=known["label"])
        self._scores = judge(self._members, known, self._settings.timeout_s)
        self._refuse_unjudged()
        reward = sum(w * score.reward for w, score in zip(self._weights, self._scores, strict=True))
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}

    def get_metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        names = short_names([member.name for member in self._members])
        for name, member, score in zip(names, self._members, self._scores, strict=False):
            metrics |= {name: score.reward, **{f"{name}/{key}": value for key, value in score.metrics.items()}}
            if not member.quick:
                metrics[f"{name}/unjudged"] = float(score.unjudged)
        domain = self.extras.get("domain")
        return metrics | ({f"{domain}/{name}": value for name, value in metrics.items()} if domain else {})

    def _refuse_unjudged(self) -> None:
        if self._settings.unjudged == "raise":
            for member, score in zip(self._members, self._scores, strict=True):
                if score.unjudged:
                    raise TimeoutError(
                        f"reward function {member.name} gave no verdict within {self._settings.timeout_s:g} s "
                        f"(environment.reward_timeout_s); environment.reward_unjudged=zero counts it as 0"
                    )


def right_answer(row: dict[str, Any]) -> object:
    """The row's label: ``label``, or else ``reward_spec.ground_truth``, or ``answer``; None if it has none of them."""
    candidates = (row.get("label"), (row.get("reward_spec") or {}).get("ground_truth"), row.get("answer"))
    return next((value for value in candidates if value is not None), None)


def _text(content: str | Sequence[Mapping[str, str]]) -> str:
    """A message's text, also of content in parts."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


@lru_cache(maxsize=256)
def _member(name: str, function: Callable[..., Any] | None) -> Member:
    return Member.of(name, function)

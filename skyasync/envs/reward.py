"""Environments of one turn: the weighted sum of reward functions, and GSM8K.

Every function's own score is a metric under its name, unweighted, and again under its domain's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from skyasync.config.schema.judges import is_judge
from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput, Conversation
from skyasync.envs.registry import ENVS
from skyasync.errors import UserError
from skyasync.rewards.answer_match import gsm8k
from skyasync.rewards.reward_functions import RewardFunction, load_functions, reward_function, score_response
from skyasync.rewards.score import Score
from skyasync.rewards.settings import ENV_KEY, RewardSettings, short_names
from skyasync.rewards.signature import CODE_SANDBOX, seen


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
        return all(reward_function(name, settings.registered.get(name)).quick for name, _ in settings.functions(extras))

    @classmethod
    def sees_tokens(cls, env_config: dict[str, Any], extras: dict[str, Any]) -> bool:
        """Where a function looks at them."""
        settings: RewardSettings = env_config.get(ENV_KEY, RewardSettings())
        return any(
            reward_function(name, settings.registered.get(name)).looks_at_tokens
            for name, _ in settings.functions(extras)
        )

    @classmethod
    def judged_by(cls, env_config: dict[str, Any], extras: dict[str, Any]) -> list[tuple[str, float]]:
        """All reward functions of the row with their weights, judges included, where one of them is a judge.

        Judges are asked by whoever plays the episode (``skyasync.rollout.generator``), behind its end.
        """
        settings: RewardSettings = env_config.get(ENV_KEY, RewardSettings())
        weighted = settings.weighted(extras)
        return weighted if any(is_judge(func) for func, _ in weighted) else []

    @classmethod
    def load(cls, env_config: dict[str, Any]) -> None:
        """Import the functions that the run names, here and where they are called."""
        settings: RewardSettings = env_config.get(ENV_KEY, RewardSettings())
        load_functions([reward_function(name, settings.registered.get(name)) for name in settings.named()])

    _scores: Sequence[Score] = ()  # until there is a step

    @cached_property
    def _settings(self) -> RewardSettings:
        settings: RewardSettings = self.env_config.get(ENV_KEY, RewardSettings())
        return settings

    @cached_property
    def _functions(self) -> list[RewardFunction]:
        return [reward_function(name, self._settings.registered.get(name)) for name, _ in self._weighted]

    @cached_property
    def _weighted(self) -> list[tuple[str, float]]:
        return self._settings.functions(self.extras)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        known = known_of(self.extras, self.opening, action)
        known[CODE_SANDBOX] = self._settings.code_sandbox
        if self.seen is not None:
            known |= seen(*self.seen, label=known["label"])
        self._scores = score_response(self._functions, known, self._settings.timeout_s)
        self._refuse_unjudged()
        reward = sum(w * score.reward for (_, w), score in zip(self._weighted, self._scores, strict=True))
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}

    def get_metrics(self) -> dict[str, float]:
        funcs = [func for func, _ in self._settings.weighted(self.extras)]
        own = [name for name, func in zip(short_names(funcs), funcs, strict=True) if not is_judge(func)]
        return metrics_of(
            own, self._scores, [function.quick for function in self._functions], self.extras.get("domain")
        )

    def _refuse_unjudged(self) -> None:
        if self._settings.unjudged == "raise":
            for function, score in zip(self._functions, self._scores, strict=True):
                if score.unjudged:
                    raise TimeoutError(
                        f"reward function {function.name} gave no verdict within {self._settings.timeout_s:g} s "
                        f"(environment.reward_timeout_s); environment.reward_unjudged=zero counts it as 0"
                    )


@ENVS.register("gsm8k")
class GSM8kEnv(BaseTextEnv):
    """Expects ``reward_spec = {"ground_truth": "72"}`` (or ``answer``, or ``label``) among the row's columns.

    Raises:
        UserError: if none of them is there: every answer would be wrong.
    """

    @classmethod
    def instant(cls, env_config: dict[str, Any], extras: dict[str, Any]) -> bool:
        return True

    def step(self, action: str) -> BaseTextEnvStepOutput:
        truth = right_answer(self.extras)
        if truth is None:
            raise UserError(f"gsm8k needs reward_spec.ground_truth or answer; the row has: {', '.join(self.extras)}")
        return {"observations": [], "reward": gsm8k(action, truth), "done": True, "metadata": {}}


def known_of(row: dict[str, Any], messages: Conversation, response: str) -> dict[str, Any]:
    """What the functions that judge a response may ask for: the row's columns, the conversation, the right answer."""
    return {
        **row,
        "prompt": _text(messages[-1]["content"]) if messages else "",
        "messages": messages,
        "response": response,
        "label": right_answer(row),
    }


def metrics_of(
    names: Sequence[str], scores: Sequence[Score], quick: Sequence[bool], domain: str | None
) -> dict[str, float]:
    """Each function's own score under its name, what it says besides, and all of it again under the domain's."""
    metrics: dict[str, float] = {}
    for name, score, never_lost in zip(names, scores, quick, strict=False):  # an episode may end without a step
        own = {name: score.reward} if score.applies else {}
        metrics |= {**own, **{f"{name}/{key}": value for key, value in score.metrics.items()}}
        if not never_lost:
            metrics[f"{name}/unjudged"] = float(score.unjudged)
    return metrics | ({f"{domain}/{name}": value for name, value in metrics.items()} if domain else {})


def right_answer(row: dict[str, Any]) -> object:
    """The row's label: ``label``, or else the ``ground_truth`` of ``reward_spec`` (SkyRL) or ``reward_model`` (verl),
    or ``answer``; None if it has none of them."""
    nested = (row.get(column) for column in ("reward_spec", "reward_model"))
    truths = (column.get("ground_truth") for column in nested if isinstance(column, Mapping))
    candidates = (row.get("label"), *truths, row.get("answer"))
    return next((value for value in candidates if value is not None), None)


def _text(content: str | Sequence[Mapping[str, str]]) -> str:
    """A message's text, also of content in parts."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)

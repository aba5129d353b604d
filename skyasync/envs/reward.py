"""Environments of one turn: the weighted sum of reward functions, and GSM8K.

Every function's score is a metric under its name, unweighted, and again under its domain's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from skyasync.config.schema.judges import is_judge
from skyasync.envs import ENVS
from skyasync.envs.base import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    Conversation,
    EnvConfig,
    Metrics,
    Row,
)
from skyasync.errors import UserError
from skyasync.rewards.answer_match import gsm8k
from skyasync.rewards.reward_functions import (
    RewardFunction,
    load_functions,
    reward_function,
    score_response,
)
from skyasync.rewards.settings import ENV_KEY, RewardSettings, short_names
from skyasync.rewards.signature import CODE_SANDBOX, Score, seen


@ENVS.register("reward")
class RewardEnv(BaseTextEnv):
    """One turn, rewarded by reward functions.

    They are those of ``environment.domains``, or else of the row's column ``reward_funcs``, or else
    of ``environment.reward_funcs``.

    Args:
        env_config: ``RewardSettings`` under the key ``rewards``.
        extras: the row's columns. The right answer is ``label``, or else
            ``reward_spec.ground_truth``, or ``answer``.

    Raises:
        UserError: if no function applies to the row, or one does not exist.
        TimeoutError: if a function gives no reward in time, and ``environment.reward_on_timeout``
            is raise.
    """

    @classmethod
    def instant(cls, env_config: EnvConfig, extras: Row) -> bool:
        """Whether all functions are marked as quick."""
        return all(function.quick for function, _ in _functions(env_config, extras))

    @classmethod
    def sees_tokens(cls, env_config: EnvConfig, extras: Row) -> bool:
        """Whether a function takes the engine's tokens."""
        return any(function.looks_at_tokens for function, _ in _functions(env_config, extras))

    @classmethod
    def graded_by(cls, env_config: EnvConfig, extras: Row) -> list[tuple[str, float]]:
        """All reward functions of the row with their weights, if a judge is among them.

        ``skyasync.rollout.generator`` asks the judges, after the episode's end.
        """
        weighted = _settings(env_config).weighted(extras)
        if any(is_judge(func) for func, _ in weighted):
            return weighted
        return []

    @classmethod
    def load(cls, env_config: EnvConfig) -> None:
        """Import the functions that the run names, in this process and in the reward workers."""
        settings = _settings(env_config)
        functions = []
        for name in settings.named():
            functions.append(reward_function(name, settings.registered.get(name)))
        load_functions(functions)

    _scores: Sequence[Score] = ()  # empty if the episode ends without a step

    @cached_property
    def _weighted(self) -> list[tuple[RewardFunction, float]]:
        return _functions(self.env_config, self.extras)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        settings = _settings(self.env_config)
        inputs = reward_inputs(self.extras, self.opening, action)
        inputs[CODE_SANDBOX] = settings.code_sandbox
        if self.seen is not None:
            inputs |= seen(*self.seen, label=inputs["label"])
        functions = [function for function, _ in self._weighted]
        self._scores = score_response(functions, inputs, settings.timeout_s)
        for function, score in zip(functions, self._scores, strict=True):
            if score.no_reward and settings.on_timeout == "raise":
                raise TimeoutError(
                    f"reward function {function.name} gave no reward within {settings.timeout_s:g} s "
                    f"(environment.reward_timeout_s); environment.reward_on_timeout=zero counts it as 0"
                )
        weighted = []
        for (_, weight), score in zip(self._weighted, self._scores, strict=True):
            weighted.append(weight * score.reward)
        return {"observations": [], "reward": sum(weighted), "done": True, "metadata": {}}

    def get_metrics(self) -> Metrics:
        funcs = [func for func, _ in _settings(self.env_config).weighted(self.extras)]
        # Short names are unique among all functions of the row, so judges are left out afterwards.
        names = []
        for name, func in zip(short_names(funcs), funcs, strict=True):
            if not is_judge(func):
                names.append(name)
        quick = [function.quick for function, _ in self._weighted]
        return metrics_of(names, self._scores, quick, self.extras.get("domain"))


def _settings(env_config: EnvConfig) -> RewardSettings:
    settings: RewardSettings = env_config.get(ENV_KEY, RewardSettings())
    return settings


def _functions(env_config: EnvConfig, row: Row) -> list[tuple[RewardFunction, float]]:
    """The functions that apply to a row, without judges, and their weights."""
    settings = _settings(env_config)
    functions = []
    for name, weight in settings.weighted(row):
        if not is_judge(name):
            functions.append((reward_function(name, settings.registered.get(name)), weight))
    return functions


@ENVS.register("gsm8k")
class GSM8kEnv(BaseTextEnv):
    """Needs the column ``reward_spec = {"ground_truth": "72"}``, or ``answer``, or ``label``.

    Raises:
        UserError: if the row has none of them: every answer would be wrong.
    """

    @classmethod
    def instant(cls, env_config: EnvConfig, extras: Row) -> bool:
        return True

    def step(self, action: str) -> BaseTextEnvStepOutput:
        truth = right_answer(self.extras)
        if truth is None:
            raise UserError(
                f"gsm8k needs reward_spec.ground_truth or answer; the row has: {', '.join(self.extras)}"
            )
        return {"observations": [], "reward": gsm8k(action, truth), "done": True, "metadata": {}}


def reward_inputs(row: Row, messages: Conversation, response: str) -> dict[str, Any]:
    """The inputs of reward functions: the row's columns, the conversation, response and label."""
    content: str | Sequence[Mapping[str, str]] = messages[-1]["content"] if messages else ""
    if not isinstance(content, str):  # a list of parts, as messages with images have it
        content = "".join(part.get("text", "") for part in content)
    return {
        **row,
        "prompt": content,
        "messages": messages,
        "response": response,
        "label": right_answer(row),
    }


def metrics_of(
    names: Sequence[str], scores: Sequence[Score], quick: Sequence[bool], domain: str | None
) -> Metrics:
    """Each function's reward and metrics under its name, and again under the domain's name.

    Args:
        scores: empty if the episode ended without a step.
        quick: of each function; a quick one cannot time out.
    """
    metrics: Metrics = {}
    for name, score, is_quick in zip(names, scores, quick, strict=False):
        if score.applies:
            metrics[name] = score.reward
        for key, value in score.metrics.items():
            metrics[f"{name}/{key}"] = value
        if not is_quick:
            metrics[f"{name}/no_reward"] = float(score.no_reward)
    if not domain:
        return metrics
    return metrics | {f"{domain}/{name}": value for name, value in metrics.items()}


def right_answer(row: Row) -> object:
    """The label of a row; None if it has none.

    It is the first of: ``label``, ``reward_spec.ground_truth`` (SkyRL),
    ``reward_model.ground_truth`` (verl), ``answer``.
    """
    candidates = [row.get("label")]
    for column in ("reward_spec", "reward_model"):
        nested = row.get(column)
        if isinstance(nested, Mapping):
            candidates.append(nested.get("ground_truth"))
    candidates.append(row.get("answer"))
    for value in candidates:
        if value is not None:
            return value
    return None

"""The environment of one episode: it frames the prompt, reads each action, answers and rewards.

Invariant: an environment sees text only; tokens, log-probabilities and versions never pass through it.
"""

from __future__ import annotations

from typing import Any, TypedDict

Message = dict[str, str]
Conversation = list[Message]


class BaseTextEnvStepOutput(TypedDict):
    """What a step gives: ``observations`` (new messages, may be empty), a finite ``reward``, and ``done``."""

    observations: Conversation
    reward: float
    done: bool
    metadata: dict[str, Any]


class BaseTextEnv:
    """Subclass this and override ``step``.

    Args:
        env_config: the run's ``environment.env_config``.
        extras: every column of the dataset's row besides the prompt (answer, label, ...).
    """

    def __init__(self, env_config: dict[str, Any] | None = None, extras: dict[str, Any] | None = None) -> None:
        self.env_config = env_config or {}
        self.extras = extras or {}
        self.turns = 0

    def init(self, prompt: Conversation) -> tuple[Conversation, dict[str, Any]]:
        """The conversation that the episode starts from."""
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judge one response of the model."""
        raise NotImplementedError(f"{type(self).__name__} must define step(action)")

    def close(self) -> None:
        """Release what the episode holds. Called once, also after an error."""

    def get_metrics(self) -> dict[str, float]:
        """Numbers worth averaging over episodes."""
        return {}

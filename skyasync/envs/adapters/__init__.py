"""Environments of other libraries, one file for each; games have one form, ``GameEnv``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput, Conversation, EnvConfig, Row


class GameEnv(BaseTextEnv):
    """A game of another library.

    Its settings are the row's columns, or else those in ``environment.env_config``.

    Args (of these settings):
        seed: of the game. The same row gives the same game, as far as its seed decides it.
        max_steps: the episode ends after so many answers; 0 leaves it to the game.
    """

    #: The key in ``environment.env_config`` with the settings; "" if all of it are settings.
    settings_key: ClassVar[str] = ""
    #: Settings that come before all others.
    made_with: ClassVar[Mapping[str, object]] = {}

    def __init__(self, env_config: EnvConfig | None = None, extras: Row | None = None) -> None:
        super().__init__(env_config, extras)
        if self.settings_key:
            common = self.env_config.get(self.settings_key, {})
        else:
            common = self.env_config
        # The row counts more than the settings of the run.
        self.settings: EnvConfig = {**common, **self.extras, **self.made_with}
        self.seed = int(self.settings.get("seed", 0))
        self.max_steps = int(self.settings.get("max_steps", 0))

    def start(self) -> str:
        """Start the game; returns what is shown below the row's prompt."""
        raise NotImplementedError

    def play(self, action: str) -> tuple[float, bool]:
        """Play an answer; returns the reward, and whether the game has ended."""
        raise NotImplementedError

    def observe(self) -> str:
        """The observation after an answer that did not end the episode."""
        raise NotImplementedError

    def init(self, prompt: Conversation) -> tuple[Conversation, dict[str, Any]]:
        text = self.start()
        if not prompt:
            return [{"role": "user", "content": text}], {}
        *earlier, final = prompt
        return [*earlier, {**final, "content": f"{final['content']}\n{text}".strip("\n")}], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        reward, done = self.play(action)
        done = done or self.turns == self.max_steps
        if done:
            observations = []
        else:
            observations = [{"role": "user", "content": self.observe()}]
        return {"observations": observations, "reward": reward, "done": done, "metadata": {}}

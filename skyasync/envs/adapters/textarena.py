"""TextArena's single-player games as environments.

Invariant: the same row gives the same game: its ``seed`` decides everything that the game draws at random.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput, Conversation, with_text_below
from skyasync.envs.registry import ENVS
from skyasync.errors import MissingExtraError, UserError

if TYPE_CHECKING:
    import textarena


@ENVS.register("textarena", extra="textarena")
class TextArenaEnv(BaseTextEnv):
    """Settings are the row's columns, or else those in ``environment.env_config.textarena``.

    Args (of these settings):
        textarena_id: such as "GuessTheNumber-v0"; the game must be for one player.
        seed: of the game.
        textarena_args: handed to ``textarena.make``.
        max_steps: the episode ends after so many answers, without the game's reward; 0 leaves it to the game.

    A game gives its reward at its end. Answers follow the game's own rules (most want them in square brackets); one
    that it does not take as a move is told so by the game, which ends if that is repeated.
    """

    def __init__(self, env_config: dict[str, Any] | None = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        settings = {**self.env_config.get("textarena", {}), **self.extras}
        if "textarena_id" not in settings:
            raise UserError(
                "textarena needs textarena_id, as a column of the row or in environment.env_config.textarena"
            )
        self._max_steps = int(settings.get("max_steps", 0))
        self._seed = int(settings.get("seed", 0))
        self._game = _make(settings["textarena_id"], dict(settings.get("textarena_args") or {}))
        self._metrics: dict[str, float] = {}
        self._shown = ""  # all that the game has written; it repeats that each time

    def init(self, prompt: Conversation) -> tuple[Conversation, dict[str, Any]]:
        """The row's prompt with the game's rules below it."""
        self._game.reset(num_players=1, seed=self._seed)
        return with_text_below(prompt, self._new_text()), {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        done, _ = self._game.step(action=action)
        reward, observations = 0.0, []
        if done:
            rewards, info = self._game.close()
            reward = float(rewards[0])
            self._metrics = {"invalid_move": float(bool(info[0].get("invalid_move", False)))}
        elif self.turns != self._max_steps:
            observations = [{"role": "user", "content": self._new_text()}]
        done = bool(done) or self.turns == self._max_steps
        self._metrics["steps"] = float(self.turns)
        return {"observations": observations, "reward": reward, "done": done, "metadata": {}}

    def _new_text(self) -> str:
        """What the game has written since the last call, the answer that it repeats included."""
        _, said = self._game.get_observation()
        news, self._shown = said.removeprefix(self._shown), said
        return str(news).strip("\n")

    def get_metrics(self) -> dict[str, float]:
        return self._metrics


def _make(textarena_id: str, args: dict[str, Any]) -> textarena.Env:
    try:
        import textarena
    except ModuleNotFoundError:
        raise MissingExtraError("textarena", "textarena") from None
    try:
        return textarena.make(textarena_id, **args)
    except ValueError as error:
        raise UserError(f"textarena_id {textarena_id!r}: {error}") from error

"""TextArena's single-player games as environments.

Invariant: the same row gives the same game: its ``seed`` decides all random choices of the game.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skyasync.envs import ENVS
from skyasync.envs.adapters import GameEnv
from skyasync.envs.base import EnvConfig, Metrics, Row
from skyasync.errors import MissingExtraError, UserError

if TYPE_CHECKING:
    import textarena


@ENVS.register("textarena", extra="textarena")
class TextArenaEnv(GameEnv):
    """Settings besides those of ``GameEnv``, in the row or in ``environment.env_config.textarena``:

    Args:
        textarena_id: such as "GuessTheNumber-v0"; the game must be for one player.
        textarena_args: passed to ``textarena.make``.

    A game gives its reward at its end, and none if ``max_steps`` ends it. Answers follow the game's
    own rules (most want them in square brackets). The game says if an answer is not a move, and
    ends if that is repeated.
    """

    settings_key = "textarena"

    def __init__(self, env_config: EnvConfig | None = None, extras: Row | None = None) -> None:
        super().__init__(env_config, extras)
        settings = self.settings
        if "textarena_id" not in settings:
            raise UserError(
                "textarena needs textarena_id, as a column of the row or in environment.env_config.textarena"
            )
        self._game = _make(settings["textarena_id"], dict(settings.get("textarena_args") or {}))
        self._metrics: Metrics = {}
        self._shown = ""  # all text of the game so far: each observation repeats it

    def start(self) -> str:
        self._game.reset(num_players=1, seed=self.seed)
        return self.observe()

    def play(self, action: str) -> tuple[float, bool]:
        done, _ = self._game.step(action=action)
        self._metrics["steps"] = float(self.turns)
        if not done:
            return 0.0, False
        rewards, info = self._game.close()  # which gives the results by player
        self._metrics["invalid_move"] = float(bool(info[0].get("invalid_move", False)))
        return float(rewards[0]), True

    def observe(self) -> str:
        """The game's text since the previous call, the answer that it repeats included."""
        _, text = self._game.get_observation()
        added = text.removeprefix(self._shown)
        self._shown = text
        return str(added).strip("\n")

    def get_metrics(self) -> Metrics:
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

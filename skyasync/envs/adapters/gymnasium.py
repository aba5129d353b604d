"""Gymnasium's games with discrete actions as environments: FrozenLake, Taxi, Blackjack, ...

Invariant: the same row gives the same game: its ``seed`` decides the map, the start and every slip.
An answer that names no action costs a turn, changes nothing in the game, and is counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from skyasync.envs import ENVS
from skyasync.envs.adapters import GameEnv
from skyasync.envs.base import EnvConfig, Metrics, Row
from skyasync.errors import MissingExtraError, UserError, unknown

if TYPE_CHECKING:
    import gymnasium

#: Names of actions 0, 1, ... by the game; others are called by their numbers.
ACTIONS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
FIELDS = {"S": "start", "F": "frozen", "H": "hole", "G": "goal"}
#: The player's position in a rendered game, which a terminal shows in colour.
COLOURED = re.compile(r"\x1b\[\d[\d;]*m(.*?)\x1b\[0m", re.DOTALL)


@ENVS.register("gymnasium", extra="gymnasium")
class GymnasiumEnv(GameEnv):
    """Settings besides those of ``GameEnv``, in the row or in ``environment.env_config.gymnasium``:

    Args:
        gym_id: such as "FrozenLake-v1".
        gym_args: passed to ``gymnasium.make`` (``is_slippery``, ...). With ``map_size``
            FrozenLake's map is random.
        view: what FrozenLake shows: the "board", or what is "near", which a very small model can
            read.
        step_reward, invalid_reward: added for every answer, and for one that names no action.
    """

    settings_key = "gymnasium"

    def __init__(self, env_config: EnvConfig | None = None, extras: Row | None = None) -> None:
        super().__init__(env_config, extras)
        settings = self.settings
        if "gym_id" not in settings:
            raise UserError(
                "gymnasium needs gym_id, as a column of the row or in environment.env_config.gymnasium"
            )
        self._step_reward = float(settings.get("step_reward", 0.0))
        self._invalid_reward = float(settings.get("invalid_reward", 0.0))
        self._view = settings.get("view", "board")
        if self._view not in ("board", "near"):
            raise UserError(unknown("view", self._view, ("board", "near")))
        self._is_lake = str(settings["gym_id"]).startswith("FrozenLake")
        self._game = _make(settings["gym_id"], dict(settings.get("gym_args") or {}), self.seed)
        from gymnasium.spaces import Discrete

        space = self._game.action_space
        if not isinstance(space, Discrete):
            raise UserError(
                f"gym_id {settings['gym_id']!r} has the action space {space}: only discrete actions have names"
            )
        names = ACTIONS.get(settings["gym_id"].partition("-")[0], ())
        if len(names) == space.n:
            self.actions = names
        else:
            self.actions = tuple(str(number) for number in range(int(space.n)))
        self._observation: Any = None
        self._earned = 0.0
        self._unparsable = 0
        self._hint = ""

    def start(self) -> str:
        self._observation, _ = self._game.reset(seed=self.seed)
        return self.observe()

    def play(self, action: str) -> tuple[float, bool]:
        number = self.parse(action)
        if number is None:
            self._unparsable += 1
            # Shown above the next observation: the model may not know the names of actions.
            self._hint = f"Answer with one of: {', '.join(self.actions)}.\n"
            return self._step_reward + self._invalid_reward, False
        self._hint = ""
        self._observation, earned, terminated, truncated, _ = self._game.step(number)
        self._earned += float(earned)
        return self._step_reward + float(earned), terminated or truncated

    def parse(self, text: str) -> int | None:
        """The last action that the text names as a word; None if it names none."""
        for word in reversed(re.findall(r"\w+", text.lower())):
            if word in self.actions:
                return self.actions.index(word)
        return None

    def get_metrics(self) -> Metrics:
        return {
            "success": float(self._earned > 0),
            "steps": float(self.turns),
            "unparsable": self._unparsable / max(self.turns, 1),
        }

    def close(self) -> None:
        self._game.close()

    def observe(self) -> str:
        game: Any = self._game.unwrapped
        if self._is_lake:
            rows = [b"".join(row).decode() for row in game.desc]  # an array of single bytes
            at = divmod(int(game.s), game.ncol)  # (row, column)
            if self._view == "near":
                picture = near_view(rows, at)
            else:
                picture = board_view(rows, at)
        elif self._game.render_mode == "ansi":
            picture = COLOURED.sub(r"[\1]", str(self._game.render())).strip("\n")
        else:
            picture = str(self._observation)
        return self._hint + picture


def board_view(rows: Sequence[str], at: tuple[int, int]) -> str:
    """FrozenLake's map (S start, F frozen, H hole, G goal) with P for the player.

    Args:
        at: row and column of the player.
    """
    row, column = at
    lines = list(rows)
    lines[row] = f"{lines[row][:column]}P{lines[row][column + 1 :]}"
    return "\n".join(lines)


def near_view(rows: Sequence[str], at: tuple[int, int]) -> str:
    """The position of FrozenLake's player, and the field in each direction."""
    lines = [f"row {at[0]} column {at[1]}"]
    steps = ((0, -1), (1, 0), (0, 1), (-1, 0))  # (down, right) of each action
    for name, (down, right) in zip(ACTIONS["FrozenLake"], steps, strict=True):
        row = at[0] + down
        column = at[1] + right
        field = "edge"
        if 0 <= row < len(rows) and 0 <= column < len(rows[0]):
            field = FIELDS[rows[row][column]]
        lines.append(f"{name} {field}")
    return "\n".join(lines)


def _make(gym_id: str, args: dict[str, Any], seed: int) -> gymnasium.Env[Any, Any]:
    try:
        import gymnasium
    except ModuleNotFoundError:
        raise MissingExtraError("gymnasium", "gymnasium") from None
    if "map_size" in args:
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        args["desc"] = generate_random_map(int(args.pop("map_size")), seed=seed)
    try:
        entry = gymnasium.spec(gym_id).entry_point
        game_class: object = entry
        if isinstance(entry, str):
            game_class = gymnasium.envs.registration.load_env_creator(entry)
        # The mode must be known before the game is made, and a game rejects one that it lacks.
        modes: Sequence[str] = ()
        if isinstance(game_class, type) and issubclass(game_class, gymnasium.Env):
            modes = game_class.metadata.get("render_modes", ())
        render_mode = "ansi" if "ansi" in modes else None
        return gymnasium.make(gym_id, render_mode=render_mode, **args)
    except gymnasium.error.Error as error:
        raise UserError(f"gym_id {gym_id!r}: {error}") from error

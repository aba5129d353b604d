"""``trainer.reward``: one reward model, or several by name under ``models``, each with a weight and a scale of its own.

Invariant: what ``reward_models`` reads without complaint has been found right by ``check_reward_models``. What several
models say is added up; each is a metric of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from skyasync.config.field import key
from skyasync.config.keys import Key, Keys
from skyasync.config.schema import RewardConfig
from skyasync.config.values import type_name
from skyasync.errors import unknown

METRIC = "reward_model"
"""The one model's own score, unscaled, among an episode's metrics; ``reward_model/<name>`` are those of several."""

WHERE = "trainer.reward.models"
_NAME = re.compile(r"[A-Za-z_][\w-]*")


@dataclass(frozen=True)
class RewardModel:
    """One entry of ``trainer.reward.models``; the keys of the one model are the same."""

    path: str = key("", "Hugging Face name, local folder, or module:function that makes one and returns its path.")
    dtype: str = key("auto", "Dtype of its weights.", choices=("auto", "float32", "bfloat16"))
    weight: float = key(1.0, "Factor of its score in the reward.")
    mean: float = key(0.0, "Subtracted from each of its scores.")
    std: float = key(1.0, "What is left is divided by it.", above=0.0)
    clip: float = key(0.0, "Clamps what comes of that to plus or minus this; 0 is off.", low=0.0)

    def part(self, score: float) -> float:
        """What a score adds to a reward."""
        plain = (score - self.mean) / self.std
        return self.weight * (min(max(plain, -self.clip), self.clip) if self.clip else plain)


def reward_models(reward: RewardConfig) -> dict[str, RewardModel]:
    """All there are, by the names of their metrics."""
    own = reward.model
    one = RewardModel(own.path, own.dtype, reward.weight, reward.mean, reward.std, reward.clip)
    several = {f"{METRIC}/{name}": RewardModel(**entry) for name, entry in reward.models.items()}
    return ({METRIC: one} if own.path else {}) | several


def check_reward_models(models: Mapping[str, object]) -> Iterator[str]:
    """All that is wrong with the entries, one line each."""
    keys = Keys.of(RewardModel)
    for name, entry in models.items():
        where = f"{WHERE}.{name}"
        if not _NAME.fullmatch(str(name)):
            yield f"{where}: a reward model's name has letters, digits, _ and - alone"
        elif not isinstance(entry, Mapping):
            yield f"{where} must be a mapping with path, and weight, mean, std, clip, dtype as needed, found {entry!r}"
        elif not entry.get("path"):
            yield f"{where}.path is empty: name a model for sequence classification with one label"
        else:
            yield from (f"{where}.{given}{problem}" for given, value in entry.items() if (
                problem := _problem(str(given), value, keys)
            ))  # fmt: skip


def _problem(name: str, value: object, keys: Keys) -> str:
    if name not in keys:
        return f": {unknown('entry', name, [key.path for key in keys])}"
    setting = keys[name]
    if setting.choices and value not in setting.choices:
        return f"={value}: {unknown('dtype', str(value), setting.choices)}"
    return _wrong_type(setting, value)


def _wrong_type(setting: Key, value: object) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number if setting.type is float else isinstance(value, str)):
        return f": expected {type_name(setting.type)}, found {value!r}"
    if isinstance(value, int | float) and not (abs(value) < float("inf") and setting.allows(value)):
        return f"={value:g} must be {setting.bounds() or 'finite'}"
    return ""

"""``trainer.reward``: one reward model, or several by name under ``models``, each with a weight and a scale of its own.

Invariant: what ``reward_models`` reads without complaint has been found right by ``check_reward_models``. What several
models say is added up; each is a metric of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skyasync.config.keys import When, entry_problem, key
from skyasync.config.schema.models import ModelConfig
from skyasync.config.values import written

if TYPE_CHECKING:
    from skyasync.config.schema import Config


#: There is a reward model, by itself or among several.
REWARD = When("trainer.reward.model.path", "trainer.reward.models")

METRIC = "reward_model"
"""The one model's own score, unscaled, among an episode's metrics; ``reward_model/<name>`` are those of several."""
WHERE = "trainer.reward.models"
_NAME = re.compile(r"[A-Za-z_][\w-]*")


@dataclass
class RewardConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    models: dict[str, Any] = key({})
    """Several, by name: path, and dtype, weight, mean, std, clip as of the one. What all say is added up."""
    weight: float = key(1.0, when="trainer.reward.model.path")
    """Factor of the reward model's output in the reward, to which it is added."""
    mean: float = key(0.0, when="trainer.reward.model.path")
    """Mean of the model's outputs, measured beforehand: it is subtracted from each."""
    std: float = key(1.0, above=0.0, when="trainer.reward.model.path")
    """Standard deviation of the model's outputs: the difference is divided by it."""
    clip: float = key(0.0, low=0.0, when="trainer.reward.model.path")
    """Clamp the scaled outputs to plus or minus this; 0 is off."""
    threads: int = key(0, low=0)
    """CPU threads per rank of the reward model; 0 takes as many as a policy rank has."""


@dataclass(frozen=True)
class RewardModel:
    """One entry of ``trainer.reward.models``; the keys of the one model are the same."""

    path: str = key("")
    """Hugging Face name, local folder, or module:function that makes one and returns its path."""
    dtype: str = key("auto", choices=("auto", "float32", "bfloat16"))
    """Dtype of its weights."""
    weight: float = key(1.0)
    """Factor of its output in the reward."""
    mean: float = key(0.0)
    """Subtracted from each of its outputs."""
    std: float = key(1.0, above=0.0)
    """What is left is divided by it."""
    clip: float = key(0.0, low=0.0)
    """Clamps what comes of that to plus or minus this; 0 is off."""

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


def check_reward_models(cfg: Config) -> Iterator[str]:
    """Entries that are wrong, and groups that are decided before their rewards are known."""
    reward = cfg.trainer.reward
    for name, entry in reward.models.items():
        where = f"{WHERE}.{name}"
        if not _NAME.fullmatch(str(name)):
            yield f"{where}: a reward model's name has letters, digits, _ and - alone"
        elif not isinstance(entry, Mapping):
            yield f"{where} must be a mapping with path, and weight, mean, std, clip, dtype as needed, found {entry!r}"
        elif not entry.get("path"):
            yield f"{where}.path is empty: name a model for sequence classification with one label"
        else:
            problems = {given: entry_problem(RewardModel, str(given), value) for given, value in entry.items()}
            yield from (f"{where}.{given}{problem}" for given, problem in problems.items() if problem)
    if REWARD(cfg) and cfg.trainer.algorithm.dynamic_sampling.early_end:
        which = f"model.path={reward.model.path}" if reward.model.path else f"models={written(reward.models)}"
        yield (
            f"trainer.algorithm.dynamic_sampling.early_end=true decides a group while it is played, and "
            f"trainer.reward.{which} scores it afterwards: remove one of them"
        )

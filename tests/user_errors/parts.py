"""A user's components, most of them wrong."""

from __future__ import annotations

from typing import Any

from skyasync import BaseTextEnv, RayPPOTrainer


def misspelt_loss(log_probs: Any, old: Any, advantages: Any) -> Any: ...
def without_gradient(anchor: Any, advantages: Any) -> Any: ...
def unset(current: Any, advantages: Any, *, strength: float) -> Any: ...
def anything(*args: Any) -> Any: ...
def misspelt_estimator(scores: Any, mask: Any) -> Any: ...
def misspelt_correction(old: Any, behaviour: Any) -> Any: ...
def misspelt_reduction(masks: Any) -> Any: ...
def grouped(rewards: Any, mask: Any, group_ids: Any) -> Any: ...


class Undeclared(RayPPOTrainer):
    """Reads no setting of its own."""


class Uncorrected(RayPPOTrainer):
    asynchronous = True


class WrongHook(RayPPOTrainer):
    def filter_groups(self) -> Any:  # type: ignore[override]
        return []


class AsyncHook(RayPPOTrainer):
    async def shape_rewards(self, batch: Any) -> Any:  # type: ignore[override]
        return batch


class NoPlan:
    pass


class HalfAnEngine:
    async def start(self) -> None: ...


class Engine:
    start = generate = stream = score = pause = resume = abort = None
    update_weights = sleep = wake = stats = shutdown = None


class Env(BaseTextEnv):
    def step(self, action: str) -> Any: ...


def rows() -> list[dict[str, str]]:
    return [{"prompt": "What comes after one?", "answer": "two"}]


def wrong_rows() -> list[dict[str, str]]:
    return [{"promt": "What comes after one?"}]


def no_rows() -> list[dict[str, str]]:
    return []


def run(data: Any, base_url: str, api_key: str) -> float:
    return 0.0


def reward(response: str) -> float:
    return 0.0


class Hides(RayPPOTrainer):
    def policy_version(self) -> int:  # type: ignore[override]
        return 1


class NoMethod(RayPPOTrainer):
    generate = 3  # type: ignore[assignment]


class Longer(RayPPOTrainer):
    @property
    def total_steps(self) -> int:
        return 2 * super().total_steps


class Stepless(BaseTextEnv):
    def stpe(self, action: str) -> Any: ...


def typo(response: str, lable: str) -> float:
    return 0.0


def needs_the_trainer(completions: Any, trainer_state: Any) -> Any:
    return [0.0]


def of_trl(completions: Any, **kwargs: Any) -> Any:
    return [0.0]


def loss(current: Any, behaviour: Any, advantages: Any) -> Any: ...

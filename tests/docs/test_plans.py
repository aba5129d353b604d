"""The plan of the README does what the page says, in simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from skyasync import RayPPOTrainer, TrainerCallback
from tests.docs.pages import blocks
from tests.trainer.plans.parts import make_run


class Versions(TrainerCallback):
    """The versions that the engines received, and those that were evaluated."""

    def __init__(self) -> None:
        self.synced: list[int] = []
        self.evaluated: list[float] = []

    def on_weight_update(self, trainer: Any, version: int) -> None:
        self.synced.append(version)

    def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.evaluated.append(metrics["eval/version"])


def test_a_plan_is_its_loop_alone_in_at_most_nine_lines() -> None:
    text = next(block.text for block in blocks() if "class TwoUpdatesPerSync" in block.text)
    lines = text[text.index("class TwoUpdatesPerSync") :].strip().splitlines()
    assert len(lines) <= 9
    assert "running" not in text


@pytest.mark.parametrize("steps", [3, 4])
def test_two_updates_per_sync_are_those_of_the_setting(steps: int) -> None:
    shown: dict[str, Any] = {}
    exec(next(block.text for block in blocks() if "class TwoUpdatesPerSync" in block.text), shown)
    own = _versions(shown["TwoUpdatesPerSync"], steps)
    assert own == _versions(RayPPOTrainer, steps, trainer__sync_interval=2)
    assert own[1] == [steps], "the trained policy is evaluated at the end"


def _versions(
    plan: type[RayPPOTrainer], steps: int, **settings: Any
) -> tuple[Sequence[int], Sequence[float]]:
    seen = Versions()
    make_run(plan, prompts=4 * steps, eval_prompts=2, callbacks=[seen], **settings).train()
    return seen.synced, seen.evaluated

"""Code that was written for SkyRL, with only its imports changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyasync import TrainerCallback
from skyasync.envs import ENVS
from skyasync.interop.skyrl import make
from tests.interop.harness import ROWS, train
from tests.interop.skyrl.files import environment, printed

pytestmark = pytest.mark.slow

ENVS.pop(
    "measure", None
)  # which importing the file has registered: it exists for these tests alone
WITH_REWARD = ("environment.reward_funcs=[tests.interop.odd_reward:odd]", "data.label_key=answer")
SPECS = [{**row, "reward_spec": {"ground_truth": row["answer"]}} for row in ROWS]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    environment.register(
        id="measure", entry_point=f"{environment.__file__}:Measure", kwargs={"bonus": 2.0}
    )
    yield
    ENVS.pop("measure", None)


def test_an_environment_with_tools_settings_and_metrics_of_every_kind() -> None:
    run = train(
        "environment.env_class=measure", "environment.env_config={start: 10, reward: {scale: 0.5}}",
        "generator.max_turns=2", rows=SPECS,
    )  # fmt: skip
    assert run.learned
    assert run.metrics["env/calls"] == 12.0
    assert 0.0 <= run.metrics["env/long"] <= 1.0
    assert "env/last_words" not in run.metrics
    assert run.metrics["reward/mean"] >= 4.0  # two turns with the registered bonus
    assert all("characters" in text for text in run.texts)


def test_an_environment_played_by_hand_and_by_its_reference() -> None:
    row = {"reward_spec": {"ground_truth": "4"}}
    config = {"measure": {"start": 1, "reward": {"scale": 1.0}}}
    env = make("measure", env_config=config, extras=row, bonus=5.0)
    env.init([])
    assert env.step("a")["reward"] == 6.0 and env.get_metrics() == {"calls": 2.0, "long": 0.0}
    reference = f"environment.env_class={environment.__file__}:Measure"
    run = train(reference, "environment.env_config={start: 0, reward: {scale: 1.0}}", rows=SPECS)
    assert run.metrics["env/calls"] == 3.0


def test_the_tutorials_printed_classes_alone_train_one_step_off() -> None:
    run = train(
        *WITH_REWARD, "trainer.epochs=1", "trainer.max_training_steps=0", exp=printed.AsyncPPOExp
    )
    assert run.learned and sorted(run.rows) == [1, 2, 3, 4]
    assert [run.rows[step]["staleness/max"] for step in run.rows] == [0.0, 1.0, 1.0, 1.0]
    assert run.trainer.policy_version == 4


class StopsAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if trainer.global_step == self._step:
            trainer.stop("enough")


class StoppedExp(printed.AsyncPPOExp):
    def get_callbacks(self) -> list[Any]:
        return [StopsAfter(3)]


def test_the_printed_classes_stopped_in_the_middle_of_an_epoch_and_resumed_train_the_rest(
    tmp_path: Path,
) -> None:
    shared = (
        *WITH_REWARD, "trainer.epochs=2", "trainer.max_training_steps=0", "trainer.step_timeout_s=60",
        f"trainer.ckpt_path={tmp_path}", "trainer.ckpt_interval=1",
    )  # fmt: skip
    first = train(*shared, exp=StoppedExp)
    assert sorted(first.rows) == [1, 2, 3]
    second = train(*shared, "trainer.resume_mode=latest", exp=printed.AsyncPPOExp)
    assert sorted(second.rows) == [4, 5, 6, 7, 8]
    progress = second.trainer.context.progress
    assert (progress.step, progress.position, progress.trained_early) == (
        8,
        2 * len(ROWS),
        frozenset(),
    )
    assert second.trainer.policy_version == 8

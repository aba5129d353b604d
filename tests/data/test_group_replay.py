"""Solved groups that are trained once more: which, and in real runs of one process."""

from __future__ import annotations

from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch

from skyasync import TrainerCallback
from skyasync.arrays import ints
from skyasync.config import load_config
from skyasync.config.schema import Config, DataConfig
from skyasync.data.group_replay import SolvedGroups
from skyasync.errors import UserError
from skyasync.observability.jsonl import read_rows
from skyasync.rollout.types import Group, Prompt, PromptId, Segment, Trajectory, TrajectoryId
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.extensions.prompt_ledger import audit
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, config
from tests.trainer.plans.replayed import both, recorded, same, weights


def group(row: int, rewards: list[float], version: int = 0) -> Group:
    prompt = PromptId(0, row)

    def trajectory(number: int, reward: float) -> Trajectory:
        action = Segment(
            "action", ints([5, 6]), torch.zeros(2).numpy(), ints([version, version + 1]), reward
        )
        return Trajectory(TrajectoryId(prompt, number), [Segment("prompt", ints([1])), action])

    return Group(Prompt(prompt, [], ""), [trajectory(*each) for each in enumerate(rewards)])


def rows(groups: list[Group]) -> list[int]:
    return [each.prompt.id.row for each in groups]


def test_what_few_samples_have_solved_is_replayed_once_and_the_most_difficult_first() -> None:
    solved = SolvedGroups(DataConfig(replay_groups=2))
    solved.trained(
        [
            group(0, [0, 0, 0, 0]),
            group(1, [1, 1, 1, 0]),
            group(2, [1, 1, 0, 0]),
            group(3, [0, 0, 0, 1]),
        ],
        1,
    )
    solved.trained([group(4, [0, 1, 0, 0]), group(5, [0.9, 0.9, 0, 0])], 2)
    assert rows(solved.draw(2)) == [3, 4]
    assert rows(solved.without_replayed([group(6, [1, 0]), *solved.replayed])) == [6]
    assert [rows(solved.draw(3)), rows(solved.draw(4))] == [[2], []]


def test_groups_with_tokens_that_are_too_old_are_not_replayed() -> None:
    for step, drawn in ((19, [1]), (20, [])):
        solved = SolvedGroups(DataConfig(replay_groups=2))
        solved.trained([group(0, [0, 1], version=2), group(1, [0, 1], version=3)], 4)
        assert rows(solved.draw(step)) == drawn


def test_groups_of_undone_steps_and_those_with_rewards_that_are_not_finite_are_not_replayed() -> (
    None
):
    solved = SolvedGroups(DataConfig(replay_groups=9))
    for step in range(1, 5):
        solved.trained([group(step, [0, 1]), group(10 + step, [0, 0, 1, nan])], step)
    solved.undo(2)
    assert rows(solved.draw(4)) == [1, 2]


def test_a_checkpoint_keeps_the_groups_that_are_left(tmp_path: Path) -> None:
    settings = DataConfig(replay_groups=1)
    solved, resumed = SolvedGroups(settings), SolvedGroups(settings)
    solved.trained([group(row, [0, 1, 0], version=row) for row in range(4)], 4)
    solved.draw(4)
    solved.save(tmp_path)
    resumed.resume(tmp_path, lambda identity: Prompt(identity, [], ""))
    for step in (5, 6):
        (drawn,), (again,) = solved.draw(step), resumed.draw(step)
        assert again.prompt.id == drawn.prompt.id
        for one, other in zip(drawn.trajectories, again.trajectories, strict=True):
            assert one.id == other.id and one.reward == other.reward
            for name in ("tokens", "logprobs", "versions"):
                assert (getattr(one.segments[1], name) == getattr(other.segments[1], name)).all()


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            ["trainer.algorithm.off_policy_correction=none"],
            r"data\.replay_groups=2 is asynchronous|uncorrected",
        ),
        (["trainer.plan=streamed"], r"data\.replay_groups=2 needs the whole batch"),
        (["data.streaming=true", "trainer.max_training_steps=3"], r"data\.replay_groups"),
    ],
)
def test_a_run_that_could_not_correct_or_replay_them_is_rejected(
    settings: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_config(
            [
                "data.replay_groups=2",
                "trainer.policy.model.path=m",
                "data.train_data=d.jsonl",
                *settings,
            ]
        )


# ---------------------------------------------------------------- in runs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=False)


def replaying(model: str, **trainer: Any) -> Config:
    cfg = config(model, steps=5, eval_interval=0, **trainer)
    cfg.data.replay_groups, cfg.data.sampler_passing = 2, 0.7
    cfg.generator.sampling_params.seed = 5
    return cfg


class Broken(Exception):
    """Ends a run."""


class Stop(TrainerCallback):
    """Ends a run at the end of the third step, before its checkpoint."""

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if trainer.global_step == 3:
            raise Broken


@pytest.mark.slow
async def test_replayed_groups_are_trained_with_their_log_probabilities_and_a_resumed_run_is_bitwise_the_same(
    model: str, tmp_path: Path
) -> None:
    def run(folder: str, **settings: Any) -> LocalRun:
        saved = {"ckpt_path": str(tmp_path / folder), "ckpt_interval": 1}
        return LocalRun(RayPPOTrainer, replaying(model, **saved, **settings))

    whole = await run("whole").train()
    replayed = [int(whole.tracker.rows[step]["sampler/replayed"]) for step in range(1, 6)]
    assert replayed[0] == 0 and sum(replayed) >= 3
    for step, (made, count) in enumerate(zip(whole.dispatch.batches, replayed, strict=True)):
        stale = (made.versions != step) & made.loss_mask
        assert len(made.group_ids.unique()) == 4 + count
        assert len(made.group_ids[stale.any(1)].unique()) == count
        assert not made.behaviour_logprobs[stale].isnan().any()
        if count:
            difference = (made.proximal_logprobs - made.behaviour_logprobs)[stale].abs().max()
            assert difference > 1e-3, "the engine's, of the older policy"
    first = run("cut")
    first.trainer.callbacks.append(Stop())
    with pytest.raises(Broken):
        await first.train()
    resumed = await run("cut", resume_mode="latest").train()
    assert [int(resumed.tracker.rows[step]["sampler/replayed"]) for step in (3, 4, 5)] == replayed[
        2:
    ]
    assert same(weights(whole), weights(resumed))


@pytest.mark.slow
async def test_the_ledger_has_every_prompt_once_and_a_rejected_one_is_not_trained(
    model: str, tmp_path: Path
) -> None:
    class LeavesOut(RayPPOTrainer):
        """The first new group of each step, and every replayed one."""

        def filter_groups(self, groups: list[Group]) -> list[Group]:
            return self.context.replay_buffer.without_replayed(groups)[1:]

    await recorded(LeavesOut, replaying(model), tmp_path / "run")
    ledger = read_rows(tmp_path / "run" / "ledger.jsonl")
    assert (
        sum(row.get("sampler/replayed", 0) for row in read_rows(tmp_path / "run" / "metrics.jsonl"))
        >= 1
    )
    assert len(audit(ledger)) == 5 * 4
    assert [len(row.get("rejected", ())) for row in ledger] == [1] * 5


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("plan", ["sync", "fully_async"])
async def test_a_replay_draws_the_same_groups(plan: str, model: str, tmp_path: Path) -> None:
    run, again = await both(plan, replaying(model, max_staleness=2), tmp_path / "run")
    assert (
        sum(row.get("sampler/replayed", 0) for row in read_rows(tmp_path / "run" / "metrics.jsonl"))
        >= 1
    )
    assert again.trainer.difference == ""  # type: ignore[attr-defined]
    assert same(weights(run), weights(again))

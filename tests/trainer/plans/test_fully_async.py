"""The fully asynchronous plan with real parts: policy, embedded engine, environments, in one process."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from skyasync.callbacks import TrainerCallback
from skyasync.inference.client import InferenceClient
from skyasync.rollout.types import PromptId
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import (
    LocalRun,
    Memory,
    RecordingClient,
    check_tokens,
    config,
    without_times,
)

pytestmark = pytest.mark.slow

EVERY_PARTIAL_ROLLOUT = pytest.mark.parametrize("partial_rollout", ["keep", "recompute", "wait"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=False)


class Remembering(Memory, FullyAsyncRayPPOTrainer): ...


class RememberingSync(Memory): ...


# ---------------------------------------------------------------- the synchronous plan as a limit


@EVERY_PARTIAL_ROLLOUT
async def test_without_staleness_it_is_the_synchronous_plan_bit_for_bit(
    model: str, partial_rollout: str
) -> None:
    sync = await LocalRun(RayPPOTrainer, config(model, steps=6)).train()
    streamed = await LocalRun(
        FullyAsyncRayPPOTrainer,
        config(model, steps=6, max_staleness=0, partial_rollout=partial_rollout),
    ).train()
    assert without_times(streamed.tracker.rows) == without_times(sync.tracker.rows)
    assert len({row["policy/loss"] for row in sync.tracker.rows.values()}) == 6
    for name, weights in sync.dispatch.weights().items():
        assert torch.equal(streamed.dispatch.weights()[name], weights), name


async def test_one_step_off_has_the_same_first_step(model: str) -> None:
    sync = await LocalRun(RayPPOTrainer, config(model, steps=2)).train()
    one_step_off = await LocalRun(AsyncRayPPOTrainer, config(model, steps=2)).train()
    first, other = sync.dispatch.batches[0], one_step_off.dispatch.batches[0]
    assert torch.equal(first.tokens, other.tokens)
    assert torch.equal(first.advantages, other.advantages)
    assert one_step_off.tracker.rows[1]["policy/loss"] == sync.tracker.rows[1]["policy/loss"]


# ---------------------------------------------------------------- staleness


@EVERY_PARTIAL_ROLLOUT
@pytest.mark.parametrize("staleness", [1, pytest.param(3, marks=pytest.mark.matrix)])
async def test_every_prompt_is_trained_once_with_bounded_staleness(
    model: str, partial_rollout: str, staleness: int
) -> None:
    cfg = config(model, steps=0, epochs=3, max_staleness=staleness, partial_rollout=partial_rollout)
    run = await LocalRun(Remembering, cfg).train()
    assert sorted(run.trainer.trained_ids) == [
        PromptId(epoch, row) for epoch in range(3) for row in range(10)
    ]
    assert (
        max(row["staleness/max"] for row in run.tracker.rows.values() if "staleness/max" in row)
        <= staleness
    )
    assert sorted(run.tracker.rows) == list(range(1, 9)), "30 prompts in batches of 4"


async def test_waiting_rollouts_leave_no_trajectory_of_two_versions(model: str) -> None:
    cfg = config(model, steps=6, max_staleness=2, partial_rollout="wait", train_length=40)
    run = await LocalRun(Remembering, cfg).train()
    for group in (group for groups in run.trainer.trained for group in groups):
        assert all(len(set(trajectory.versions)) == 1 for trajectory in group.trajectories)


# ---------------------------------------------------------------- tokens, log-probabilities, versions


@pytest.mark.parametrize(
    "partial_rollout", [pytest.param("keep", marks=pytest.mark.matrix), "recompute"]
)
async def test_what_is_trained_is_what_the_engine_computed_token_by_token(
    model: str, partial_rollout: str
) -> None:
    cfg = config(model, steps=8, max_staleness=2, partial_rollout=partial_rollout, train_length=40)
    run = await LocalRun(Remembering, cfg, client=RecordingClient).train()
    assert check_tokens(run) > 5, (
        "no trajectory was in flight during a weight update, so the test checks nothing"
    )


async def test_after_a_cut_every_token_has_the_logprob_of_its_version(model: str) -> None:
    """Recomputation leaves no trace of older weights: the token's policy version alone explains its log-probability."""
    cfg = config(model, steps=8, max_staleness=2, partial_rollout="recompute", train_length=40)
    run = await LocalRun(Remembering, cfg).train()
    mixed = 0
    for trajectory in (
        t for groups in run.trainer.trained for group in groups for t in group.trajectories
    ):
        tokens, (action,) = trajectory.tokens, trajectory.actions
        mixed += len(set(action.versions)) > 1
        for version in set(action.versions):
            scored = run.dispatch.score_under(run.trainer.weights[version], tokens)[
                -len(action.tokens) :
            ]
            for found, expected, v in zip(action.logprobs, scored, action.versions, strict=True):
                assert v != version or found == pytest.approx(expected, abs=1e-4)
    assert mixed > 5


# ---------------------------------------------------------------- evaluation


class WatchingClient(InferenceClient):
    """The requests for evaluation that were answered while others were in flight, and their versions."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.training, self.shared, self.eval_versions = 0, 0, []

    async def generate_group(self, requests: Any, partial: Any = None) -> Any:
        count = len(requests)
        is_eval = requests[0].request_id.startswith("eval")
        self.training += 0 if is_eval else count
        self.shared += count if is_eval and self.training else 0
        try:
            async with aclosing(super().generate_group(requests, partial)) as arriving:
                async for outputs in arriving:
                    if is_eval:
                        self.eval_versions += [set(output.versions) for output in outputs]
                    yield outputs
        finally:
            self.training -= 0 if is_eval else count


@pytest.mark.parametrize("eval_mode", ["pause", "overlap"])
async def test_evaluation_is_pinned_to_the_version_it_is_labelled_with(
    model: str, eval_mode: str
) -> None:
    cfg = config(
        model, steps=6, max_staleness=3, eval_mode=eval_mode, eval_interval=1, train_length=40
    )
    run = await LocalRun(Remembering, cfg, client=WatchingClient).train()
    assert [row["eval/version"] for row in run.tracker.rows.values()] == [1, 2, 3, 4, 5, 6]
    assert run.client.eval_versions == [{step} for step in range(1, 7) for _ in range(3)]
    assert (run.client.shared == 0) == (eval_mode == "pause")


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize("bound", ["hard", pytest.param("mean", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("resumed_plan", [Remembering, RememberingSync])
async def test_a_resumed_run_trains_what_is_left_and_nothing_twice(
    model: str, tmp_path: Path, bound: str, resumed_plan: type[Memory]
) -> None:
    settings = {
        "epochs": 4,
        "ckpt_interval": 3,
        "ckpt_path": str(tmp_path),
        "staleness_bound": bound,
    }
    first = LocalRun(Remembering, config(model, steps=0, max_staleness=2, **settings))
    first.trainer.callbacks.append(Stop(after=5))
    with pytest.raises(Stopped):
        await first.train()
    before = first.trainer.trained_ids[: 3 * 4]  # the checkpoint is that of step 3
    cfg = config(model, steps=0, max_staleness=2, resume_mode="latest", **settings)
    second = await LocalRun(resumed_plan, cfg).train()
    after = second.trainer.trained_ids
    assert sorted(before + after) == [
        PromptId(epoch, row) for epoch in range(4) for row in range(10)
    ]
    assert sorted(second.tracker.rows) == list(range(4, 11))


class Stopped(Exception):
    pass


class Stop(TrainerCallback):
    def __init__(self, after: int) -> None:
        self._after = after

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if trainer.global_step == self._after:
            raise Stopped


# ---------------------------------------------------------------- errors


async def test_a_rollout_that_fails_ends_the_run_with_its_own_error(model: str) -> None:
    run = LocalRun(Remembering, config(model, steps=6, max_staleness=2))
    generate, calls = run.trainer.generator.generate, []

    async def failing(request: Any) -> Any:
        calls.append(request)
        if len(calls) == 9 and not request["is_eval"]:
            raise OSError("the sandbox is gone")
        return await generate(request)

    run.trainer.generator.generate = failing
    with pytest.raises(OSError, match="the sandbox is gone"):
        await run.train()
    assert asyncio.all_tasks() == {asyncio.current_task()}, "no task is left"

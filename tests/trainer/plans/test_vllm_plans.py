"""The plans with vLLM, whose batches depend on timing: in this process, real policy, one engine for all runs.

vLLM's sampling is not repeatable, so plans are compared on the same samples: a run's rollouts are recorded and replayed
to both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from copy import deepcopy
from statistics import median
from typing import Any

import pytest
import pytest_asyncio
import torch

from skyasync.inference.interface import EngineConfig, EngineStats, InferenceEngine
from skyasync.rollout.types import PromptId, TrajectoryId
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans import PLANS
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import (
    LocalRun,
    Memory,
    RecordingClient,
    check_tokens,
    config,
    engine_config,
    without_times,
)
from tests.trainer.plans.test_step_time import Stopwatch, seconds

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=False, head_dim=32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine_of_all(engines_session: None, model: str) -> AsyncIterator[Any]:
    from skyasync.inference.backends.vllm.engine import VLLMEngine

    engine = VLLMEngine(engine_config(model))
    await engine.start()
    yield engine
    await engine.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(engine_of_all: Any) -> Any:
    """As after a start: no prompt finds cached blocks of an earlier run with the same version number."""
    await engine_of_all.llm.reset_prefix_cache()
    return engine_of_all


class Remembering(Memory, FullyAsyncRayPPOTrainer): ...


@pytest.mark.matrix
async def test_adapters_arrive_added_to_the_weights(model: str, engine: Any) -> None:
    cfg = config(model, steps=2)
    cfg.generator.backend = "vllm"
    cfg.trainer.policy.lora.rank = 4
    run = await LocalRun(RayPPOTrainer, cfg, engine=engine).train()
    assert all(run.tracker.rows[step]["sync/logprob_gap_mean"] < 1e-3 for step in (1, 2))
    assert run.tracker.rows[2]["policy/grad_norm"] > 0


@pytest.mark.parametrize("plan", ["sync", "one_step_off", "fully_async", "streamed"])
async def test_the_rows_add_up_to_what_a_watch_says(plan: str, model: str, engine: Any) -> None:
    cfg = config(model, steps=12, train_length=40, plan=plan, max_staleness=2, eval_interval=5)
    cfg.generator.backend = "vllm"
    cfg.generator.n_samples_per_prompt = 8
    run = LocalRun(PLANS[plan], cfg, engine=engine)
    run.trainer.context.tracker = watch = Stopwatch()
    await run.train()
    first, *later = (watch.rows[step] for step in range(1, 13))
    assert sum(map(seconds, later)) == pytest.approx(later[-1]["time"] - first["time"], rel=0.01)


# ---------------------------------------------------------------- weight updates in flight


def off_by(run: LocalRun, tokens: list[int], logprobs: list[float], version: int) -> list[float]:
    """How far the log-probabilities of a response's tokens are from those under a version's weights."""
    scored = run.dispatch.score_under(run.trainer.weights[version], tokens)[-len(logprobs) :]
    return [abs(found - expected) for found, expected in zip(logprobs, scored, strict=True)]


@pytest.mark.parametrize(
    "partial_rollout", [pytest.param("keep", marks=pytest.mark.matrix), "recompute"]
)
async def test_versions_are_right_to_the_token_and_nothing_is_lost(
    model: str, engine: Any, partial_rollout: str
) -> None:
    cfg = config(
        model, steps=0, epochs=3, max_staleness=2, partial_rollout=partial_rollout, train_length=48
    )
    cfg.generator.backend = "vllm"
    run = await LocalRun(Remembering, cfg, client=RecordingClient, engine=engine).train()
    assert sorted(run.trainer.trained_ids) == [
        PromptId(epoch, row) for epoch in range(3) for row in range(10)
    ]
    assert check_tokens(run) > 5, (
        "no trajectory was in flight during a weight update, so the test checks nothing"
    )
    jumps = []
    for trajectory in (
        t for groups in run.trainer.trained for group in groups for t in group.trajectories
    ):
        tokens, (action,) = trajectory.tokens, trajectory.actions
        for version in sorted(set(action.versions)):
            gaps = off_by(run, tokens, action.logprobs, version)
            of_version = [gap for gap, v in zip(gaps, action.versions, strict=True) if v == version]
            if partial_rollout == "recompute" or version == action.versions[0]:
                assert (
                    max(of_version) < 1e-3
                )  # later tokens of "keep" also read what older weights have cached
        if len(set(action.versions)) > 1:
            after = sum(v == action.versions[0] for v in action.versions)
            jumps.append(off_by(run, tokens, action.logprobs, action.versions[0])[after])
    assert median(jumps) > 1e-3, (
        "the first token of a new version has the log-probability of the old one"
    )


# ---------------------------------------------------------------- both plans on the same rollouts


class Recorder:
    """A generator's outputs, by trajectory."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self.tape: dict[TrajectoryId, dict[str, Any]] = {}

    async def generate(self, batch: Any) -> Any:
        output = await self._generator.generate(batch)
        for row, identity in enumerate(batch["trajectory_ids"]):
            assert identity not in self.tape
            self.tape[identity] = {name: values[row] for name, values in output.items()}
        return output


class Player:
    """A generator of the recorded outputs."""

    def __init__(self, tape: dict[TrajectoryId, dict[str, Any]]) -> None:
        self._tape = tape

    async def generate(self, batch: Any) -> Any:
        rows = [self._tape[identity] for identity in batch["trajectory_ids"]]
        return {name: [row[name] for row in rows] for name in rows[0]}


class NoEngine(InferenceEngine):
    """Accepts weights and ignores them."""

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def _nothing(self, *args: Any) -> None: ...

    pause = resume = update_weights = _nothing


async def replayed(
    plan: type[RayPPOTrainer], cfg: Any, tape: dict[TrajectoryId, dict[str, Any]]
) -> LocalRun:
    run = LocalRun(plan, cfg, engine=NoEngine(EngineConfig("model")))
    run.trainer.generator, run.trainer.weight_sync.probe = Player(tape), ()
    return await run.train()


@pytest.mark.matrix
async def test_recorded_rollouts_train_the_same_in_both_plans_bit_for_bit(
    model: str, engine: Any
) -> None:
    cfg = config(model, steps=6, eval_interval=0, train_length=32)
    cfg.generator.backend = "vllm"
    cfg.trainer.policy.optimizer_config.lr = 1e-3  # slow enough for samples to differ until the end
    live = LocalRun(RayPPOTrainer, cfg, engine=engine)
    recorder = live.trainer.generator = Recorder(live.trainer.generator)
    await live.train()
    sync = await replayed(RayPPOTrainer, deepcopy(cfg), recorder.tape)
    cfg.trainer.max_staleness = 0
    streamed = await replayed(FullyAsyncRayPPOTrainer, cfg, recorder.tape)

    assert without_times(streamed.tracker.rows) == without_times(sync.tracker.rows)
    assert len({row["policy/loss"] for row in sync.tracker.rows.values()}) == 6
    for step, row in live.tracker.rows.items():
        assert row["policy/loss"] == sync.tracker.rows[step]["policy/loss"]
    for name, weights in live.dispatch.weights().items():
        assert torch.equal(sync.dispatch.weights()[name], weights), name
        assert torch.equal(streamed.dispatch.weights()[name], weights), name

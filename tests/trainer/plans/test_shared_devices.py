"""Plans whose engines compute on the policy's devices, with requests in flight: real models, one process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from skyasync.config.schema import Config
from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.interface import EngineFailedError, GenerationOutput, GenerationRequest
from skyasync.inference.supervisor import EngineSupervisor
from skyasync.trainer.plans.fully_async import ColocatedAsyncRayPPOTrainer, HybridAsyncRayPPOTrainer
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, Memory, RecordingClient, check_tokens, config

pytestmark = pytest.mark.slow

STEPS, STALENESS = 6, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=False)


class Watching(Memory):
    """Checks the engines whenever the policy has the devices."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self.in_flight: list[int] = []
        self.asleep: list[set[int]] = []

    async def learn_from(self, groups: list[Any]) -> None:
        client: Any = self.inference_engine_client
        self.in_flight.append(len(client._inflight))
        self.asleep.append(set(client.pool.asleep))
        for engine in client.pool.asleep:
            assert not client._inflight.at(engine), "a sleeping engine has a request"
            assert (await client.engines[engine].stats()).running == 0
        await super().learn_from(groups)


class Colocated(Watching, ColocatedAsyncRayPPOTrainer):
    pass


class Hybrid(Watching, HybridAsyncRayPPOTrainer):
    pass


class Failing(TransformersEngine):
    """Its process ends at its first requests."""

    restartable = True

    async def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[list[GenerationOutput], None]:
        raise EngineFailedError("the process is gone")
        yield []

    def successor(self) -> TransformersEngine:
        return TransformersEngine(self.config)

    def kill(self) -> None: ...


def settings(model: str, plan: str, **trainer: Any) -> Config:
    cfg = config(model, steps=STEPS, train_length=40, plan=plan, max_staleness=STALENESS, **trainer)
    cfg.generator.n_samples_per_prompt = 2
    cfg.trainer.placement.colocate_all = plan == "colocated_async"
    cfg.generator.hybrid_engines = int(plan == "hybrid_async")
    return cfg


def check_trained(run: Any, rows: int = 4 * STEPS) -> None:
    """Every prompt is trained once, within the staleness bound, with the engines' tokens and log-probabilities."""
    assert len(run.trainer.trained_ids) == len(set(run.trainer.trained_ids)) == rows
    assert max(row["staleness/max"] for row in run.tracker.rows.values()) <= STALENESS
    check_tokens(run)


async def test_colocated_async_trains_while_requests_wait_and_keeps_its_bound(model: str) -> None:
    run = await LocalRun(Colocated, settings(model, "colocated_async"), RecordingClient).train()
    check_trained(run)
    assert run.trainer.asleep == [{0}] * STEPS
    assert max(run.trainer.in_flight) > 0, "rollouts are interrupted by training"
    assert any(len(pieces) > 1 for pieces in run.client.pieces.values()), (
        "and continue from their tokens"
    )
    assert max(row["staleness/max"] for row in run.tracker.rows.values()) > 0


async def test_hybrid_engines_compute_while_the_policy_waits_with_the_newest_weights(
    model: str,
) -> None:
    cfg = settings(model, "hybrid_async")
    cfg.generator.max_num_seqs = 4
    run, equal = LocalRun(Hybrid, cfg, RecordingClient), list[bool]()
    wake = run.client.wake

    async def compared(part: Any, engines: Any = None) -> None:
        await wake(part, engines)
        if part == "cache":
            own, hybrid = await run.client.score([[1, 2, 3, 4, 5]])
            versions = run.engine._decoder.version, run.client.engines[1]._decoder.version  # type: ignore[attr-defined]
            equal.append(own == hybrid and len(set(versions)) == 1)

    run.client.wake = compared  # type: ignore[method-assign]
    await run.train()
    check_trained(run)
    assert equal and all(equal)
    assert run.trainer.asleep == [{1}] * STEPS
    assert any("time/wake_s" in row for row in run.tracker.rows.values())
    assert any(row["throughput/engine_1_tokens_per_s"] > 0 for row in run.tracker.rows.values())


@pytest.mark.parametrize(
    "plan", ["colocated_async", pytest.param("hybrid_async", marks=pytest.mark.matrix)]
)
async def test_a_stopped_run_continues_and_trains_every_prompt_once(
    model: str, plan: str, tmp_path: Path
) -> None:
    kind = {"colocated_async": Colocated, "hybrid_async": Hybrid}[plan]
    cfg = settings(model, plan, ckpt_path=str(tmp_path), ckpt_interval=2)
    cfg.generator.max_num_seqs = 4

    class Stopped(kind):  # type: ignore[misc, valid-type]
        async def end_step(self, status: dict[str, float]) -> None:
            await super().end_step(status)
            if self.global_step == 3:
                self.stop("enough")

    first = await LocalRun(Stopped, cfg, RecordingClient).train()
    second = await LocalRun(
        kind, settings(model, plan, ckpt_path=str(tmp_path), resume_mode="latest")
    ).train()
    trained = first.trainer.trained_ids + second.trainer.trained_ids
    assert len(first.trainer.trained) == 4, "the step after the call is the last"
    assert len(trained) == len(set(trained)) == 4 * STEPS
    assert max(row["staleness/max"] for row in second.tracker.rows.values()) <= STALENESS


async def test_a_hybrid_engine_that_fails_while_it_computes_is_replaced_and_nothing_is_lost(
    model: str,
) -> None:
    cfg = settings(model, "hybrid_async")
    cfg.generator.max_num_seqs = 4
    run = LocalRun(Hybrid, cfg, RecordingClient)
    supervisor = EngineSupervisor(
        run.client, run.weight_sync, max_restarts=3, heartbeat_s=0.2, heartbeat_timeout_s=30, limit_s=30,
        colocation=run.colocation,
    )  # fmt: skip
    run.trainer.extensions.append(supervisor)
    run.client.engines[1] = failing = Failing(run.client.engines[1].config)
    try:
        await run.train()
    finally:
        await supervisor.close()
        await failing.shutdown()
    check_trained(run)
    assert supervisor.failures == supervisor.restarts == 1
    assert run.client.engines[1] is not failing

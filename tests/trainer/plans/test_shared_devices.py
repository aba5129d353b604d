"""Plans whose engines compute on the policy's devices, with requests in flight: real models, one process."""

from __future__ import annotations

from typing import Any

import pytest

from skyasync.config.schema import Config
from skyasync.trainer.plans.colocated_async import ColocatedAsyncRayPPOTrainer
from skyasync.trainer.plans.hybrid_async import HybridAsyncRayPPOTrainer
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, Memory, RecordingClient, check_tokens, config

pytestmark = pytest.mark.slow

STEPS, STALENESS = 6, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=False)


class Watching(Memory):
    """Looks, whenever the policy has the devices, at what the engines do."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self.in_flight: list[int] = []
        self.asleep: list[set[int]] = []

    async def learn_from(self, groups: list[Any]) -> None:
        client: Any = self.inference_engine_client
        self.in_flight.append(len(client._inflight))
        self.asleep.append(set(client.pool.asleep))
        for engine in client.pool.asleep:
            assert not client._inflight.at(engine), "a request is at an engine that sleeps"
            assert (await client.engines[engine].stats()).running == 0
        await super().learn_from(groups)


class Colocated(Watching, ColocatedAsyncRayPPOTrainer):
    pass


class Hybrid(Watching, HybridAsyncRayPPOTrainer):
    pass


def settings(model: str, plan: str, **trainer: Any) -> Config:
    cfg = config(model, steps=STEPS, train_length=40, plan=plan, max_staleness=STALENESS, **trainer)
    cfg.generator.n_samples_per_prompt = 2
    cfg.trainer.placement.colocate_all = plan == "colocated_async"
    cfg.generator.hybrid_engines = int(plan == "hybrid_async")
    return cfg


def check_trained(run: Any, rows: int = 4 * STEPS) -> None:
    """Every prompt once, none too old; what was trained is what the engines computed."""
    assert len(run.trainer.trained_ids) == len(set(run.trainer.trained_ids)) == rows
    assert max(row["staleness/max"] for row in run.tracker.rows.values()) <= STALENESS
    check_tokens(run)


async def test_colocated_async_trains_while_requests_wait_and_keeps_its_bound(model: str) -> None:
    run = await LocalRun(Colocated, settings(model, "colocated_async"), RecordingClient).train()
    check_trained(run)
    assert run.trainer.asleep == [{0}] * STEPS
    assert max(run.trainer.in_flight) > 0, "rollouts are interrupted by training"
    assert any(len(pieces) > 1 for pieces in run.client.pieces.values()), "and continue with what they had"
    assert max(row["staleness/max"] for row in run.tracker.rows.values()) > 0


async def test_hybrid_engines_compute_while_the_policy_waits_with_the_newest_weights(model: str) -> None:
    cfg = settings(model, "hybrid_async")
    cfg.generator.max_num_seqs = 4
    run = await LocalRun(Hybrid, cfg, RecordingClient).train()
    check_trained(run)
    assert run.trainer.asleep == [{1}] * STEPS
    assert any("time/wake_s" in row for row in run.tracker.rows.values())
    assert any(row["throughput/engine_1_tokens_per_s"] > 0 for row in run.tracker.rows.values())

"""Adapters in all plans, in one process: real models, the embedded engine, verified syncs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyasync.config.schema import Config
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
from skyasync.trainer.plans.streamed import StreamedRayPPOTrainer
from skyasync.workers.frozen import ReferenceWorker
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, config

PLANS = [RayPPOTrainer, AsyncRayPPOTrainer, FullyAsyncRayPPOTrainer, StreamedRayPPOTrainer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(Path(tmp_path_factory.mktemp("model")), tied=True)


def lora(model: str) -> Config:
    cfg = config(model, steps=3)
    cfg.trainer.policy.lora.rank = 4
    cfg.trainer.algorithm.use_kl_loss = True
    return cfg


@pytest.mark.parametrize("plan", PLANS)
async def test_a_plan_trains_adapters_whose_syncs_arrive_and_whose_reference_is_the_base(
    model: str, plan: type[RayPPOTrainer]
) -> None:
    run = LocalRun(plan, lora(model))
    assert "reference" not in run.dispatch._groups, "no second copy"
    before = run.dispatch.weights()
    await run.train()
    after = run.dispatch.weights()
    assert {name for name in after if not torch.equal(after[name], before[name])} == {
        n for n in after if "lora_" in n
    }
    rows = [run.tracker.rows[step] for step in (1, 2, 3)]
    assert all(row["sync/logprob_gap_mean"] < 1e-4 for row in rows)
    assert all(row["policy/grad_norm"] > 0 for row in rows)
    assert rows[0]["policy/kl_loss"] == 0 and rows[-1]["policy/kl_loss"] > 0
    reference = ReferenceWorker(run.cfg, threads=1)
    reference.setup()
    for batch in run.dispatch.batches:
        assert torch.equal(batch.reference_logprobs, reference.logprobs(batch))


@pytest.mark.parametrize("plan", [RayPPOTrainer, AsyncRayPPOTrainer])
async def test_engines_generate_with_the_numbers_that_a_base_in_few_bits_stands_for(
    model: str, plan: type[RayPPOTrainer]
) -> None:
    cfg = lora(model)
    cfg.trainer.policy.lora.base_dtype = "int8"
    run = LocalRun(plan, cfg)
    await run.train()
    rows = [run.tracker.rows[step] for step in (1, 2, 3)]
    assert all(row["sync/logprob_gap_mean"] < 1e-4 for row in rows)
    assert rows[0]["policy/kl_loss"] == 0 and rows[-1]["policy/kl_loss"] > 0
    first = run.dispatch.batches[0]
    gap = (first.behaviour_logprobs - first.reference_logprobs)[first.loss_mask].abs().max()
    assert float(gap) < 1e-4, "from the first sample on"


async def test_a_reference_of_another_model_is_loaded(model: str, tmp_path: Path) -> None:
    cfg = lora(model)
    cfg.trainer.ref.model.path = save_tiny_llama(tmp_path, tied=False)
    run = LocalRun(RayPPOTrainer, cfg)
    assert "reference" in run.dispatch._groups
    await run.dispatch.shutdown()


def test_on_devices_of_its_own_the_reference_is_loaded(model: str) -> None:
    from skyasync.workers.roles import roles_with_ranks

    cfg = lora(model)
    assert [role.name for role in roles_with_ranks(cfg)] == ["policy"]
    cfg.trainer.ref.model.path = model  # as a run writes it before it starts
    assert [role.name for role in roles_with_ranks(cfg)] == ["policy"]
    cfg.trainer.placement.colocate_policy_ref = False
    assert [role.name for role in roles_with_ranks(cfg)] == ["policy", "reference"]

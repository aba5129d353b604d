"""PPO with a critic on the policy's layers in every plan, in one process: real models, engine and updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from skyasync.algorithms.values import gae
from skyasync.config.schema import Config
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
from skyasync.trainer.plans.streamed import StreamedRayPPOTrainer
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, RecordingDispatch, config, without_times

pytestmark = pytest.mark.slow

PLANS = [RayPPOTrainer, AsyncRayPPOTrainer, FullyAsyncRayPPOTrainer, StreamedRayPPOTrainer]
FOUND = {
    "loss",
    "clip_frac",
    "explained_variance",
    "values_mean",
    "returns_mean",
    "grad_norm",
    "lr",
    "tokens",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(Path(tmp_path_factory.mktemp("model")), tied=True)


def ppo(model: str, steps: int = 2, **trainer: Any) -> Config:
    cfg = config(model, steps=steps, **trainer)
    algorithm = cfg.trainer.algorithm
    algorithm.advantage_estimator, algorithm.gae_whiten, algorithm.gamma, algorithm.lambd = (
        "gae",
        False,
        0.95,
        0.9,
    )
    cfg.trainer.critic.backbone, cfg.trainer.critic.optimizer_config.lr = "shared", 3e-2
    return cfg


class Counting(RecordingDispatch):
    """Counts the calls of the policy's ranks before an update."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.asked: list[str] = []

        policy: Any = self._groups["policy"]
        on_rows = policy.on_rows

        async def noted(method: str, batch: Any) -> torch.Tensor | None:
            if method != "forward_backward":
                self.asked.append(f"policy.{method}")
            return await on_rows(method, batch)

        policy.on_rows = noted


@pytest.mark.parametrize("plan", PLANS)
async def test_every_plan_trains_it_with_the_policy_and_on_its_ranks(
    model: str, plan: type[RayPPOTrainer]
) -> None:
    cfg = ppo(model)
    run = LocalRun(plan, cfg, dispatch=Counting(cfg))
    before = run.dispatch.weights()
    await run.train()
    assert list(run.dispatch._groups) == ["policy"]
    for step in (1, 2):
        row = run.tracker.rows[step]
        assert {name.removeprefix("critic/") for name in row if name.startswith("critic/")} == FOUND
        assert (row["critic/lr"], row["policy/lr"]) == (3e-2, 1e-2) and row["critic/grad_norm"] > 0
    assert set(run.dispatch.asked) == {"policy.values"}
    for name, now in run.dispatch.weights().items():
        assert not torch.equal(now, before[name]), name
    for batch in run.dispatch.batches:
        advantages, returns = gae(
            batch.rewards, batch.values, batch.loss_mask, gamma=0.95, lambd=0.9
        )
        assert torch.equal(batch.advantages, advantages) and torch.equal(batch.returns, returns)


async def test_with_several_updates_one_pass_gives_both_values_and_log_probabilities(
    model: str,
) -> None:
    cfg = ppo(model, steps=1, update_epochs_per_batch=2)
    run = await LocalRun(RayPPOTrainer, cfg, dispatch=Counting(cfg)).train()
    assert run.dispatch.asked == ["policy.logprobs_and_values"]
    assert all(batch.proximal_logprobs is not None for batch in run.dispatch.batches)
    assert run.tracker.rows[1]["critic/clip_frac"] >= 0


async def test_the_policy_waits_for_the_critics_first_steps(model: str) -> None:
    cfg = ppo(model)
    cfg.trainer.critic.warmup_steps = 1
    run = LocalRun(RayPPOTrainer, cfg)
    first = run.dispatch.weights()
    assert not first["value_head.weight"].isnan().any()
    await run.train()
    rows = run.tracker.rows
    assert ["policy/loss" in rows[step] for step in (1, 2)] == [False, True]
    assert ["critic/loss" in rows[step] for step in (1, 2)] == [True, True]
    assert len(run.dispatch.batches) == 1, "the policy was trained once"


async def test_a_resumed_run_is_the_run_in_one_piece_bit_for_bit_and_exports_the_critic(
    model: str, tmp_path: Path
) -> None:
    whole = await LocalRun(RayPPOTrainer, ppo(model)).train()

    async def piece(steps: int) -> LocalRun:
        saved = {"ckpt_path": str(tmp_path / "ckpt"), "ckpt_interval": 1, "resume_mode": "latest"}
        cfg = ppo(model, steps=steps, **saved)
        cfg.trainer.critic.export_path = str(tmp_path / "critic")
        return await LocalRun(RayPPOTrainer, cfg).train()

    await piece(1)
    again = await piece(2)
    rows = [without_times(run.tracker.rows)[2] for run in (whole, again)]
    assert {k: v for k, v in rows[0].items() if k in rows[1]} == {
        k: v for k, v in rows[1].items() if k in rows[0]
    }
    assert rows[0].keys() >= {f"critic/{name}" for name in FOUND}
    for name, weights in whole.dispatch.weights().items():
        assert torch.equal(again.dispatch.weights()[name], weights), name
    assert (tmp_path / "critic" / "model.safetensors").exists()


async def test_taking_turns_with_the_engines_changes_nothing(model: str) -> None:
    separate, together = ppo(model), ppo(model)
    together.trainer.placement.colocate_all = True
    runs = [await LocalRun(RayPPOTrainer, cfg).train() for cfg in (separate, together)]
    assert without_times(runs[0].tracker.rows) == without_times(runs[1].tracker.rows)

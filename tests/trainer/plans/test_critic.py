"""PPO with a critic in every plan, in one process: real models, the embedded engine, real updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from skyasync.algorithms.values import gae
from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.models.batch import ScoredBatch
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
from skyasync.trainer.plans.streamed import StreamedRayPPOTrainer
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, RecordingDispatch, config, without_times

pytestmark = pytest.mark.slow

PLANS = [RayPPOTrainer, AsyncRayPPOTrainer, FullyAsyncRayPPOTrainer, StreamedRayPPOTrainer]
FOUND = (
    "loss",
    "clip_frac",
    "explained_variance",
    "values_mean",
    "returns_mean",
    "grad_norm",
    "lr",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(Path(tmp_path_factory.mktemp("model")), tied=True)


def ppo(model: str, steps: int = 3, **trainer: Any) -> Config:
    """GAE without whitening, so that every plan can use it."""
    cfg = config(model, steps=steps, **trainer)
    algorithm = cfg.trainer.algorithm
    algorithm.advantage_estimator, algorithm.gae_whiten, algorithm.gamma, algorithm.lambd = (
        "gae",
        False,
        0.95,
        0.9,
    )
    cfg.trainer.critic.optimizer_config.lr = 1e-2
    return cfg


class Watched(RecordingDispatch):
    """Keeps the critic's values of each batch, before it is trained on it."""

    async def forward_backward(self, batch: Any, role: str = "policy") -> None:
        if role == "critic":
            before = self.worker("critic").values(batch)
            assert torch.equal(batch.values, before), (
                "the values are those of the critic before its update"
            )
        await super().forward_backward(batch, role)


@pytest.mark.parametrize("plan", PLANS)
async def test_every_plan_trains_a_critic_together_with_the_policy(
    model: str, plan: type[RayPPOTrainer]
) -> None:
    cfg = ppo(model)
    run = LocalRun(plan, cfg, dispatch=Watched(cfg))
    before = {role: run.dispatch.weights(role) for role in ("policy", "critic")}
    await run.train()
    assert [step for step in run.tracker.rows if step] == [1, 2, 3]
    for step in (1, 2, 3):
        row = run.tracker.rows[step]
        assert all(row[f"critic/{name}"] == pytest.approx(row[f"critic/{name}"]) for name in FOUND)
        assert row["critic/lr"] == 1e-2 and row["critic/grad_norm"] > 0 and row["time/values_s"] > 0
    for role, weights in before.items():
        assert any(
            not torch.equal(now, weights[name]) for name, now in run.dispatch.weights(role).items()
        )
    for batch in run.dispatch.batches:
        advantages, returns = gae(
            batch.rewards, batch.values, batch.loss_mask, gamma=0.95, lambd=0.9
        )
        assert torch.equal(batch.advantages, advantages) and torch.equal(batch.returns, returns)


async def test_streamed_gradients_of_both_are_those_of_the_synchronous_plan(model: str) -> None:
    found = {}
    for plan in (RayPPOTrainer, StreamedRayPPOTrainer):
        run = LocalRun(plan, ppo(model, steps=1, train_batch_size=8))
        noted = {role: _noting(run.dispatch.worker(role)) for role in ("policy", "critic")}
        await run.train()
        found[plan] = {role: torch.cat(gradients) for role, gradients in noted.items()}
    for role, expected in found[RayPPOTrainer].items():
        assert (
            float((found[StreamedRayPPOTrainer][role] - expected).norm() / expected.norm()) < 1e-6
        )


def _noting(worker: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    clip = worker.backend._clip

    def noted() -> float:
        found.extend(p.grad.flatten().clone() for p in worker.backend.model.parameters())
        return clip()

    worker.backend._clip = noted
    return found


async def test_whitened_advantages_have_mean_0_and_several_updates_move_values_from_the_first(
    model: str,
) -> None:
    cfg = ppo(model, steps=2, update_epochs_per_batch=2, policy_mini_batch_size=2)
    cfg.trainer.algorithm.gae_whiten = True
    run = await LocalRun(RayPPOTrainer, cfg).train()
    rows = [run.tracker.rows[step] for step in (1, 2)]
    assert all(row["critic/clip_frac"] > 0 for row in rows)
    assert len(run.dispatch.batches) == 2 * 2 * 2
    whole = [
        torch.cat([b.advantages[b.loss_mask] for b in run.dispatch.batches[i : i + 2]])
        for i in (0, 4)
    ]
    for advantages in whole:
        assert float(advantages.mean()) == pytest.approx(0.0, abs=1e-5)
        assert float(advantages.std()) == pytest.approx(1.0, abs=1e-4)


async def test_the_policy_waits_for_the_critics_first_steps(model: str) -> None:
    cfg = ppo(model, steps=3)
    cfg.trainer.critic.warmup_steps = 2
    run = LocalRun(RayPPOTrainer, cfg)
    first = run.dispatch.weights()
    await run.train()
    rows = run.tracker.rows
    assert ["policy/loss" in rows[step] for step in (1, 2, 3)] == [False, False, True]
    assert ["critic/loss" in rows[step] for step in (1, 2, 3)] == [True, True, True]
    assert len(run.dispatch.batches) == 1, "the policy was trained once"
    assert any(not torch.equal(now, first[name]) for name, now in run.dispatch.weights().items())


async def test_a_resumed_run_is_the_run_in_one_piece_bit_for_bit(
    model: str, tmp_path: Path
) -> None:
    whole = await LocalRun(RayPPOTrainer, ppo(model, steps=4)).train()

    async def piece(steps: int) -> LocalRun:
        saved = {"ckpt_path": str(tmp_path), "ckpt_interval": 2, "resume_mode": "latest"}
        return await LocalRun(RayPPOTrainer, ppo(model, steps=steps, **saved)).train()

    await piece(2)
    assert {part.name for part in (tmp_path / "step_000002").iterdir() if part.is_dir()} == {
        "policy",
        "critic",
    }
    again = await piece(4)
    for step in (3, 4):
        rows = [without_times(run.tracker.rows)[step] for run in (whole, again)]
        assert {k: v for k, v in rows[0].items() if k in rows[1]} == {
            k: v for k, v in rows[1].items() if k in rows[0]
        }
        assert rows[0].keys() >= {f"critic/{name}" for name in FOUND}
    for role in ("policy", "critic"):
        for name, weights in whole.dispatch.weights(role).items():
            assert torch.equal(again.dispatch.weights(role)[name], weights), (role, name)


async def test_sharing_the_engines_devices_changes_nothing(model: str) -> None:
    separate, together = ppo(model), ppo(model)
    together.trainer.placement.colocate_all = True
    runs = [await LocalRun(RayPPOTrainer, cfg).train() for cfg in (separate, together)]
    assert without_times(runs[0].tracker.rows) == without_times(runs[1].tracker.rows)


async def test_a_critic_on_devices_of_its_own_trains_at_the_same_time_and_alike(model: str) -> None:
    separate = ppo(model)
    separate.trainer.placement.colocate_policy_critic = False
    runs = [await LocalRun(RayPPOTrainer, cfg).train() for cfg in (ppo(model), separate)]
    assert without_times(runs[0].tracker.rows) == without_times(runs[1].tracker.rows)


async def test_the_final_critic_is_exported(model: str, tmp_path: Path) -> None:
    cfg = ppo(model, steps=1)
    cfg.trainer.critic.export_path = str(tmp_path / "critic")
    await LocalRun(RayPPOTrainer, cfg).train()
    assert (tmp_path / "critic" / "model.safetensors").exists()


class OwnAdvantages(RayPPOTrainer):
    """Sets advantages, and no returns for the critic."""

    def compute_advantages_and_returns(self, batch: ScoredBatch) -> ScoredBatch:
        batch.advantages = batch.rewards  # type: ignore[attr-defined]
        return batch


async def test_advantages_without_returns_are_refused_where_there_is_a_critic(model: str) -> None:
    with pytest.raises(UserError, match=r"must set batch\.returns"):
        await LocalRun(OwnAdvantages, ppo(model)).train()


async def test_a_plan_that_streams_refuses_to_whiten(model: str) -> None:
    cfg = ppo(model)
    cfg.trainer.algorithm.gae_whiten = True
    with pytest.raises(
        UserError, match=r"gae with trainer\.algorithm\.gae_whiten=true needs the whole batch"
    ):
        LocalRun(StreamedRayPPOTrainer, cfg)

"""On-policy distillation in every plan, in one process: real models, the embedded engine, real updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from skyasync.algorithms.advantages import compute_advantages
from skyasync.algorithms.presets import apply_preset
from skyasync.config.schema import Config
from skyasync.models.batch import ScoredBatch, UpdateBatch
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
from skyasync.trainer.plans.streamed import StreamedRayPPOTrainer
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, config, without_times

pytestmark = pytest.mark.slow

PLANS = [RayPPOTrainer, AsyncRayPPOTrainer, FullyAsyncRayPPOTrainer, StreamedRayPPOTrainer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(Path(tmp_path_factory.mktemp("model")), tied=True)


@pytest.fixture(scope="module")
def teacher(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another model, with the same tokens."""
    torch.manual_seed(1)
    found = AutoModelForCausalLM.from_pretrained(model)
    for parameter in found.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("teacher")
    found.save_pretrained(folder)
    return str(folder)


def distilled(model: str, teacher: str, steps: int = 2, **trainer: Any) -> Config:
    cfg = config(model, steps=steps, **trainer)
    for key, value in apply_preset("distill").items():
        setattr(cfg.trainer.algorithm, key.removeprefix("trainer.algorithm."), value)
    cfg.trainer.teacher.model.path = teacher
    return cfg


@pytest.mark.parametrize("plan", PLANS)
async def test_in_every_plan_an_advantage_is_what_the_teacher_would_rather_have_had(
    model: str, teacher: str, plan: type[RayPPOTrainer]
) -> None:
    cfg = distilled(model, teacher)
    cfg.trainer.teacher.weight = 0.5
    run = LocalRun(plan, cfg)
    first = run.dispatch.weights()
    await run.train()
    asked = LocalRun(plan, cfg).dispatch.worker("teacher")
    for batch in run.dispatch.batches:
        torch.testing.assert_close(batch.teacher_logprobs, asked.logprobs(batch), atol=1e-5, rtol=0)
        expected = 0.5 * (batch.teacher_logprobs - batch.proximal_logprobs) * batch.loss_mask
        assert torch.equal(batch.advantages, expected) and expected.any()
    for step in (1, 2):
        row = run.tracker.rows[step]
        assert row["teacher/kl"] > 0 and row["policy/grad_norm"] > 0 and row["time/teacher_s"] > 0
    assert any(not torch.equal(now, first[name]) for name, now in run.dispatch.weights().items())


@pytest.mark.parametrize("plan", PLANS)
async def test_whole_distributions_are_compared_where_that_is_asked_for(
    model: str, teacher: str, plan: type[RayPPOTrainer]
) -> None:
    """The gradient of the first step is that of a plain formula on whole logits, in float64."""
    streams = plan is StreamedRayPPOTrainer  # a step's batch in parts
    cfg = distilled(model, teacher, steps=1 if streams else 2)
    cfg.trainer.teacher.top_k, cfg.trainer.teacher.weight = 8, 0.5
    run = await LocalRun(plan, cfg).train()
    batch = UpdateBatch.concatenate(run.dispatch.batches) if streams else run.dispatch.batches[0]
    assert batch.teacher_logprobs is None and not batch.advantages.any()
    expected, plain_gradient = plainly(model, teacher, batch, k=8, weight=0.5)
    row = run.tracker.rows[1]
    assert row["policy/teacher_kl"] == pytest.approx(expected, rel=1e-5)
    assert row["policy/grad_norm"] == pytest.approx(plain_gradient, rel=1e-4)
    assert streams or run.tracker.rows[2]["policy/grad_norm"] > 0


def plainly(model: str, teacher: str, batch: Any, *, k: int, weight: float) -> tuple[float, float]:
    """The mean KL over the loss tokens, and the norm of its gradient."""
    student, taught = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (model, teacher)
    )

    def log_probabilities_of(found: Any) -> torch.Tensor:
        logits = found(batch.tokens, attention_mask=batch.attention_mask.long()).logits[:, :-1]
        return logits.log_softmax(-1)[batch.loss_mask[:, 1:]]

    mine, theirs = log_probabilities_of(student), log_probabilities_of(taught).detach()
    top = theirs.topk(k).indices
    rests = [1 - each.gather(-1, top).exp().sum(-1) for each in (mine, theirs)]
    kl = (mine.gather(-1, top).exp() * (mine - theirs).gather(-1, top)).sum(-1) + rests[0] * (
        rests[0] / rests[1]
    ).log()
    (weight * kl.mean()).backward()
    norm = torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None]).norm()
    return float(kl.detach().mean()), float(norm)


async def test_rewards_and_a_teacher_add_up(model: str, teacher: str) -> None:
    cfg = distilled(model, teacher, steps=1)
    cfg.trainer.algorithm.advantage_estimator = "grpo"
    run = await LocalRun(RayPPOTrainer, cfg).train()
    (batch,) = run.dispatch.batches
    rewarded, _ = compute_advantages(
        cfg.trainer.algorithm, batch.rewards, batch.loss_mask, batch.group_ids
    )
    taught = (batch.teacher_logprobs - batch.proximal_logprobs) * batch.loss_mask
    assert rewarded.any() and torch.equal(batch.advantages, rewarded + taught)


async def test_several_updates_use_the_advantages_of_the_policy_before_them(
    model: str, teacher: str
) -> None:
    cfg = distilled(model, teacher, steps=1, update_epochs_per_batch=2)
    run = await LocalRun(RayPPOTrainer, cfg).train()
    first, second = run.dispatch.batches
    assert torch.equal(first.advantages, second.advantages)


async def test_a_model_is_taught_nothing_by_itself_and_a_run_repeats(model: str) -> None:
    runs = [
        await LocalRun(RayPPOTrainer, distilled(model, model, steps=1)).train() for _ in range(2)
    ]
    assert abs(runs[0].tracker.rows[1]["teacher/kl"]) < 1e-6
    assert without_times(runs[0].tracker.rows) == without_times(runs[1].tracker.rows)


class OwnAdvantages(RayPPOTrainer):
    """Computes its own advantages, without a teacher."""

    def compute_advantages_and_returns(self, batch: ScoredBatch) -> ScoredBatch:
        batch.advantages = batch.loss_mask.float()  # type: ignore[attr-defined]
        return batch


async def test_a_hook_for_advantages_keeps_the_teacher(model: str, teacher: str) -> None:
    run = await LocalRun(OwnAdvantages, distilled(model, teacher, steps=1)).train()
    (batch,) = run.dispatch.batches
    taught = (batch.teacher_logprobs - batch.proximal_logprobs) * batch.loss_mask
    assert torch.equal(batch.advantages, batch.loss_mask + taught)

"""A value head on the policy's states: its values, its training, and the effect of its loss on the policy,
independent of ranks, adapters and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from skyasync.config.schema import Config
from skyasync.errors import NonFiniteError, UserError
from skyasync.models import VALUE, VOCABULARY
from skyasync.models.batch import UpdateBatch
from skyasync.models.heads import HEADS
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.ranks import split_for_ranks
from tests.workers.conftest import config_for, make_batch, step_metrics
from tests.workers.processes import Rank, Ranks

pytestmark = pytest.mark.slow


def shared_config(path: str, coef: float = 0.1, rank: int = 0, **critic: Any) -> Config:
    cfg = config_for(path)
    cfg.trainer.algorithm.advantage_estimator = "gae"
    cfg.trainer.critic.backbone, cfg.trainer.critic.value_loss_coef = "shared", coef
    cfg.trainer.critic.optimizer_config.lr = 3e-2
    cfg.trainer.critic.optimizer_config.max_grad_norm = 0.0
    cfg.trainer.policy.optimizer_config.max_grad_norm = 0.0
    cfg.trainer.policy.lora.rank = rank
    vars(cfg.trainer.critic).update(critic)
    return cfg


def started(cfg: Config) -> PolicyWorker:
    worker = PolicyWorker(cfg, threads=1)
    worker.setup()
    return worker


def learning(seed: int = 0, worker: PolicyWorker | None = None, **size: Any) -> UpdateBatch:
    batch = make_batch(seed=seed, **size)
    drawn = torch.Generator().manual_seed(seed)
    batch.returns = torch.randn(batch.tokens.shape, generator=drawn) * batch.loss_mask
    batch.values = (
        worker.values(batch) if worker else 0.1 * torch.randn(batch.tokens.shape, generator=drawn)
    )
    return batch


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (
        (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().flatten().clone()
    )


def gradients(worker: PolicyWorker) -> tuple[Tensor, Tensor]:
    """The gradients of the policy and of the head."""
    policy = [whole(p.grad) for p in worker.backend.model.model.parameters() if p.grad is not None]
    head = worker.backend.model.value_head
    assert head is not None
    return torch.cat(policy) if policy else torch.zeros(0), whole(head.weight.grad)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("coef", [0.0, 0.3])
def test_the_gradient_is_the_policys_and_a_share_of_a_value_loss_written_by_hand(
    untied_model: str, coef: float
) -> None:
    worker, batch = started(shared_config(untied_model, coef)), learning()
    alone = config_for(untied_model)
    policy = started(alone)
    policy.forward_backward(make_batch())
    expected = torch.cat([whole(p.grad) for p in policy.backend.model.parameters()])

    model, head = (
        HEADS[VOCABULARY].load(untied_model, torch.float32),
        worker.backend.model.value_head,
    )
    assert head is not None
    weight = head.weight.detach().clone().requires_grad_()
    states = model.model(batch.tokens, attention_mask=batch.attention_mask.long()).last_hidden_state
    values = (states @ weight[0]).roll(1, 1)
    clipped = batch.values + (values - batch.values).clamp(-0.2, 0.2)
    loss = torch.maximum((values - batch.returns) ** 2, (clipped - batch.returns) ** 2) / 2
    (batch.loss_weights * loss).sum().backward()
    by_hand = torch.cat(
        [
            torch.zeros_like(p).flatten() if p.grad is None else whole(p.grad)
            for p in model.parameters()
        ]
    )

    torch.testing.assert_close(
        worker.values(batch), values.detach() * batch.loss_mask, atol=1e-5, rtol=0
    )
    worker.forward_backward(batch)
    found, of_head = gradients(worker)
    assert distance(found, expected + coef * by_hand) < 1e-5
    assert coef or torch.equal(found, expected), (
        "detached, it changes no bit of the policy's gradient"
    )
    assert distance(of_head, whole(weight.grad)) < 1e-5
    metrics = step_metrics(worker)
    assert metrics["critic/loss"] == pytest.approx(
        (batch.loss_weights * loss).sum().item(), rel=1e-5
    )
    assert metrics["critic/grad_norm"] == pytest.approx(float(of_head.norm()), rel=1e-5)
    assert (metrics["lr"], metrics["critic/lr"]) == (1e-2, 3e-2)
    assert metrics["grad_norm"] == pytest.approx(float(found.norm()), rel=1e-5)
    assert 0 < metrics["critic/clip_frac"] < 1
    worker.forward_backward(batch)
    metrics = worker.optimizer_step(lr_scale=0.5)
    assert (metrics["lr"], metrics["critic/lr"]) == (0.5e-2, 3e-2)


def test_values_come_with_the_log_probabilities_in_one_pass(untied_model: str) -> None:
    worker, batch = started(shared_config(untied_model)), make_batch()
    both = worker.logprobs_and_values(batch)
    assert torch.equal(both[..., 0], worker.logprobs(batch))
    assert torch.equal(both[..., 1], worker.values(batch))
    assert not both[~batch.loss_mask].any()


def test_the_head_begins_as_a_critics_of_its_own(untied_model: str) -> None:
    from skyasync.workers.critic import CriticWorker

    cfg = shared_config(untied_model)
    shared = started(cfg)
    cfg.trainer.critic.backbone = "own"
    own = CriticWorker(cfg, threads=1)
    own.setup()
    torch.testing.assert_close(
        shared.values(make_batch()), own.values(make_batch()), atol=1e-6, rtol=0
    )


def test_in_the_warm_up_the_head_alone_is_trained(untied_model: str) -> None:
    worker, batch = started(shared_config(untied_model)), learning()
    before = [whole(p) for p in worker.backend.model.model.parameters()]
    head = whole(worker.backend.model.value_head.weight)  # type: ignore[union-attr]
    batch.critic_alone = True
    worker.forward_backward(batch)
    assert not len(gradients(worker)[0])
    metrics = step_metrics(worker)
    assert all(name.startswith("critic/") for name in metrics) and worker.backend.step == 0
    assert all(
        torch.equal(whole(p), was)
        for p, was in zip(worker.backend.model.model.parameters(), before, strict=True)
    )
    assert not torch.equal(whole(worker.backend.model.value_head.weight), head)  # type: ignore[union-attr]


def test_it_is_clipped_by_its_own_norm(untied_model: str) -> None:
    cfg = shared_config(untied_model)
    cfg.trainer.critic.optimizer_config.max_grad_norm = 1e-3
    worker = started(cfg)
    worker.forward_backward(learning())
    policy, _ = gradients(worker)
    worker.examine()
    worker.backend._clip()
    assert float(gradients(worker)[1].norm()) == pytest.approx(1e-3, rel=1e-2)
    assert torch.equal(gradients(worker)[0], policy)


def test_returns_that_are_not_finite_change_neither(untied_model: str) -> None:
    worker, batch = started(shared_config(untied_model)), learning()
    before = [whole(p) for p in worker.backend.model.parameters()]
    batch.returns[batch.loss_mask] = float("nan")
    worker.forward_backward(batch)
    with pytest.raises(NonFiniteError, match="critic"):
        worker.optimizer_step()
    assert all(
        torch.equal(whole(p), was)
        for p, was in zip(worker.backend.model.parameters(), before, strict=True)
    )


def test_a_batch_without_returns_is_refused(untied_model: str) -> None:
    with pytest.raises(ValueError, match="values and returns"):
        started(shared_config(untied_model)).forward_backward(make_batch())


def of_rank(rank: Rank) -> tuple[Any, Any, dict[str, float], Any]:
    batch = learning(groups=5)
    mesh = rank.worker.backend.spec.mesh_shape
    rows = split_for_ranks(batch, mesh.data)[mesh.data_rank(rank.rank)]
    rank.worker.forward_backward(batch.select(rows).trim())
    policy, head = gradients(rank.worker)
    metrics = step_metrics(rank.worker)
    return (
        policy.numpy(),
        head.numpy(),
        metrics,
        whole(rank.worker.backend.model.value_head.weight).numpy(),
    )


@pytest.mark.parametrize(
    ("count", "rank", "sizes"),
    [
        (2, 0, {}),
        pytest.param(4, 4, {}, marks=pytest.mark.matrix),
        (2, 0, {"context": 2}),
        (2, 0, {"tensor": 2}),
        pytest.param(4, 4, {"context": 2, "tensor": 2}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_the_gradient_on_several_ranks_is_that_of_one(
    untied_model: str, ranks: Callable[[int], Ranks], count: int, rank: int, sizes: dict[str, int]
) -> None:
    cfg = shared_config(untied_model, rank=rank)
    cfg.trainer.critic.optimizer_config.max_grad_norm = 0.1
    one = of_rank(Rank(0, 1, started(cfg)))
    vars(cfg.trainer.parallel).update(sizes)
    ranks(count).set_up(PolicyWorker, cfg)
    for other in ranks(count).call(of_rank):
        for found, expected in zip(other[:2], one[:2], strict=True):
            assert distance(torch.from_numpy(found), torch.from_numpy(expected)) < (
                2e-6 if "tensor" in sizes else 1e-6
            )
        assert other[2] == pytest.approx(one[2], rel=1e-5)
        torch.testing.assert_close(
            torch.from_numpy(other[3]), torch.from_numpy(one[3]), atol=1e-6, rtol=0
        )


def steps(worker: PolicyWorker, start: int, end: int) -> list[dict[str, float]]:
    found = []
    for seed in range(start, end):
        worker.forward_backward(learning(seed, worker))
        found.append(worker.optimizer_step())
    return found


@pytest.mark.parametrize("rank", [0, 4])
def test_training_goes_on_from_a_checkpoint_bit_by_bit(
    untied_model: str, tmp_path: Path, rank: int
) -> None:
    cfg = shared_config(untied_model, rank=rank)
    original, resumed = started(cfg), started(cfg)
    steps(original, 0, 2)
    original.save(str(tmp_path))
    expected = steps(original, 2, 4)
    resumed.load(str(tmp_path))
    assert steps(resumed, 2, 4) == expected
    for name, parameter in resumed.backend.model.named_parameters():
        assert torch.equal(parameter, original.backend.model.get_parameter(name))


def saved(rank: Rank, folder: str) -> None:
    of_rank(rank)
    rank.worker.begin_save(folder)
    while rank.worker.saved() is None:
        pass


def test_two_ranks_save_asynchronously_what_one_loads(
    untied_model: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    cfg = shared_config(untied_model)
    ranks(2).set_up(PolicyWorker, cfg)
    ranks(2).call(saved, str(tmp_path))
    worker = started(cfg)
    worker.load(str(tmp_path))
    torch.testing.assert_close(
        torch.from_numpy(of_rank(Rank(0, 1, worker))[3]),
        torch.from_numpy(ranks(2).call(of_rank)[0][3]),
        atol=1e-6,
        rtol=0,
    )


def test_checkpoints_of_the_other_backbone_are_refused_by_the_key(
    untied_model: str, tmp_path: Path
) -> None:
    shared, policy = started(shared_config(untied_model)), started(config_for(untied_model))
    shared.save(str(tmp_path / "shared"))
    policy.save(str(tmp_path / "policy"))
    with pytest.raises(UserError, match=r"trainer\.critic\.backbone"):
        policy.load(str(tmp_path / "shared"))
    with pytest.raises(UserError, match=r"trainer\.critic\.backbone"):
        shared.load(str(tmp_path / "policy"))


@pytest.mark.parametrize("rank", [0, 4])
def test_what_is_exported_is_a_critic_of_its_own_that_says_the_same(
    untied_model: str, tmp_path: Path, rank: int
) -> None:
    cfg = shared_config(untied_model, rank=rank)
    worker = started(cfg)
    steps(worker, 0, 2)
    worker.export_critic(str(tmp_path / "critic"))
    worker.export(str(tmp_path / "policy"))
    own = shared_config(untied_model)
    own.trainer.critic.backbone, own.trainer.critic.model.path = "own", str(tmp_path / "critic")
    from skyasync.workers.critic import CriticWorker

    critic = CriticWorker(own, threads=1)
    critic.setup()
    torch.testing.assert_close(
        critic.values(make_batch()), worker.values(make_batch()), atol=1e-6, rtol=0
    )
    policy = started(config_for(str(tmp_path / "policy")))
    torch.testing.assert_close(
        policy.logprobs(make_batch()), worker.logprobs(make_batch()), atol=1e-5, rtol=0
    )
    assert VALUE not in {name.partition(".")[0] for name in worker.backend.sharded_weights()}


def test_bfloat16_keeps_a_float32_head(untied_model: str) -> None:
    cfg = shared_config(untied_model)
    cfg.trainer.policy.model.dtype = "bfloat16"
    worker, exact = started(cfg), started(shared_config(untied_model))
    difference = (worker.values(make_batch()) - exact.values(make_batch())).abs().max()
    assert 0 < float(difference) < 0.02
    metrics = steps(worker, 0, 1)[0]
    assert (
        metrics["critic/grad_norm"] > 0
        and worker.backend.model.value_head.weight.dtype == torch.float32
    )  # type: ignore[union-attr]

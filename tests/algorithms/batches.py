"""Random batches in float64, with inner gaps in the mask, for the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from skyasync.algorithms.objective import Objective, loss_weights
from skyasync.config.schema.algorithm import AlgorithmConfig
from skyasync.errors import UserError


@dataclass
class Batch:
    """The inputs of an objective; names are those of ``TrainingBatch``, and ``current``."""

    current: Tensor
    proximal_logprobs: Tensor
    behaviour_logprobs: Tensor
    reference_logprobs: Tensor
    advantages: Tensor
    entropy: Tensor
    rewards: Tensor
    loss_mask: Tensor
    group_ids: Tensor
    selection: Tensor | None = None
    loss_weights: Tensor | None = None

    def rows(self, index: Tensor) -> Batch:
        return replace(
            self, **{name: None if t is None else t[index] for name, t in vars(self).items()}
        )


def random_batch(rows: int = 6, length: int = 7, seed: int = 0, group_size: int = 3) -> Batch:
    """Policies that differ by about 0.3 per token; every row has a loss token, and column 0 none."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(rows, length, dtype=torch.float64, generator=generator)

    mask = torch.rand(rows, length, generator=generator) < 0.7
    mask[:, 0], mask[:, 1] = False, True
    behaviour = -normal(1.0).abs() - 0.1
    proximal = behaviour + normal(0.3)
    return Batch(
        current=proximal + normal(0.3), proximal_logprobs=proximal, behaviour_logprobs=behaviour,
        reference_logprobs=behaviour + normal(0.3), advantages=normal(1.0), entropy=normal(1.0).abs(),
        rewards=normal(1.0) * mask, loss_mask=mask, group_ids=torch.arange(rows) // group_size,
    )  # fmt: skip


def config(**changes: Any) -> AlgorithmConfig:
    return replace(AlgorithmConfig(), **changes)


def objective_or_none(cfg: AlgorithmConfig) -> Objective | None:
    """None if the combination is rejected."""
    try:
        return Objective(cfg)
    except UserError:
        return None


def prepared(cfg: AlgorithmConfig, batch: Batch) -> Batch:
    """The whole batch with everything that is computed before it is split."""
    weights = loss_weights(cfg, batch.loss_mask, batch.group_ids, dtype=torch.float64)
    return replace(batch, loss_weights=weights, **Objective(cfg).prepare(batch))


def token_loss(
    cfg: AlgorithmConfig, batch: Batch, current: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    return Objective(cfg).token_loss(
        current=batch.current if current is None else current,
        proximal=batch.proximal_logprobs,
        behaviour=batch.behaviour_logprobs,
        reference=batch.reference_logprobs,
        advantages=batch.advantages,
        mask=batch.loss_mask,
        entropy=batch.entropy,
        selection=batch.selection,
    )


def gradient(cfg: AlgorithmConfig, batch: Batch) -> Tensor:
    """d loss / d current of a prepared batch, or of a part of one."""
    current = batch.current.clone().requires_grad_()
    (batch.loss_weights * token_loss(cfg, batch, current)[0]).sum().backward()
    assert current.grad is not None
    return current.grad

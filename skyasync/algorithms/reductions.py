"""How token losses become one number: a weight per token, made once for a whole mini-batch.

Invariant: the loss is ``(weights * token_loss).sum()``, and the weights have seen the whole
mini-batch. So cutting it into micro-batches, packing it or spreading it over ranks (whose gradients
are summed) cannot change the gradient. Each reduction takes the mask ``[batch, length]`` and
``group_ids [batch]`` and returns weights ``[batch, length]``, 0 outside the mask. Rows without loss
tokens do not count as sequences (OpenRLHF, verl); with ``count_empty`` they do (SkyRL, TRL).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from skyasync.algorithms import LOSS_REDUCTIONS
from skyasync.algorithms.binding import bind, configured, setting
from skyasync.algorithms.masked import JoinedRows
from skyasync.errors import UserError
from skyasync.lazy_torch import torch
from skyasync.registry import declared

if TYPE_CHECKING:
    from torch import Tensor

F = TypeVar("F", bound="Callable[..., Tensor]")


def loss_weights(
    cfg: object,
    mask: Tensor,
    group_ids: Tensor,
    dtype: torch.dtype | None = None,
    trajectory_ids: Tensor | None = None,
) -> Tensor:
    """The weights of ``loss_reduction``, ``[batch, length]``, of a whole mini-batch.

    Call it before the mini-batch is split.

    Args:
        dtype: of the weights, by default float64.
        trajectory_ids: ``[batch]``; rows that share one count as one sequence.
    """
    if trajectory_ids is not None:
        samples = JoinedRows(trajectory_ids)
        joined_mask = samples.join(mask)
        weights = loss_weights(cfg, joined_mask, samples.first(group_ids), dtype)
        return samples.split(weights)
    name = setting(cfg, "loss_reduction", "token_mean")
    reduction = bind(LOSS_REDUCTIONS[name], cfg)
    return reduction({"mask": mask, "group_ids": group_ids}).to(dtype or torch.float64)


def loss_numerators(
    cfg: object,
    mask: Tensor,
    group_ids: Tensor,
    trajectory_ids: Tensor | None = None,
) -> tuple[Tensor, float]:
    """The weights of some whole groups without their denominator, and the denominator.

    Weights are ``[batch, length]``. Denominators add up: the weights of all parts of a mini-batch,
    divided by the sum of their denominators, are those that ``loss_weights`` gives for the
    mini-batch.

    Raises:
        UserError: for a reduction of the user's own that gives no denominator.
    """
    if trajectory_ids is not None:
        samples = JoinedRows(trajectory_ids)
        weights, total = loss_numerators(cfg, samples.join(mask), samples.first(group_ids))
        return samples.split(weights), total
    name = setting(cfg, "loss_reduction", "token_mean")
    reduction = LOSS_REDUCTIONS[name]
    denominator = declared(reduction, "denominator")
    if denominator is None:
        raise UserError(
            f"trainer.algorithm.loss_reduction={name} does not say what it divides by (divided_by), so "
            f"its weights cannot be made part by part: choose another, or another plan"
        )
    inputs = {"mask": mask, "group_ids": group_ids}
    total = float(bind(denominator, cfg)(inputs))
    weights = bind(reduction, cfg)(inputs)
    return weights * max(total, 1.0), total  # reductions divide by 1 at least


def divided_by(denominator: Callable[..., Tensor]) -> Callable[[F], F]:
    """Name the denominator (at least 1) of a reduction.

    It is a function of the same arguments, additive over parts of whole groups. A reduction without
    one needs the whole mini-batch at once.
    """

    def mark(reduction: F) -> F:
        reduction.denominator = denominator  # type: ignore[attr-defined]
        return reduction

    return mark


def _tokens(mask: Tensor, group_ids: Tensor) -> Tensor:
    return mask.sum()


def _nothing(mask: Tensor, group_ids: Tensor) -> Tensor:
    return torch.zeros(())


def _sequences(mask: Tensor, group_ids: Tensor, *, count_empty: bool = False) -> Tensor:
    rows = torch.ones_like(mask[:, 0]) if count_empty else mask.any(1)  # bool [batch]
    return rows.sum()


def _prompts(mask: Tensor, group_ids: Tensor) -> Tensor:
    return torch.tensor(len(group_ids[mask.any(1)].unique()))


@LOSS_REDUCTIONS.register("token_mean", by_parts=True)
@divided_by(_tokens)
def token_mean(mask: Tensor, group_ids: Tensor) -> Tensor:
    """Every token weighs the same: 1 / tokens. Source: DAPO."""
    return mask.double() / mask.sum().clamp(min=1)


@LOSS_REDUCTIONS.register("token_sum", by_parts=True)
@divided_by(_nothing)
def token_sum(mask: Tensor, group_ids: Tensor) -> Tensor:
    """Every token weighs 1."""
    return mask.double()


@LOSS_REDUCTIONS.register("sequence_mean", by_parts=True)
@divided_by(_sequences)
def sequence_mean(mask: Tensor, group_ids: Tensor, *, count_empty: bool = False) -> Tensor:
    """Every sequence weighs the same, and so do the tokens within one. Source: GRPO."""
    sequences = _sequences(mask, group_ids, count_empty=count_empty).clamp(min=1)
    tokens = mask.sum(1, keepdim=True).clamp(min=1)  # [batch, 1]
    return mask.double() / tokens / sequences


@LOSS_REDUCTIONS.register("sequence_token_sum", by_parts=True)
@divided_by(_sequences)
def sequence_token_sum(mask: Tensor, group_ids: Tensor, *, count_empty: bool = False) -> Tensor:
    """The mean over sequences of the sum over tokens: 1 / sequences.

    Source: verl, ROLL ``seq-mean-token-sum``.
    """
    sequences = _sequences(mask, group_ids, count_empty=count_empty).clamp(min=1)
    return mask.double() / sequences


@LOSS_REDUCTIONS.register("seq_mean_token_sum_norm", by_parts=True)
@divided_by(_sequences)
@configured(max_seq_len="max_seq_len")
def seq_mean_token_sum_norm(
    mask: Tensor,
    group_ids: Tensor,
    *,
    max_seq_len: int = 0,
    count_empty: bool = False,
) -> Tensor:
    """1 / (sequences * max_seq_len): the sum over tokens, divided by a constant. Source: Dr.GRPO.

    ``max_seq_len=0`` takes the width of the tensor, which changes from batch to batch: set it.
    """
    weights = sequence_token_sum(mask, group_ids, count_empty=count_empty)
    return weights / (max_seq_len or mask.shape[1])


@LOSS_REDUCTIONS.register("prompt_mean", by_parts=True)
@divided_by(_prompts)
def prompt_mean(mask: Tensor, group_ids: Tensor) -> Tensor:
    """Every prompt weighs the same, and so do the tokens within its group.

    Source: SkyRL ``prompt_mean``.
    """
    groups, index = torch.unique(group_ids, return_inverse=True)  # [groups], [batch]
    tokens = torch.zeros(len(groups), dtype=torch.float64, device=mask.device)
    tokens = tokens.index_add(0, index, mask.sum(1).double())  # [groups]
    row_tokens = tokens.clamp(min=1)[index].unsqueeze(1)  # [batch, 1]: of the row's group
    prompts = (tokens > 0).sum().clamp(min=1)
    return mask.double() / row_tokens / prompts

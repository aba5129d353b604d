"""What changes weights by their gradient: AdamW, in full or with a short state (``short_adamw``), or Muon for the
matrices of a model's layers and AdamW for all else.

Invariant: Muon turns a matrix whole, whatever its shards: every rank gathers it, does the same with it, and keeps its
own part, so one gradient makes the same weights bit for bit on any number of ranks. The arithmetic is torch's own Muon,
its step scaled so that AdamW's learning rates and weight decay fit (``match_rms_adamw``: Liu et al. 2025, "Muon is
Scalable for LLM Training").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from skyasync.config.schema import OptimizerConfig
from skyasync.errors import UserError
from skyasync.workers.layers import decoder_layers
from skyasync.workers.model import Wrapped
from skyasync.workers.short_adamw import ShortAdamW

MOMENTUM = "momentum_buffer"


def make_optimizer(
    wrapper: Wrapped, learnt: Iterable[nn.Parameter], settings: OptimizerConfig, seed: int = 0
) -> torch.optim.AdamW:
    """For the parameters ``learnt`` of a model; vectors have no weight decay.

    Muon has the two-dimensional weights of decoder layers: neither embeddings nor a head, nor stacked experts.

    Args:
        seed: of weights that are rounded by chance.
    """
    learnt = list(learnt)
    turned: set[nn.Parameter] = set()
    if settings.name == "muon":
        turned = {p for layer in decoder_layers(wrapper) for p in layer.parameters() if p.dim() == 2}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in learnt if p in turned], "weight_decay": settings.weight_decay, "muon": True},
        {"params": [p for p in learnt if p.dim() > 1 and p not in turned], "weight_decay": settings.weight_decay},
        {"params": [p for p in learnt if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    first, second = settings.adam_betas
    options: dict[str, Any] = {"lr": settings.lr, "betas": (first, second), "eps": settings.eps, "fused": True}
    if settings.name == "muon":
        groups = [{"muon": False, **group} for group in groups]
        return MuonAdamW(groups, momentum=settings.muon_momentum, **options)
    if has_short_state(settings):
        for parameter in learnt:
            if parameter.dtype == torch.bfloat16:
                _add_up_in_float32(parameter)
        return ShortAdamW(groups, eight_bits=settings.name == "adamw_8bit", seed=seed, **options)
    return torch.optim.AdamW(groups, **options)


def has_short_state(settings: OptimizerConfig) -> bool:
    """Moments of eight bits, or weights rounded by chance: both go by the rows of a matrix (``ShortAdamW``)."""
    return settings.name == "adamw_8bit" or settings.bf16_stochastic_round


def master_dtype(settings: OptimizerConfig, computing: torch.dtype, section: str) -> torch.dtype:
    """Dtype of the weights between steps.

    Args:
        computing: dtype of the role's model.
        section: the role's, for errors.

    Raises:
        UserError: if weights are to be rounded to a dtype that is not the model's.
    """
    if not settings.bf16_stochastic_round:
        return torch.float32
    if computing != torch.bfloat16:
        raise UserError(
            f"{section}.optimizer_config.bf16_stochastic_round=true is for weights in bfloat16, and here they are "
            f"{str(computing).removeprefix('torch.')}: set {section}.model.dtype=bfloat16, or remove it"
        )
    return torch.bfloat16


def _add_up_in_float32(parameter: nn.Parameter) -> None:
    """Its gradient over micro-batches: FSDP2 and autograd add what comes to what is there."""

    def longer(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if parameter.grad.dtype != torch.float32:
            parameter.grad = parameter.grad.float()

    parameter.grad_dtype = None  # of any dtype
    parameter.register_post_accumulate_grad_hook(longer)


class MuonAdamW(torch.optim.AdamW):
    """Groups with ``muon`` set are matrices; the others are AdamW's.

    Args:
        groups: as torch's, each with ``muon`` (bool).
        momentum: of Muon, with Nesterov's step.
        options: AdamW's.
    """

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float, **options: Any) -> None:  # noqa: ANN401
        super().__init__(groups, **options)
        self._momentum = momentum

    def __setstate__(self, state: dict[str, Any]) -> None:
        """AdamW looks for its own moments in all groups that it is given."""
        super().__setstate__({**state, "param_groups": [g for g in state["param_groups"] if not g["muon"]]})
        self.param_groups = state["param_groups"]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        everything = self.param_groups
        self.param_groups = [group for group in everything if not group["muon"]]
        try:
            super().step(closure)
        finally:
            self.param_groups = everything
        for group in everything:
            for parameter in group["params"] if group["muon"] else ():
                if parameter.grad is not None:
                    self._turn(parameter, group["lr"], group["weight_decay"])

    def _turn(self, parameter: Tensor, lr: float, weight_decay: float) -> None:
        state = self.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        state[MOMENTUM].lerp_(parameter.grad, 1 - self._momentum)
        update = parameter.grad.lerp(state[MOMENTUM], self._momentum)
        if isinstance(update, DTensor) and isinstance(parameter, DTensor):
            whole = _orthogonal(update.full_tensor(), lr)
            # Every rank has the whole: nothing is sent.
            moved: Tensor = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        else:
            moved = _orthogonal(update, lr)
        parameter.mul_(1 - lr * weight_decay).add_(moved)


def _orthogonal(update: Tensor, lr: float) -> Tensor:
    """What torch's Muon adds to a matrix for this update: it is given one of zeros, and neither momentum nor decay."""
    added = nn.Parameter(torch.zeros_like(update))
    added.grad = update
    torch.optim.Muon(
        [added], lr=lr, momentum=0.0, nesterov=False, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    ).step()
    return added.detach()

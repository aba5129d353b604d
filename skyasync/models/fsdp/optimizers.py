"""Optimizers, gradient norms and clipping: AdamW, in full or with a low-precision state, or Muon
for the matrices of a model's layers and AdamW for all else.

Invariant: Muon orthogonalizes a matrix whole, whatever its shards: every rank gathers it, computes
the same update and keeps its own part. One gradient gives bitwise the same weights on any number of
ranks. The arithmetic is torch's own Muon; its steps are scaled so that AdamW's learning rates and
weight decay fit (``match_rms_adamw``: Liu et al. 2025, "Muon is Scalable for LLM Training").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from skyasync.config.schema import OptimizerConfig
from skyasync.errors import UserError
from skyasync.models.backend import Totals
from skyasync.models.fsdp.gradient_projection import (
    PREVIOUS,
    begin_previous,
    factor_of_previous,
    products,
    project,
)
from skyasync.models.fsdp.loading import decoder_layers
from skyasync.models.fsdp.low_precision_adamw import LowPrecisionAdamW
from skyasync.models.fsdp.sharding import Mesh, local
from skyasync.models.token_model import TokenModel

MOMENTUM = "momentum_buffer"


def make_optimizer(
    wrapper: TokenModel, learnt: Iterable[nn.Parameter], settings: OptimizerConfig, seed: int = 0
) -> torch.optim.AdamW:
    """For the parameters ``learnt`` of a model; vectors have no weight decay.

    Muon has the two-dimensional weights of decoder layers: neither embeddings nor a head, nor
    stacked experts.

    Args:
        seed: of stochastic rounding.
    """
    learnt = list(learnt)
    matrices: set[nn.Parameter] = set()
    if settings.name == "muon":
        matrices = {
            p for layer in decoder_layers(wrapper) for p in layer.parameters() if p.dim() == 2
        }
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in learnt if p in matrices],
            "weight_decay": settings.weight_decay,
            "muon": True,
        },
        {
            "params": [p for p in learnt if p.dim() > 1 and p not in matrices],
            "weight_decay": settings.weight_decay,
        },
        {"params": [p for p in learnt if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    first, second = settings.adam_betas
    options: dict[str, Any] = {
        "lr": settings.lr,
        "betas": (first, second),
        "eps": settings.eps,
        "fused": True,
    }
    if settings.name == "muon":
        groups = [{"muon": False, **group} for group in groups]
        return MuonAdamW(groups, momentum=settings.muon_momentum, **options)
    if is_low_precision(settings):

        def accumulate_in_float32(parameter: Tensor) -> None:
            """FSDP2 and autograd add a micro-batch's gradient to the existing one, in the dtype of
            that."""
            assert parameter.grad is not None
            if parameter.grad.dtype != torch.float32:
                parameter.grad = parameter.grad.float()

        for parameter in learnt:
            if parameter.dtype == torch.bfloat16:
                parameter.grad_dtype = None  # of any dtype
                parameter.register_post_accumulate_grad_hook(accumulate_in_float32)
        return LowPrecisionAdamW(
            groups, eight_bits=settings.name == "adamw_8bit", seed=seed, **options
        )
    return torch.optim.AdamW(groups, **options)


def is_low_precision(settings: OptimizerConfig) -> bool:
    """An eight-bit optimizer state, or stochastic rounding: both go by the rows of a matrix
    (``LowPrecisionAdamW``)."""
    return settings.name == "adamw_8bit" or settings.bf16_stochastic_round


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
        """AdamW looks for its own state in all groups that it is given."""
        super().__setstate__(
            {**state, "param_groups": [g for g in state["param_groups"] if not g["muon"]]}
        )
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
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                lr = group["lr"]
                if MOMENTUM not in state:
                    state[MOMENTUM] = torch.zeros_like(parameter)
                state[MOMENTUM].lerp_(parameter.grad, 1 - self._momentum)
                update = parameter.grad.lerp(state[MOMENTUM], self._momentum)
                # What torch's Muon adds to a matrix of zeros, without momentum and decay.
                added = nn.Parameter(
                    torch.zeros(update.shape, dtype=update.dtype, device=update.device)
                )
                if isinstance(update, DTensor):
                    added.grad = update.full_tensor()
                else:
                    added.grad = update
                torch.optim.Muon(
                    [added],
                    lr=lr,
                    momentum=0.0,
                    nesterov=False,
                    weight_decay=0.0,
                    adjust_lr_fn="match_rms_adamw",
                ).step()
                step = added.detach()
                if isinstance(parameter, DTensor):  # every rank has the whole: nothing is sent
                    step = distribute_tensor(
                        step, parameter.device_mesh, parameter.placements, src_data_rank=None
                    )
                parameter.mul_(1 - lr * group["weight_decay"]).add_(step)


_ROUNDING = 1e-3
"""Share of a gradient's norm; summation in no fixed order differs by far less."""


@dataclass
class TrainedPart:
    """A part of a model with its own optimizer, gradient norm and metrics.

    Args:
        copy: a parameter that another rank has as well, and counts in the norm.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    max_grad_norm: float
    max_grad_cosine: float = 0.0
    copy: nn.Parameter | None = None
    totals: Totals = field(default_factory=Totals)
    norm: Tensor = field(default_factory=lambda: torch.zeros(()))

    def __post_init__(self) -> None:
        if self.max_grad_cosine:
            self.optimizer.register_step_post_hook(begin_previous)

    def measure(self, scale: float, mesh: Mesh | None) -> Tensor:
        """Scale the gradient; its norm over all ranks' shards. All ranks call it."""
        gradients = self._gradients()
        if scale != 1.0:
            for gradient in gradients:
                gradient.mul_(scale)
        if mesh is None or (mesh.tensor is None and mesh.pipeline is None and mesh.expert is None):
            norm = torch.nn.utils.get_total_norm(gradients)
            if isinstance(norm, DTensor):
                self.norm = norm.full_tensor()
            else:
                self.norm = norm
            return self.norm
        # torch's function takes tensors of one mesh.
        counted = [
            local(p.grad)
            for p in self.module.parameters()
            if p.grad is not None and self._counts(p, mesh)
        ]
        squares = torch.zeros((), dtype=torch.float64, device=local(gradients[0]).device)
        if counted:
            squares += torch.stack(torch._foreach_norm(counted)).double().square().sum()
        dist.all_reduce(squares)
        self.norm = squares.sqrt().float()
        return self.norm

    def limit_cosine(self, mesh: Mesh | None) -> dict[str, float]:
        """Project the measured gradient if it is too much along the previous one. All ranks call
        it.

        Returns:
            ``grad_cosine``, of the two before the projection; nothing in a first step, or if the
            limit is off.
        """
        if not self.max_grad_cosine:
            return {}
        state = self.optimizer.state
        pairs = {
            p: (local(p.grad), local(state[p][PREVIOUS]))
            for p in self.module.parameters()
            if p.grad is not None and PREVIOUS in state.get(p, {})
        }
        sums = products(
            [pair for p, pair in pairs.items() if self._counts(p, mesh)], self.norm.device
        )
        if mesh is not None:
            dist.all_reduce(sums)
        product, square, previous_square = (float(number) for number in sums)
        if not square * previous_square:
            project(list(pairs.values()), 0.0)
            return {}
        cosine = min(1.0, product / math.sqrt(square * previous_square))
        factor = factor_of_previous(cosine, self.max_grad_cosine) * math.sqrt(
            square / previous_square
        )
        project(list(pairs.values()), factor)
        if factor:
            self.measure(1.0, mesh)
        return {"grad_cosine": cosine}

    def _counts(self, parameter: nn.Parameter, mesh: Mesh | None) -> bool:
        """Whether this rank counts its shard in a sum over all ranks: what several ranks hold
        counts once."""
        if mesh is None:
            return True
        first = mesh.tensor is None or mesh.tensor.get_local_rank() == 0
        if parameter is self.copy or not (first or is_tensor_parallel(parameter)):
            return False
        if not isinstance(parameter, DTensor):
            return True
        coordinate = parameter.device_mesh.get_coordinate()
        assert coordinate is not None
        placed = zip(coordinate, parameter.placements, strict=True)
        return not any(number for number, placement in placed if placement.is_replicate())

    def clip(self) -> None:
        """Clip the measured gradient, as torch's ``clip_grads_with_norm_``, which takes tensors of
        one mesh."""
        gradients = self._gradients()
        if self.max_grad_norm and gradients:
            factor = (self.max_grad_norm / (self.norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([local(gradient) for gradient in gradients], factor)

    def drop_gradient(self) -> None:
        self.totals = Totals()
        self.optimizer.zero_grad()

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.module.parameters() if p.grad is not None]


def check_replicated_gradients(model: TokenModel, mesh: Mesh | None) -> None:
    """Compare the gradients of what all ranks of the tensor dimension hold whole.

    A tensor-parallel plan may lack a parameter that works on a part of the heads. The ranks' copies
    of it would drift apart without an error; here it is found before a weight changes.

    Raises:
        UserError: on all ranks of the dimension, naming a parameter whose gradients differ.
    """
    named = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    whole = [(name, local(grad)) for name, grad in named if not is_tensor_parallel(grad)]
    if mesh is None or mesh.tensor is None or not whole:
        return
    own = torch.stack([torch.stack([grad.norm(), grad.sum()]) for _, grad in whole]).double()
    most = own.clone()
    least = own.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.tensor_group)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.tensor_group)
    different = ((most - least).amax(1) > _ROUNDING * most[:, 0]).nonzero().flatten().tolist()
    if different:
        family = type(model.model).__name__
        name = whole[different[0]][0]
        raise UserError(
            f"trainer.parallel.tensor={mesh.shape.tensor}: the ranks have different gradients of {name}, which all "
            f"hold whole: transformers' plan for {family} splits what it works on and does not say so: set "
            f"trainer.parallel.tensor=1"
        )


def is_tensor_parallel(gradient: Tensor) -> bool:
    """Whether the tensor dimension splits it: its mesh then has the dimensions of shards and of
    tensor."""
    if not isinstance(gradient, DTensor) or gradient.device_mesh.ndim == 1:
        return False
    return not gradient.placements[-1].is_replicate()

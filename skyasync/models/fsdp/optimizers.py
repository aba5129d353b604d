"""Optimizers, gradient norms and clipping.

Optimizers are AdamW, in full or with a low-precision state, and Muon for the matrices of a model's
layers with AdamW for all else.

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
    Pairs,
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
    wrapper: TokenModel,
    parameters: Iterable[nn.Parameter],
    settings: OptimizerConfig,
    seed: int = 0,
) -> torch.optim.AdamW:
    """Make the optimizer for ``parameters`` of a model; vectors have no weight decay.

    Muon has the two-dimensional weights of decoder layers: neither embeddings nor a head, nor
    stacked experts.

    Args:
        seed: of stochastic rounding.
    """
    parameters = list(parameters)
    layer_matrices: set[nn.Parameter] = set()
    if settings.name == "muon":
        for layer in decoder_layers(wrapper):
            layer_matrices.update(p for p in layer.parameters() if p.dim() == 2)
    muon_matrices = []
    adamw_matrices = []
    vectors = []
    for parameter in parameters:
        if parameter in layer_matrices:
            muon_matrices.append(parameter)
        elif parameter.dim() > 1:
            adamw_matrices.append(parameter)
        else:
            vectors.append(parameter)
    groups: list[dict[str, Any]] = []
    for params, weight_decay in (
        (muon_matrices, settings.weight_decay),
        (adamw_matrices, settings.weight_decay),
        (vectors, 0.0),
    ):
        if params:
            groups.append({"params": params, "weight_decay": weight_decay})
    beta1, beta2 = settings.adam_betas
    options: dict[str, Any] = {
        "lr": settings.lr,
        "betas": (beta1, beta2),
        "eps": settings.eps,
        "fused": True,
    }
    if settings.name == "muon":
        for group in groups:
            group["muon"] = group["params"] is muon_matrices
        return MuonAdamW(groups, momentum=settings.muon_momentum, **options)
    if is_low_precision(settings):

        def accumulate_in_float32(parameter: Tensor) -> None:
            """Widen a gradient: FSDP2 and autograd add the next one to it, in its dtype."""
            assert parameter.grad is not None
            if parameter.grad.dtype != torch.float32:
                parameter.grad = parameter.grad.float()

        for parameter in parameters:
            if parameter.dtype == torch.bfloat16:
                parameter.grad_dtype = None  # of any dtype
                parameter.register_post_accumulate_grad_hook(accumulate_in_float32)
        return LowPrecisionAdamW(
            groups, eight_bits=settings.name == "adamw_8bit", seed=seed, **options
        )
    return torch.optim.AdamW(groups, **options)


def is_low_precision(settings: OptimizerConfig) -> bool:
    """Whether the state has eight bits, or rounding is stochastic.

    Both go by the rows of a matrix (``LowPrecisionAdamW``).
    """
    return settings.name == "adamw_8bit" or settings.bf16_stochastic_round


def state_bytes(
    parameter: Tensor, settings: OptimizerConfig, dtype: torch.dtype, of_layer: bool
) -> float:
    """Bytes of optimizer state for one element of a parameter, for estimates.

    Args:
        dtype: of the weights between steps.
        of_layer: the parameter belongs to a decoder layer.
    """
    size = 2.0 * dtype.itemsize
    if settings.name == "muon" and of_layer and parameter.dim() == 2:
        size = dtype.itemsize
    elif settings.name == "adamw_8bit" and parameter.dim() > 1:
        size = 2 + 2 * 4 / 256  # two codes, and two float32 scales per block
    if settings.max_grad_cosine:
        size += 4  # the previous gradient in float32
    return size


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
        """Restore a state. AdamW looks for its own state in all groups that it gets."""
        all_groups = state["param_groups"]
        adamw_groups = [group for group in all_groups if not group["muon"]]
        super().__setstate__({**state, "param_groups": adamw_groups})
        self.param_groups = all_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        all_groups = self.param_groups
        self.param_groups = [group for group in all_groups if not group["muon"]]
        try:
            super().step(closure)
        finally:
            self.param_groups = all_groups
        for group in all_groups:
            if not group["muon"]:
                continue
            for parameter in group["params"]:
                if parameter.grad is not None:
                    step = self._muon_step(parameter, parameter.grad, group["lr"])
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(step)

    def _muon_step(self, parameter: nn.Parameter, gradient: Tensor, lr: float) -> Tensor:
        """Muon's step of a matrix without its decay, sharded like the matrix."""
        state = self.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter)
        state[MOMENTUM].lerp_(gradient, 1 - self._momentum)
        update = gradient.lerp(state[MOMENTUM], self._momentum)  # Nesterov's
        # What torch's Muon adds to a matrix of zeros, without momentum and decay.
        matrix = nn.Parameter(torch.zeros(update.shape, dtype=update.dtype, device=update.device))
        # Whole: the orthogonal factor of a shard is not a shard of the matrix's.
        matrix.grad = update.full_tensor() if isinstance(update, DTensor) else update
        muon = torch.optim.Muon(
            [matrix],
            lr=lr,
            momentum=0.0,
            nesterov=False,
            weight_decay=0.0,
            adjust_lr_fn="match_rms_adamw",
        )
        muon.step()
        step = matrix.detach()
        if not isinstance(parameter, DTensor):
            return step
        # Every rank has the whole step, so nothing is sent.
        return distribute_tensor(
            step, parameter.device_mesh, parameter.placements, src_data_rank=None
        )


_ROUNDING = 1e-3
"""Largest difference of equal gradients, as a share of the gradient's norm.

Sums that are computed in no fixed order differ by far less.
"""


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
        """Scale the gradient, and compute its norm over all ranks' shards. All ranks call it."""
        gradients = self._gradients()
        if scale != 1.0:
            for gradient in gradients:
                gradient.mul_(scale)
        if mesh is None or (mesh.tensor is None and mesh.pipeline is None and mesh.expert is None):
            norm = torch.nn.utils.get_total_norm(gradients)
            self.norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            return self.norm
        # torch's function takes tensors of one mesh.
        shards = []
        for parameter in self.module.parameters():
            if parameter.grad is not None and self._counts(parameter, mesh):
                shards.append(local(parameter.grad))
        squares = torch.zeros((), dtype=torch.float64, device=local(gradients[0]).device)
        if shards:
            squares += torch.stack(torch._foreach_norm(shards)).double().square().sum()
        dist.all_reduce(squares)
        self.norm = squares.sqrt().float()
        return self.norm

    def limit_cosine(self, mesh: Mesh | None) -> dict[str, float]:
        """Project the measured gradient if it is too much along the previous one.

        All ranks call it.

        Returns:
            ``grad_cosine``, of the two before the projection; nothing in a first step, or if the
            limit is off.
        """
        if not self.max_grad_cosine:
            return {}
        state = self.optimizer.state
        pairs: Pairs = []
        counted_pairs: Pairs = []  # what several ranks hold counts once in the sums
        for parameter in self.module.parameters():
            if parameter.grad is None or PREVIOUS not in state.get(parameter, {}):
                continue
            pair = (local(parameter.grad), local(state[parameter][PREVIOUS]))
            pairs.append(pair)
            if self._counts(parameter, mesh):
                counted_pairs.append(pair)
        sums = products(counted_pairs, self.norm.device)  # [3]
        if mesh is not None:
            dist.all_reduce(sums)
        product, square, previous_square = sums.tolist()
        if not square * previous_square:
            project(pairs, 0.0)
            return {}
        # Rounding may exceed 1, where the projection has no root.
        cosine = min(1.0, product / math.sqrt(square * previous_square))
        factor = factor_of_previous(cosine, self.max_grad_cosine)
        factor *= math.sqrt(square / previous_square)  # from gradients of norm 1 to these
        project(pairs, factor)
        if factor:
            self.measure(1.0, mesh)  # clipping needs the norm after the projection
        return {"grad_cosine": cosine}

    def _counts(self, parameter: nn.Parameter, mesh: Mesh | None) -> bool:
        """Whether this rank counts its shard in a sum over all ranks.

        What several ranks hold counts once.
        """
        if mesh is None:
            return True
        if parameter is self.copy:
            return False
        is_first_rank = mesh.tensor is None or mesh.tensor.get_local_rank() == 0
        if not is_first_rank and not is_tensor_parallel(parameter):
            return False
        if not isinstance(parameter, DTensor):
            return True
        coordinate = parameter.device_mesh.get_coordinate()
        assert coordinate is not None
        for number, placement in zip(coordinate, parameter.placements, strict=True):
            if placement.is_replicate() and number > 0:
                return False
        return True

    def clip(self) -> None:
        """Clip the measured gradient as torch's ``clip_grads_with_norm_`` does.

        That takes tensors of one mesh.
        """
        gradients = self._gradients()
        if self.max_grad_norm and gradients:
            factor = (self.max_grad_norm / (self.norm + 1e-6)).clamp(max=1.0)  # as torch's
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
    if mesh is None or mesh.tensor is None:
        return
    names = []
    rows = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not is_tensor_parallel(parameter.grad):
            gradient = local(parameter.grad)
            names.append(name)
            # Two numbers find a difference: the ranks need not exchange whole gradients.
            rows.append(torch.stack([gradient.norm(), gradient.sum()]))
    if not names:
        return
    statistics = torch.stack(rows).double()  # [parameters, 2]
    maximum = statistics.clone()
    minimum = statistics.clone()
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=mesh.tensor_group)
    dist.all_reduce(minimum, dist.ReduceOp.MIN, group=mesh.tensor_group)
    differs = (maximum - minimum).amax(1) > _ROUNDING * maximum[:, 0]  # [parameters]
    if differs.any():
        family = type(model.model).__name__
        name = names[int(differs.int().argmax())]
        raise UserError(
            f"trainer.parallel.tensor={mesh.shape.tensor}: the ranks have different gradients of {name}, which all "
            f"hold whole: transformers' plan for {family} splits what it works on and does not say so: set "
            f"trainer.parallel.tensor=1"
        )


def is_tensor_parallel(gradient: Tensor) -> bool:
    """Whether the tensor dimension splits a gradient.

    Its mesh then has the dimensions of shards and of tensor.
    """
    if not isinstance(gradient, DTensor) or gradient.device_mesh.ndim == 1:
        return False
    return not gradient.placements[-1].is_replicate()

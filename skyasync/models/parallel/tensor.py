"""A model's matrices split over the tensor dimension, by transformers' plan for its family.

Invariant: the model's gradient is that of the whole model. Embeddings, norms and routers are whole
on every rank of the dimension, which computes the same with them. A linear head is split by
vocabulary, if the dimension divides it, and returns this rank's part of the logits; embeddings tied
to it are split too.

A split product is a sum over ranks. transformers' styles round each rank's part to bfloat16 before
the sum; here the parts are sent as float32 and their sum is rounded once, as on one rank:

    column-wise: y = x W' + b by this rank's rows of W;  dx = round(sum over ranks of dy W)
    row-wise:    y = round(sum over ranks of x W' + b) by its columns;  dx = dy W
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    ColwiseParallel,
    MoeExpertsParallel,
    RowwiseParallel,
    TensorParallelLayer,
    _use_local_dtensor_params,
    apply_tensor_parallelism,
    replace_layer_number_by_wildcard,
)

from skyasync.errors import UserError
from skyasync.models.config import ATTENDING, config_value
from skyasync.models.fsdp.sharding import local
from skyasync.models.parallel.vocabulary import Vocabulary, sum_gradients_over_group, sum_over_group

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer


KEY = "trainer.parallel.tensor"
COLUMNS = "skyasync_columns"
ROWS = "skyasync_rows"
NORM = "skyasync_norm_of_own_heads"
EMBEDDING = "skyasync_vocabulary_embedding"
EXPERTS = "skyasync_whole_experts"
_SUPPORTED = {
    COLUMNS,
    ROWS,
    "colwise_gather_output",
    "rowwise_split_input",
    "grouped_gemm",
    NORM,
    EXPERTS,
    EMBEDDING,
}
"""Styles whose parts are slices of a weight, as checkpoints of shards need.

Parts of packed weights are not slices.
"""

_OURS = {"colwise": COLUMNS, "rowwise": ROWS, "replicated_with_grad_allreduce": NORM}
"""Replacements of transformers' styles."""
_LIBRARY_STYLES = {replacement: style for style, replacement in _OURS.items()}

_ADAPTED = {COLUMNS: attrgetter("lora_B"), ROWS: attrgetter("lora_A")}
"""The half of an adapter that is split like the adapted layer."""


def split(model: PreTrainedModel, mesh: DeviceMesh) -> Vocabulary | None:
    """Split a model that has no memory yet.

    Returns:
        The part of the logits that this rank's head computes; None: all.

    Raises:
        UserError: for a family without a plan, or a size that does not divide its heads or experts.
    """
    size = mesh.size()
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    family = type(model).__name__
    if len(model.tp_plan) < 2:  # a head alone is no plan
        raise UserError(
            f"{KEY}={size}: transformers has no tensor-parallel plan for {family}: set {KEY}=1"
        )
    other_types = set(config_value(config, "layer_types", ())) - ATTENDING
    if other_types:
        raise UserError(
            f"{KEY}={size} splits attention heads, and {family} has other layers ({min(other_types)}): set {KEY}=1"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "num_experts", "num_local_experts"):
        count = config_value(config, name)
        if isinstance(count, int) and count % size:
            divisors = " or ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise UserError(
                f"{KEY}={size} does not divide the {name}={count} of {family}: choose {divisors}"
            )
    plan = _plan(model)
    by_vocabulary = isinstance(head, nn.Linear) and head.out_features % size == 0
    embeddings = model.get_input_embeddings()
    embeddings_key = _key(model, embeddings)
    is_tied = by_vocabulary and head.weight is embeddings.weight
    plan.pop(embeddings_key, None)  # whole, unless they are the head: a critic's are not
    if by_vocabulary:
        plan[_key(model, head)] = COLUMNS
    if is_tied:
        plan[embeddings_key] = EMBEDDING
    for name, style in plan.items():
        if style not in _SUPPORTED:
            raise UserError(
                f"{KEY}: transformers splits {name} of {family} by {style}, which "
                f"gradients or checkpoints of shards do not take here: set {KEY}=1"
            )
    apply_tensor_parallelism(model, mesh, plan)
    if is_tied:
        head.weight = embeddings.weight  # splitting makes a new parameter of each
    if not by_vocabulary:
        return None
    share = head.out_features // size
    return Vocabulary(mesh.get_group(), size, share * mesh.get_local_rank(), share)


def split_adapters(
    layers: Iterable[tuple[str, LoraLayer]],
    model: PreTrainedModel,
    mesh: DeviceMesh,
) -> None:
    """Split the halves of adapters of split layers: B with the outputs, A with the inputs.

    The other half is whole on every rank, which computes all of its gradient.

    Args:
        layers: peft's, by the names that the linear layers in them have in the plan.

    Raises:
        UserError: naming a layer that is split in a way that adapters do not follow.
    """
    from peft.tuners.lora.model import add_lora_tp_hooks_dtensor

    plan = _plan(model)
    head = model.get_output_embeddings()
    for name, layer in layers:
        style = plan.get(str(replace_layer_number_by_wildcard(name)))
        if layer.get_base_layer() is head:
            if isinstance(head, nn.Linear) and head.out_features % mesh.size() == 0:
                style = COLUMNS
            else:
                style = None
        if style is None:
            continue
        if style not in _ADAPTED:
            raise UserError(
                f"{KEY}={mesh.size()} splits {name} of {type(model).__name__} by {style}, which adapters do not follow "
                f"here: add it to trainer.policy.lora.exclude_modules, or set {KEY}=1"
            )
        (half,) = _ADAPTED[style](layer).values()
        library_style = _LIBRARY_STYLES[style]
        add_lora_tp_hooks_dtensor(
            half, library_style, mesh, base_layer=layer.get_base_layer(), module_name=name
        )
        ALL_PARALLEL_STYLES[style].install_forward(half, mesh)


def _plan(model: PreTrainedModel) -> dict[str, str]:
    """transformers' plan for this model, with whole experts and without its head."""
    plan = dict(model.tp_plan)
    head = model.get_output_embeddings()
    if head is not None:
        plan.pop(_key(model, head), None)
    experts = [name for name, style in plan.items() if style == "moe_tp_experts"]
    for name, style in plan.items():
        if name in experts:
            plan[name] = EXPERTS
        elif any(name.startswith(f"{module}.") for module in experts):
            plan[name] = "grouped_gemm"  # the stacked weights inside: divided by experts
        else:
            plan[name] = _OURS.get(style, style)
    return plan


def _key(model: PreTrainedModel, module: nn.Module) -> str:
    """The name of a module in plans, in which layers have a wildcard for their number."""
    (name,) = [name for name, part in model.named_modules() if part is module]
    return str(replace_layer_number_by_wildcard(name))


class NormOfOwnHeads(TensorParallelLayer):
    """A norm that each rank applies to its own heads, with weights that all ranks have.

    transformers' style sums the accumulated gradient over ranks in every backward pass: with
    several micro-batches that is too much.
    """

    @contextmanager
    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
        parameters = dict(module._parameters)
        # In this forward pass alone the module has tensors whose gradients are summed.
        for name, parameter in parameters.items():
            if parameter is not None:
                replica = sum_gradients_over_group(parameter, mesh.get_group())
                module._parameters[name] = replica  # type: ignore[assignment]
        try:
            yield
        finally:
            module._parameters.update(parameters)


class VocabularyEmbedding(TensorParallelLayer):
    """Embeddings of which each rank holds a part of the vocabulary, like a tied head."""

    def shard_param(self, module: nn.Embedding, param: str, mesh: DeviceMesh) -> None:
        full_weight = module._parameters[param]
        assert full_weight is not None
        split = distribute_tensor(full_weight, mesh, [Shard(0)], src_data_rank=None)
        module._parameters[param] = nn.Parameter(split, requires_grad=full_weight.requires_grad)

    def install_forward(self, module: nn.Embedding, mesh: DeviceMesh) -> nn.Embedding:
        look_up = module.forward
        group = mesh.get_group()
        size = module.num_embeddings // mesh.size()
        start = size * mesh.get_local_rank()
        padding = module.padding_idx
        if padding is not None:
            # The padding's row gets no gradient: it must be the number of a row of this part.
            module.padding_idx = padding - start if start <= padding < start + size else None

        def forward(tokens: Tensor) -> Tensor:
            local_tokens = tokens - start  # [rows, width]
            is_remote = (local_tokens < 0) | (local_tokens >= size)
            # Another rank's token looks up row 0 here, and adds 0 to the sum over ranks.
            with _use_local_dtensor_params(module):
                states = look_up(local_tokens.masked_fill(is_remote, 0))  # [rows, width, hidden]
            return sum_over_group(states.masked_fill(is_remote[..., None], 0.0), group)

        module.forward = forward  # type: ignore[method-assign, assignment]
        return module


class WholeExperts(MoeExpertsParallel):
    """Experts of which each rank has some, whole.

    All ranks see all tokens, and their outputs are summed.

    A token's experts on other ranks get the number after the last of this rank's, which
    transformers' experts skip.
    """

    def transform_inputs_pre_forward(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mesh: DeviceMesh,
        **options: object,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # [tokens, hidden], and [tokens, top_k] of both others
        hidden, experts, weights, *family_arguments = args
        group = mesh.get_group()
        local_count = int(module.num_experts)  # type: ignore[arg-type]  # of this rank's experts
        rank_of_expert = torch.div(experts, local_count, rounding_mode="floor")
        is_remote = rank_of_expert != mesh.get_local_rank()
        weights = sum_gradients_over_group(weights, group).masked_fill(is_remote, 0.0)
        hidden = sum_gradients_over_group(hidden, group)
        local_experts = (experts % local_count).masked_fill(is_remote, local_count)
        return (hidden, local_experts, weights, *family_arguments), kwargs

    def transform_output_post_forward(
        self,
        module: nn.Module,
        output: Tensor,
        mesh: DeviceMesh,
        source: object = None,
    ) -> Tensor:
        return sum_over_group(output, mesh.get_group())


class _Float32Sum:
    """Mixin for a style of transformers: its linear layers compute by ``product``."""

    product: type[Function]

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            return super().install_forward(module, mesh)  # type: ignore[misc]
        group = mesh.get_group()

        def forward(states: Tensor) -> Tensor:
            bias = None if module.bias is None else local(module.bias)
            output: Tensor = self.product.apply(states, local(module.weight), bias, group)
            return output

        module.forward = forward  # type: ignore[method-assign, assignment]
        return module


class _ColumnProduct(Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(states, weight)
        ctx.group = group
        return F.linear(states, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        states, weight = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)  # [tokens, this rank's outputs]
        of_states = None
        if ctx.needs_input_grad[0]:
            total = sum_over_group(_wide(gradient, weight), ctx.group)  # [tokens, inputs]
            of_states = total.to(states.dtype).view(states.shape)
        of_weight, of_bias = _of_parameters(ctx, gradient, states)
        return of_states, of_weight, of_bias, None


class _RowProduct(Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(states, weight)
        total = sum_over_group(_wide(states.flatten(0, -2), weight.t()), group)  # [tokens, outputs]
        if bias is not None:
            total += bias  # whole on every rank: after the sum, so that it is added once
        return total.to(states.dtype).view(*states.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        states, weight = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)  # [tokens, outputs]
        of_states = None
        if ctx.needs_input_grad[0]:
            of_states = (gradient @ weight).view(states.shape)  # of this rank's inputs
        of_weight, of_bias = _of_parameters(ctx, gradient, states)
        return of_states, of_weight, of_bias, None


def _of_parameters(
    ctx: Any,  # noqa: ANN401
    gradient: Tensor,
    states: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of this rank's weight ``[outputs, inputs]`` and bias ``[outputs]``.

    A row-wise layer's bias is that of all ranks.
    """
    of_weight = None
    if ctx.needs_input_grad[1]:
        of_weight = gradient.t() @ states.flatten(0, -2)
    of_bias = None
    if ctx.needs_input_grad[2]:
        of_bias = gradient.sum(0)
    return of_weight, of_bias


def _wide(left: Tensor, right: Tensor) -> Tensor:
    """The matrix product in float32 at least, in which kernels accumulate anyway."""
    if left.dtype not in (torch.bfloat16, torch.float16):
        return left @ right
    if left.device.type == "cuda":
        # Without float32 copies of both; torch has this for CUDA alone.
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


class Float32Colwise(_Float32Sum, ColwiseParallel):
    """Each rank has some of the outputs."""

    product = _ColumnProduct


class Float32Rowwise(_Float32Sum, RowwiseParallel):
    """Each rank has some of the inputs, and all of the bias."""

    product = _RowProduct


for _name, _style in (
    (NORM, NormOfOwnHeads()),
    (EMBEDDING, VocabularyEmbedding()),
    (EXPERTS, WholeExperts()),
    (COLUMNS, Float32Colwise(input_layouts=Replicate(), output_layouts=Shard(-1))),
    (ROWS, Float32Rowwise(input_layouts=Shard(-1), output_layouts=Replicate())),
):
    ALL_PARALLEL_STYLES.register(_name, _style)  # type: ignore[arg-type]

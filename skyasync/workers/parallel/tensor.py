"""A model's matrices split over the tensor axis, by the plan that transformers has for its family.

Invariant: the model's gradient is that of the whole model. What the plan splits is split there; embeddings, norms and
routers are whole on every rank of the axis, which computes the same with them. A linear head is split by vocabulary,
where the axis divides it, and answers with this rank's part of the logits; embeddings tied to it are split too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    apply_tensor_parallelism,
    replace_layer_number_by_wildcard,
)

from skyasync.errors import UserError
from skyasync.workers.parallel.context import ATTENDING
from skyasync.workers.parallel.styles import EMBEDDING, EXPERTS, NORM
from skyasync.workers.parallel.sums import COLUMNS, ROWS
from skyasync.workers.parallel.vocabulary import Vocabulary

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

KEY = "trainer.parallel.tensor"
_OWN_PIECES = {
    COLUMNS,
    ROWS,
    "colwise_gather_output",
    "rowwise_split_input",
    "grouped_gemm",
    NORM,
    EXPERTS,
    EMBEDDING,
}
"""Styles whose parts are single pieces of a weight; packed ones are not, and checkpoints of shards hold pieces."""


_OURS = {"colwise": COLUMNS, "rowwise": ROWS, "replicated_with_grad_allreduce": NORM}
"""In the place of the library's."""

_ADAPTED = {COLUMNS: "lora_B", ROWS: "lora_A"}
"""The half of an adapter that is split as the layer beside it."""


def split(model: PreTrainedModel, mesh: DeviceMesh) -> Vocabulary | None:
    """Split a model that has no memory yet; returns which part of the logits its head answers with, None for all.

    Raises:
        UserError: for a family without a plan, or a size that does not divide its heads or experts.
    """
    size, head = mesh.size(), model.get_output_embeddings()
    _check(model, size)
    plan = _plan(model)
    by_vocabulary = isinstance(head, nn.Linear) and head.out_features % size == 0
    embeddings = model.get_input_embeddings()
    tied = by_vocabulary and head.weight is embeddings.weight
    plan.pop(_key(model, embeddings), None)  # whole, unless they are the head: a critic's are not
    if by_vocabulary:
        plan[_key(model, head)] = COLUMNS
    if tied:
        plan[_key(model, embeddings)] = EMBEDDING
    _check_styles(model, plan)
    apply_tensor_parallelism(model, mesh, plan)
    if tied:
        head.weight = embeddings.weight
    return Vocabulary.of(mesh, head.out_features) if by_vocabulary else None


def split_adapters(layers: Iterable[tuple[str, LoraLayer]], model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split the halves of low-rank adapters that lie beside what is split: B with the outputs, A with the inputs.

    The other half is whole on every rank, which finds the whole of its gradient.

    Args:
        layers: peft's, by the names that the linear layers in them have in the plan.

    Raises:
        UserError: naming a layer that is split in a way which adapters do not follow.
    """
    from peft.tuners.lora.model import add_lora_tp_hooks_dtensor

    plan, head = _plan(model), model.get_output_embeddings()
    for name, layer in layers:
        style = plan.get(str(replace_layer_number_by_wildcard(name)))
        if layer.get_base_layer() is head:
            style = COLUMNS if isinstance(head, nn.Linear) and head.out_features % mesh.size() == 0 else None
        if style is None:
            continue
        if style not in _ADAPTED:
            raise UserError(
                f"{KEY}={mesh.size()} splits {name} of {type(model).__name__} by {style}, which adapters do not follow "
                f"here: add it to trainer.policy.lora.exclude_modules, or set {KEY}=1"
            )
        (half,) = getattr(layer, _ADAPTED[style]).values()
        theirs = next(library for library, ours in _OURS.items() if ours == style)
        add_lora_tp_hooks_dtensor(half, theirs, mesh, base_layer=layer.get_base_layer(), module_name=name)
        ALL_PARALLEL_STYLES[style].install_forward(half, mesh)


def _plan(model: PreTrainedModel) -> dict[str, str]:
    """The library's for this model, with experts left whole and without its head."""
    found = dict(model.tp_plan)
    head = model.get_output_embeddings()
    if head is not None:
        found.pop(_key(model, head), None)
    experts = [name for name, style in found.items() if style == "moe_tp_experts"]
    for name, style in found.items():
        if name in experts:
            found[name] = EXPERTS
        elif any(name.startswith(f"{module}.") for module in experts):
            found[name] = "grouped_gemm"
        else:
            found[name] = _OURS.get(style, style)
    return found


def _key(model: PreTrainedModel, module: nn.Module) -> str:
    name = next(name for name, part in model.named_modules() if part is module)
    return str(replace_layer_number_by_wildcard(name))


def _check(model: PreTrainedModel, size: int) -> None:
    config, family = model.config.get_text_config(), type(model).__name__
    if len(model.tp_plan) < 2:  # a head alone is no plan
        raise UserError(f"{KEY}={size}: transformers has no tensor-parallel plan for {family}: set {KEY}=1")
    kinds = set(getattr(config, "layer_types", None) or ()) - ATTENDING
    if kinds:
        raise UserError(
            f"{KEY}={size} splits heads, and {family} has layers of another kind ({min(kinds)}): set {KEY}=1"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "num_experts", "num_local_experts"):
        count = getattr(config, name, None)
        if isinstance(count, int) and count % size:
            fits = [str(n) for n in range(1, count + 1) if count % n == 0]
            raise UserError(f"{KEY}={size} does not divide the {name}={count} of {family}: choose {' or '.join(fits)}")


def _check_styles(model: PreTrainedModel, plan: dict[str, str]) -> None:
    for name, style in plan.items():
        if style not in _OWN_PIECES:
            raise UserError(
                f"{KEY}: transformers splits {name} of {type(model).__name__} by {style}, which "
                f"gradients or checkpoints of shards do not take here: set {KEY}=1"
            )

"""Pipeline parallelism: each rank of the pipeline dimension is a stage, with consecutive layers.

    first stage: embeddings, layers  ──states──▶  layers  ──states──▶  last stage: layers, norm, head, loss
                                    ◀─gradients─         ◀─gradients─

All stages get the same rows and cut them into the same micro-batches, so each knows the shapes of
what it receives: micro-batches may differ in width. The order is 1F1B: a stage is ahead of its
backward passes by as many forward passes as there are stages after it, then a backward pass follows
each forward pass:

    first of 3 stages   F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
    last                F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

Invariant: a stage computes what one rank computes with these layers: transformers' own forward pass
runs on every stage, with the layers of other stages passed over. Embeddings that are tied to the
head are on the first and the last stage; their gradients are added up before the optimizer step, so
that both stay bitwise equal.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

from skyasync.errors import UserError
from skyasync.models.config import config_value
from skyasync.models.fsdp.sharding import PipelineGroups, local
from skyasync.weight_sync.full_tensors import StageTensor

KEY = "trainer.parallel.pipeline"
PARTS = {"embed_tokens", "layers", "norm"}
"""Names in transformers' plan (``base_model_pp_plan``) of a model that can be cut here."""

T = TypeVar("T")


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Count the layers of each stage. Earlier stages get the remainder: the last has the head."""
    share, remainder = divmod(layers, stages)
    return [share + 1] * remainder + [share] * (stages - remainder)


class Stage:
    """This rank's layers of a model, which it cuts; the model is not sharded yet.

    Args:
        dtype: that the model computes in.

    Attributes:
        received: states from the stage before, of the last forward pass; their gradient goes back
            there.
        warmup: forward passes before the first backward pass.

    Raises:
        UserError: for a model that cannot be cut so.
    """

    def __init__(self, model: PreTrainedModel, groups: PipelineGroups, dtype: torch.dtype) -> None:
        self._model = model
        self._groups = groups
        self._dtype = dtype
        self._ranks = groups.ranks
        # Tensors stay alive until their sends have ended.
        self._sends = deque[tuple[dist.Work, Tensor]]()
        size = len(groups.ranks)
        self._number = groups.ranks.index(dist.get_rank())
        check(model, size)
        self.is_first = self._number == 0
        self.is_last = self._number == size - 1
        self.warmup = size - 1 - self._number  # stages after this one
        self.received: Tensor | None = None
        self._hidden_size = int(model.config.get_text_config().hidden_size)
        base: Any = model.base_model
        # Of each stage: the number of the layer after its own.
        self._boundaries = list(accumulate(layers_of_stages(len(base.layers), size)))
        # The whole model's tensors, before the cut: every stage names those of all stages.
        names = {name for name, _ in chain(model.named_parameters(), model.named_buffers())}
        self._specs = {}
        for name, tensor in model.state_dict().items():
            if name in names:  # a tied weight by its first name alone
                spec = (tensor.dtype, tuple(tensor.shape))
                self._specs[name] = (spec, self._stage_of(name))
        head = model.get_output_embeddings()
        self._has_tied_head = isinstance(head, nn.Linear) and (
            head.weight is base.embed_tokens.weight
        )
        self._entry = _Entry()
        self._cut(base)

    def _stage_of(self, name: str) -> int:
        """The stage of a parameter or a buffer; of tied embeddings, which two have, the first."""
        name_in_base = name.removeprefix(f"{self._model.base_model_prefix}.")
        part, *path = name_in_base.split(".")
        if part == "layers":
            return bisect(self._boundaries, int(path[0]))
        if part == "embed_tokens":
            return 0
        return len(self._ranks) - 1

    def _cut(self, base: Any) -> None:  # noqa: ANN401
        """Replace other stages' layers, so that the model's own forward pass skips them."""
        model = self._model
        begin = 0 if self.is_first else self._boundaries[self._number - 1]
        end = self._boundaries[self._number]
        # The list keeps its length: a layer's number decides, for example, which mask it gets.
        for number in range(len(base.layers)):
            if not begin <= number < end:
                base.layers[number] = PipelineIdentityLayer()
        if begin > 0:
            base.layers[begin - 1] = self._entry  # gives this stage's first layer its input
        if not self.is_first and not (self._has_tied_head and self.is_last):
            base.embed_tokens = PipelineIdentityLayer()
        if not self.is_last:
            base.norm = PipelineIdentityLayer()
            for name, child in model.named_children():
                if child is not base:
                    setattr(model, name, PipelineIdentityLayer())
            model.all_tied_weights_keys = {}  # the head that they tie is gone
        # The loader must not report other stages' tensors in the files as unexpected.
        ignored_patterns = set(model._keys_to_ignore_on_load_unexpected or ())
        for name in self._specs.keys() - dict(model.named_parameters()).keys():
            ignored_patterns.add(f"^{name.replace('.', '[.]')}$")
        model._keys_to_ignore_on_load_unexpected = ignored_patterns

    # ---------------------------------------------------------------- computing

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        """Arguments of the model for ``tokens`` ``[rows, width]``: these, or received states.

        A stage after the first waits for the states of the stage before it.
        """
        if self.is_first:
            return {"input_ids": tokens}
        # [rows, width, hidden]
        states = torch.empty(
            *tokens.shape, self._hidden_size, dtype=self._dtype, device=tokens.device
        )
        dist.recv(states, src=self._ranks[self._number - 1], group=self._groups.states)
        states.requires_grad_(torch.is_grad_enabled())
        self.received = states
        self._entry.states = states
        # The model makes masks and positions from these; the entry replaces their values.
        return {"inputs_embeds": states.detach()}

    def send_states(self, states: Tensor) -> None:
        """Send states ``[rows, width, hidden]`` to the next stage."""
        self._send(states.detach(), self._number + 1, self._groups.states)

    def backward(self, result: Tensor, received: Tensor | None) -> None:
        """Run the backward pass of a loss, or of the states that were sent to the next stage.

        Args:
            received: of the same forward pass; their gradient is sent to the stage before.
        """
        gradient = None
        if not self.is_last:
            # recv needs contiguous memory, which the states may not have.
            gradient = torch.empty_like(result, memory_format=torch.contiguous_format)
            dist.recv(gradient, src=self._ranks[self._number + 1], group=self._groups.gradients)
        result.backward(gradient)
        if received is not None:
            assert received.grad is not None
            self._send(received.grad, self._number - 1, self._groups.gradients)

    def _send(self, tensor: Tensor, stage: int, group: dist.ProcessGroup) -> None:
        """Send without waiting for the receiver."""
        tensor = tensor.contiguous()
        work = dist.isend(tensor, dst=self._ranks[stage], group=group)
        assert work is not None
        self._sends.append((work, tensor))
        # So long after it, 1F1B has needed its result: waiting costs nothing and frees the tensor.
        if len(self._sends) > 2 * len(self._ranks):
            self._wait_for_oldest_send()

    def _wait_for_oldest_send(self) -> None:
        work, _ = self._sends.popleft()
        work.wait()

    def from_last(self, value: T) -> T:
        """The last stage's value, on all stages. All of them call it, when nothing more is sent."""
        while self._sends:
            self._wait_for_oldest_send()
        self.received = None
        self._entry.states = None
        return self._groups.from_last(value)

    # ---------------------------------------------------------------- weights

    def check_trained(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise ``UserError`` if nothing of this stage is trained."""
        if not parameters:
            raise UserError(
                f"trainer.policy.freeze leaves stage {self._number} of {KEY}={len(self._ranks)} nothing to train: "
                f"freeze less, or set {KEY}=1"
            )

    def embeddings(self) -> nn.Parameter | None:
        """This stage's copy of embeddings that two stages have, if they are trained."""
        if not (self._has_tied_head and (self.is_first or self.is_last)):
            return None
        weight = self._model.get_input_embeddings().weight
        assert isinstance(weight, nn.Parameter)
        if weight.requires_grad:
            return weight
        return None

    def add_embedding_gradients(self) -> None:
        """Sum the gradients of tied embeddings over the first and the last stage.

        Once before each optimizer step: a second sum would count every gradient twice.
        """
        weight = self.embeddings()
        if weight is not None and weight.grad is not None:
            dist.all_reduce(local(weight.grad), group=self._groups.first_and_last)

    def weights(self, shards: Mapping[str, Tensor]) -> dict[str, StageTensor]:
        """The weights of all stages, in the order of the whole model.

        Args:
            shards: of this stage.
        """
        device = next(iter(shards.values())).device
        weights = {}
        for name, (spec, stage) in self._specs.items():
            shard = shards[name] if stage == self._number else None
            weights[name] = StageTensor(
                spec, shard, device, self._ranks[stage], self._groups.states
            )
        return weights

    def union(self, names: Collection[str]) -> set[str]:
        """The names that any stage gives. All stages call it."""
        names_of_stages: list[Any] = [None] * len(self._ranks)
        dist.all_gather_object(names_of_stages, list(names), group=self._groups.states)
        return set(chain.from_iterable(names_of_stages))


class _Entry(nn.Module):
    """Replaces the layer before a stage's first one: its result is what was received."""

    states: Tensor | None = None

    def forward(self, *_: object, **__: object) -> Tensor | None:
        return self.states


def check(model: PreTrainedModel, stages: int) -> None:
    """Raise ``UserError`` for a model that cannot be cut into so many stages."""
    base = model.base_model
    family = type(model).__name__
    config: Any = model.config.get_text_config()
    if set(config.base_model_pp_plan or ()) != PARTS:
        raise UserError(
            f"{KEY}={stages}: transformers has no plan by which {family} can be cut: set {KEY}=1"
        )
    outside = [name for name, _ in base.named_parameters() if name.partition(".")[0] not in PARTS]
    obstacle = ""
    if outside:
        obstacle = f"{min(outside)} outside its layers"
    elif config_value(config, "num_kv_shared_layers"):
        obstacle = "layers that share keys and values"
    if obstacle:
        raise UserError(
            f"{KEY}={stages}: {family} has {obstacle}, which stages cannot have: set {KEY}=1"
        )
    if len(base.layers) < stages:  # type: ignore[arg-type]
        raise UserError(f"{KEY}={stages} is more than the {len(base.layers)} layers of {family}")  # type: ignore[arg-type]

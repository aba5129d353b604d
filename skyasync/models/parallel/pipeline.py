"""Pipeline parallelism: each rank of the pipeline dimension, a stage, has consecutive layers of the
model.

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
"""Of transformers' plans (``base_model_pp_plan``) that can be cut here."""

T = TypeVar("T")


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """How many layers each stage has; the last one, which has the head, is not among those with one
    more."""
    return [layers // stages + (number < layers % stages) for number in range(stages)]


class Stage:
    """This rank's layers. Cuts the model, which may have no memory yet and is not sharded yet.

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
        self._sent = deque[tuple[dist.Work, Tensor]]()
        size = len(groups.ranks)
        self._number = groups.ranks.index(dist.get_rank())
        check(model, size)
        self.is_first, self.warmup = self._number == 0, size - 1 - self._number
        self.is_last = self.warmup == 0
        self.received: Tensor | None = None
        self._hidden_size = int(model.config.get_text_config().hidden_size)
        base: Any = model.base_model
        self._boundaries = list(accumulate(layers_of_stages(len(base.layers), size)))
        names = {name for name, _ in chain(model.named_parameters(), model.named_buffers())}
        self._specs = {
            name: ((tensor.dtype, tuple(tensor.shape)), self._stage_of(name))
            for name, tensor in model.state_dict().items()
            if name in names
        }
        head = model.get_output_embeddings()
        self._tied = isinstance(head, nn.Linear) and head.weight is base.embed_tokens.weight
        self._entry = _Entry()
        self._cut(base)

    def _stage_of(self, name: str) -> int:
        """The stage of a parameter or a buffer; the first of two."""
        part, _, rest = name.removeprefix(f"{self._model.base_model_prefix}.").partition(".")
        if part == "layers":
            return bisect(self._boundaries, int(rest.partition(".")[0]))
        if part == "embed_tokens":
            return 0
        return len(self._ranks) - 1

    def _cut(self, base: Any) -> None:  # noqa: ANN401
        """Layers of other stages are passed over; this stage's first one is given what was
        received."""
        model = self._model
        first = ([0, *self._boundaries])[self._number]
        for number in range(len(base.layers)):
            if not first <= number < self._boundaries[self._number]:
                if number == first - 1:
                    base.layers[number] = self._entry
                else:
                    base.layers[number] = PipelineIdentityLayer()
        if not self.is_first and not (self._tied and self.is_last):
            base.embed_tokens = PipelineIdentityLayer()
        if not self.is_last:
            base.norm = PipelineIdentityLayer()
            for name, child in model.named_children():
                if child is not base:
                    setattr(model, name, PipelineIdentityLayer())
            model.all_tied_weights_keys = {}
        # What is missing here is not unexpected in the files.
        there = {name for name, _ in model.named_parameters()}
        patterns = {f"^{name.replace('.', '[.]')}$" for name in self._specs if name not in there}
        model._keys_to_ignore_on_load_unexpected = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            *patterns,
        }

    # ---------------------------------------------------------------- computing

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        """Arguments of the model for a batch of tokens: these, or the states that the stage before
        has computed."""
        if self.is_first:
            return {"input_ids": tokens}
        states = torch.empty(
            *tokens.shape, self._hidden_size, dtype=self._dtype, device=tokens.device
        )
        dist.recv(states, src=self._ranks[self._number - 1], group=self._groups.states)
        self.received = self._entry.states = states.requires_grad_(torch.is_grad_enabled())
        return {"inputs_embeds": states.detach()}  # for masks and positions

    def send_states(self, states: Tensor) -> None:
        """To the next stage."""
        self._send(states.detach(), self._number + 1, self._groups.states)

    def backward(self, result: Tensor, received: Tensor | None) -> None:
        """The backward pass of a loss, or of the states that were sent, whose gradient the next
        stage has.

        Args:
            received: of the same forward pass; their gradient is sent to the stage before.
        """
        gradient = None
        if not self.is_last:
            gradient = torch.empty_like(result, memory_format=torch.contiguous_format)
            dist.recv(gradient, src=self._ranks[self._number + 1], group=self._groups.gradients)
        result.backward(gradient)
        if received is not None:
            assert received.grad is not None
            self._send(received.grad, self._number - 1, self._groups.gradients)

    def _send(self, tensor: Tensor, stage: int, group: dist.ProcessGroup) -> None:
        """Without waiting, but for what was sent long ago, which 1F1B has needed since."""
        tensor = tensor.contiguous()
        work = dist.isend(tensor, dst=self._ranks[stage], group=group)
        assert work is not None
        self._sent.append((work, tensor))
        if len(self._sent) > 2 * len(self._ranks):
            self._sent.popleft()[0].wait()

    def from_last(self, value: T) -> T:
        """The last stage's value, on all stages. All of them call it, when nothing more is sent."""
        while self._sent:
            self._sent.popleft()[0].wait()
        self.received = self._entry.states = None
        return self._groups.from_last(value)

    # ---------------------------------------------------------------- weights

    def check_trained(self, learnt: Sequence[nn.Parameter]) -> None:
        """Raises ``UserError`` if nothing of this stage is trained."""
        if not learnt:
            raise UserError(
                f"trainer.policy.freeze leaves stage {self._number} of {KEY}={len(self._ranks)} nothing to train: "
                f"freeze less, or set {KEY}=1"
            )

    def embeddings(self) -> nn.Parameter | None:
        """This stage's copy of embeddings that two stages have, if they are trained."""
        if not (self._tied and (self.is_first or self.is_last)):
            return None
        weight = self._model.get_input_embeddings().weight
        assert isinstance(weight, nn.Parameter)
        if weight.requires_grad:
            return weight
        return None

    def add_embedding_gradients(self) -> None:
        """Of tied embeddings: those of the first and the last stage. Once before each optimizer
        step."""
        weight = self.embeddings()
        if weight is not None and weight.grad is not None:
            dist.all_reduce(local(weight.grad), group=self._groups.first_and_last)

    def weights(self, own: Mapping[str, Tensor]) -> dict[str, StageTensor]:
        """Those of all stages, in the order of the whole model.

        Args:
            own: this stage's shards.
        """
        device = next(iter(own.values())).device
        return {
            name: StageTensor(
                spec,
                own[name] if stage == self._number else None,
                device,
                self._ranks[stage],
                self._groups.states,
            )
            for name, (spec, stage) in self._specs.items()
        }

    def union(self, names: Collection[str]) -> set[str]:
        """The names that any stage gives."""
        everybody: list[Any] = [None] * len(self._ranks)
        dist.all_gather_object(everybody, list(names), group=self._groups.states)
        return set(chain.from_iterable(everybody))


class _Entry(nn.Module):
    """In the place of the layer before a stage's first one: its result is what was received."""

    states: Tensor | None = None

    def forward(self, *_: object, **__: object) -> Tensor | None:
        return self.states


def check(model: PreTrainedModel, stages: int) -> None:
    """Raises ``UserError`` for a model that cannot be cut into so many stages."""
    base = model.base_model
    family = type(model).__name__
    config: Any = model.config.get_text_config()
    if set(config.base_model_pp_plan or ()) != PARTS:
        raise UserError(
            f"{KEY}={stages}: transformers has no plan by which {family} can be cut: set {KEY}=1"
        )
    strange = sorted(
        {name for name, _ in base.named_parameters() if name.partition(".")[0] not in PARTS}
    )
    if strange or config_value(config, "num_kv_shared_layers"):
        if strange:
            what = f"{strange[0]} outside its layers"
        else:
            what = "layers that share keys and values"
        raise UserError(
            f"{KEY}={stages}: {family} has {what}, which stages cannot have: set {KEY}=1"
        )
    if len(base.layers) < stages:  # type: ignore[arg-type]
        raise UserError(f"{KEY}={stages} is more than the {len(base.layers)} layers of {family}")  # type: ignore[arg-type]

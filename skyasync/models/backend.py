"""The interface by which workers compute with a model and train it.

It holds for any way of sharding and scheduling.

    worker ──batch, LossFn──▶ backend: micro-batches ─▶ forward ─▶ LossFn ─▶ backward

Invariant: a batch's gradient does not depend on how a backend divides the batch over micro-batches
and ranks. The ``loss_weights`` hold the denominators of the whole batch, so gradients are summed
over both and never divided again. ``tests/models/test_backends.py`` holds every backend to the
methods' contracts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from skyasync.algorithms.sampled import SampledDistribution
from skyasync.config.schema import LoraConfig, OptimizerConfig, TrainerConfig
from skyasync.models import VOCABULARY, MeshShape
from skyasync.models.batch import TokenBatch, UpdateBatch
from skyasync.utils.manifest import Sums
from skyasync.weight_sync.adapters import Adapter

if TYPE_CHECKING:
    from skyasync.weight_sync.full_tensors import FileLayout

LOGPROBS = "logprobs"
ENTROPY = "entropy"
VALUES = "values"
TOP_K = "top_k"
TOKEN_LOGPROBS = "token_logprobs"
"""Names of outputs, zero where there is no loss token, ``[rows, length]`` unless stated.

- The log-probability of each loss token.
- The entropy of the distribution that it was drawn from.
- The value of the state before it.
- The ``top_k`` likeliest tokens and then their log-probabilities, ``[rows, length, 2 k]``.
- Log-probabilities of ``token_ids``, ``[rows, length, k]``.
"""

LOOPBACK = "127.0.0.1"

MODEL = "model"
VALUE_HEAD = "value_head"
"""Parts of a model with an optimizer each: the model; a critic's head on the policy's layers."""


@dataclass(frozen=True)
class OutputRequest:
    """The outputs that a model computes for each loss token.

    Args:
        names: of the outputs.
        plain: of the model's own distribution, at temperature 1 and without filters.
        adapters: False: of the frozen model without its adapters.
        top_k: how many of the likeliest tokens.
        token_ids: int64 ``[rows, length, k]``: tokens other than the loss token.
        entropy_gradient: the entropy is differentiable; else it costs no memory in the backward
            pass.
        value_gradient: share of the values' gradient that flows from the head to the layers.
    """

    names: frozenset[str] = frozenset({LOGPROBS})
    plain: bool = False
    adapters: bool = True
    top_k: int = 0
    token_ids: Tensor | None = None
    entropy_gradient: bool = True
    value_gradient: float = 1.0

    @classmethod
    def of(cls, *names: str, **options: Any) -> OutputRequest:  # noqa: ANN401
        return cls(frozenset(names), **options)


class LossTerm(NamedTuple):
    """The loss of a part of the model on a micro-batch.

    Args:
        loss: a scalar.
        mask: bool ``[rows, length]``: the tokens over which metrics are averaged.
        per_token: ``[rows, length]`` each: what becomes a metric.
    """

    loss: Tensor
    mask: Tensor
    per_token: dict[str, Tensor]


class LossFn(ABC):
    """A loss; those of micro-batches and ranks are summed."""

    @abstractmethod
    def request(self, batch: UpdateBatch) -> OutputRequest:
        """The outputs that the loss needs of the model.

        Raises:
            ValueError: if the batch lacks what it learns from.
        """

    @abstractmethod
    def __call__(self, outputs: Mapping[str, Tensor], batch: UpdateBatch) -> dict[str, LossTerm]:
        """One term for each part of the model that learns; the gradient is that of their sum.

        Args:
            outputs: those that were requested.
            batch: a micro-batch, on the outputs' device.
        """


class JointLoss(LossFn):
    """Losses of different parts of one model, computed in one pass."""

    def __init__(self, policy_loss: LossFn, critic_loss: LossFn) -> None:
        self._losses = policy_loss, critic_loss

    def request(self, batch: UpdateBatch) -> OutputRequest:
        policy, critic = (loss.request(batch) for loss in self._losses)
        return replace(
            policy, names=policy.names | critic.names, value_gradient=critic.value_gradient
        )

    def __call__(self, outputs: Mapping[str, Tensor], batch: UpdateBatch) -> dict[str, LossTerm]:
        terms: dict[str, LossTerm] = {}
        for loss in self._losses:
            terms |= loss(outputs, batch)  # they have different parts
        return terms


ROW_TOKENS = "row_tokens"
COMPUTED_TOKENS = "computed_tokens"
"""Metrics: tokens of the rows, and those that were computed: shared ones once, and padding."""

# Metrics that are sums over all ranks; the others are means over loss tokens.
SUMMED = {"loss", "tokens", ROW_TOKENS, COMPUTED_TOKENS}


@dataclass
class Totals:
    """Sums over micro-batches, in float64, of what becomes a metric."""

    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, term: LossTerm) -> None:
        values = {"loss": term.loss, "tokens": term.mask.sum()}
        for name, per_token in term.per_token.items():
            values[name] = per_token.where(term.mask, 0.0).sum(dtype=torch.float64)
        self.add_sums(values)

    def add_sums(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.detach().double()

    def reduce(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> dict[str, float]:
        """Loss and token counts of all ranks of ``group``, and means of the other metrics.

        The means are over the loss tokens of all these ranks.

        Args:
            device: of the collective.
        """
        # One collective for all metrics: each would wait for the slowest rank.
        sums = torch.stack(list(self.sums.values()))  # [metrics]
        if group is not None:
            sums = sums.to(device)
            dist.all_reduce(sums, group=group)
        metrics = dict(zip(self.sums, sums.tolist(), strict=True))
        tokens = max(1.0, metrics["tokens"])
        for name in metrics.keys() - SUMMED:
            metrics[name] /= tokens
        return metrics


@dataclass(frozen=True)
class ModelSpec:
    """The model that a backend loads, its division over ranks, and the parts that are trained.

    Args:
        role: its name, for errors and file names.
        section: the role's part of the configuration, for errors.
        path: a folder or hub name.
        dtype: of the computation; "auto" is float32 on a CPU and bfloat16 on a GPU.
        head: ``VOCABULARY``, ``VALUE`` or ``SCORE``.
        trainer: settings that all models of a run share.
        distribution: that of the sampling, for log-probabilities.
        optimizers: of each part that is trained; none: the model is frozen.
        float32_head: logits are computed in float32.
        value_head_kwargs: ``config_kwargs`` of a critic of its own, as which the ``VALUE_HEAD`` is
            exported.

    The others are the keys of the same names in the role's section.
    """

    role: str
    section: str
    path: str
    trainer: TrainerConfig
    dtype: str = "auto"
    head: str = VOCABULARY
    config_kwargs: Mapping[str, Any] = field(default_factory=dict)
    distribution: SampledDistribution = field(default_factory=SampledDistribution)
    mesh_shape: MeshShape = field(default_factory=MeshShape)
    optimizers: Mapping[str, OptimizerConfig] = field(default_factory=dict)
    lora: LoraConfig = field(default_factory=LoraConfig)
    cpu_offload: str = "none"
    fsdp_size: int = 0
    gradient_checkpointing: bool | str = False
    reduce_gradients: str = "micro_batch"
    torch_compile: bool = False
    router_replay: str = "none"
    freeze: Sequence[str] = ()
    float32_head: bool = False
    value_head_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankContext:
    """One rank of a model, and the rendezvous with the others.

    That is ``store``, or rank 0's at ``host`` and ``port``.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    host: str = LOOPBACK
    port: int = 0
    store: dist.Store | None = None


@dataclass(frozen=True)
class SaveResult:
    """The files that one rank has written, or the reason why it could not."""

    files: Sums = field(default_factory=dict)
    problem: str = ""


class ModelBackend(ABC):
    """One rank's part of a model. All ranks make the same calls in the same order.

    Attributes:
        spec: of the model that was loaded.
        step: optimizer steps that the model has taken.
        hidden_size: of the model.
        dtype: that the model is computed in, and in which its weights go to engines.
    """

    spec: ModelSpec
    step: int = 0
    hidden_size: int
    dtype: torch.dtype

    @property
    def shares_prefixes(self) -> bool:
        """Whether what rows of a group share is computed once."""
        return False

    @abstractmethod
    def load(self, spec: ModelSpec, ranks: RankContext) -> None:
        """Join the other ranks, read the model's files, and keep this rank's part of the model."""

    @abstractmethod
    def forward(self, batch: TokenBatch, request: OutputRequest) -> dict[str, Tensor]:
        """The outputs requested, without gradient, in the batch's rows, float32 on the CPU."""

    def forward_backward(
        self,
        batch: UpdateBatch,
        loss: LossFn,
        returns: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """Add the gradient of this rank's rows to the gradient since the last optimizer step.

        Args:
            returns: names of outputs, computed with the weights before the step.

        Returns:
            These outputs, as ``forward`` returns them.
        """
        raise self._not_supported("train")

    def examine(self, scale: float = 1.0) -> str:
        """Scale the gradient and the loss, and describe what is not finite of them; "" if all is.

        The same on every rank. ``optimizer_step`` or ``drop_gradient`` must follow.
        """
        raise self._not_supported("train")

    def optimizer_step(
        self,
        lr: Mapping[str, float],
        scale: float = 1.0,
        beta1: float | None = None,
    ) -> dict[str, dict[str, float]]:
        """Change the weights by the gradient, and forget the gradient.

        Args:
            lr: learning rate of each part.
            scale: of gradient and loss, if ``examine`` was not called before.
            beta1: AdamW's first decay rate for the model, instead of the settings'.

        Returns:
            Of each part that had a loss: ``loss``, ``grad_norm`` (before clipping), ``tokens``, and
            the loss's metrics, averaged over the loss tokens of all ranks. With
            ``max_grad_cosine``, after the first step, ``grad_cosine``.

        Raises:
            NonFiniteError: on every rank, before any weight changes. The gradient is forgotten.
        """
        raise self._not_supported("train")

    def drop_gradient(self) -> None:
        """Forget the gradient: weights, optimizer state and ``step`` are as they were."""
        raise self._not_supported("train")

    @abstractmethod
    def sharded_weights(self) -> Mapping[str, Any]:
        """Weights and saved buffers by their names in the model.

        Names and their order are the same on every rank. Values are whole tensors, or anything with
        ``dtype``, ``shape`` and a collective ``full_tensor()``, of the whole.
        """

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights, one at a time: a rank needs memory for one.

        All ranks go through it to the end.
        """
        # Here, as it imports torch's distributed tensors: the controller has none.
        from skyasync.weight_sync.full_tensors import gathered

        return gathered(self.sharded_weights())

    def file_layout(self) -> FileLayout | None:
        """How weights are named and divided in the model's files; None: as in the model."""
        return None

    def adapter(self) -> Adapter:
        """The LoRA adapters alone, whole. All ranks call it."""
        raise self._not_supported("train adapters")

    def offload(self) -> None:
        """Move the state to host memory.

        Until ``onload`` only ``save`` and ``restore`` may be called.
        """
        raise self._not_supported("offload")

    def onload(self) -> None:
        """Undo ``offload``, bitwise."""
        raise self._not_supported("offload")

    def save(self, folder: Path) -> SaveResult:
        """Write all that the next optimizer step depends on.

        The folder is empty, and all ranks share it.
        """
        raise self._not_supported("save checkpoints")

    def begin_save(self, folder: Path) -> None:
        """Begin to save a copy of the state: this returns when the copy is made."""
        raise self._not_supported("save checkpoints")

    def saved(self) -> SaveResult | None:
        """The result of the last ``begin_save``; None while it is being written."""
        raise self._not_supported("save checkpoints")

    def restore(self, folder: Path) -> None:
        """Read what ``save`` wrote, by any number of ranks."""
        raise self._not_supported("load checkpoints")

    def export(self, folder: Path, part: str = MODEL) -> None:
        """Write a Hugging Face folder: safetensors, configuration, tokenizer.

        Args:
            part: ``VALUE_HEAD``: as a critic of its own, with the model's layers.
        """
        raise self._not_supported("export models")

    def _not_supported(self, action: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} does not {action}")

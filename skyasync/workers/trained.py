"""One rank of a model that is trained: gradients, the optimizer, checkpoints.

Invariant: the gradient of a batch does not depend on how it is cut. Loss weights hold the denominators of the
whole batch, so gradients are summed over micro-batches and over ranks and never divided again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from skyasync.errors import NonFiniteError
from skyasync.state import manifest
from skyasync.state.manifest import Sums
from skyasync.weight_sync.full_tensors import FileLayout, FullTensors, specs_in
from skyasync.workers import checkpoint
from skyasync.workers.base import ModelWorker, put_rows, sharded_afterwards
from skyasync.workers.batch import UpdateBatch
from skyasync.workers.flexible import keep_blocks
from skyasync.workers.model import Wrapped
from skyasync.workers.norms import are_alike, clip, local, total_norm
from skyasync.workers.offload import HOST, OPTIMIZER, move_moments
from skyasync.workers.optimizers import has_short_state, make_optimizer, master_dtype
from skyasync.workers.packing import MicroBatch
from skyasync.workers.recomputing import checkpointing_options
from skyasync.workers.saved import Saved
from skyasync.workers.schedule import learning_rate
from skyasync.workers.totals import Totals


@dataclass(frozen=True)
class Examined:
    """What the gradient that has been added up is like: the metrics so far, its norm, and what is not finite."""

    metrics: dict[str, float]
    norm: Tensor | None = None
    problem: str = ""


class TrainedWorker(ModelWorker):
    """Holds a model and its optimizer, by the settings of its role's section (as ``trainer.policy``).

    A subclass says what is learnt: ``_backward``, and ``_fills``.

    Args:
        args, kwargs: those of :class:`ModelWorker`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step = 0
        self._totals, self._passes = Totals(), 0  # since the last optimizer step
        self._examined: Examined | None = None  # of the gradient in hand
        self._alike = False  # the ranks of the tensor axis have been seen to agree
        self._checkpoint_group: dist.ProcessGroup | None = None

    def _backward(self, micro: MicroBatch[UpdateBatch], totals: Totals) -> Tensor:
        """Add a micro-batch's gradient, and to ``totals`` what becomes a metric.

        Returns:
            What the model said before the step, ``[rows, length]``, detached.
        """
        raise NotImplementedError

    def _fills(self, batch: UpdateBatch) -> bool:
        """Whether ``forward_backward`` returns what ``_backward`` does, as the batch lacks it."""
        return False

    def master_dtype(self) -> torch.dtype:
        """Small steps vanish in bfloat16, so the optimizer sees float32 weights, unless it rounds by chance."""
        return master_dtype(self.settings.optimizer_config, self.dtype, self.role.section)

    def may_cut_experts(self) -> bool:
        return not has_short_state(self.settings.optimizer_config)  # which counts a rank's rows from its first on

    def build(self) -> Wrapped:
        wrapper = super().build()
        if getattr(self.settings, "torch_compile", False):
            from skyasync.workers.compiling import compile_layers
            from skyasync.workers.layers import decoder_layers

            wrapper.packs = False  # rows end to end differ in how many blocks they have: each would be compiled
            compile_layers(decoder_layers(wrapper), self.device)
        if how := self._recomputes():
            if how == "selective":
                keep_blocks(wrapper.model)  # torch compiles nothing while it chooses what to keep
            wrapper.model.gradient_checkpointing_enable(checkpointing_options(selective=how == "selective"))
            wrapper.train()  # the model has no dropout, so this only switches gradient checkpointing on
            if self.adapters:
                self.adapters.let_drop(False)
        self.optimizer = self._make_optimizer(wrapper)
        return wrapper

    def _recomputes(self) -> bool | str:
        """Whether the backward pass recomputes activations; on a CPU there is memory enough and no time to spare."""
        setting: bool | str = self.settings.gradient_checkpointing
        return self.device.type != "cpu" if setting == "auto" else setting

    def _make_optimizer(self, wrapper: Wrapped) -> torch.optim.AdamW:
        # A weight that is frozen only while it is looked at is the optimizer's all the same; one under adapters is not.
        learnt = [p for p in wrapper.model.parameters() if p.requires_grad or self.adapters is None]
        return make_optimizer(wrapper, learnt, self.settings.optimizer_config, self.cfg.trainer.seed)

    def forward_backward(self, batch: UpdateBatch) -> Tensor | None:
        """Add the gradient of this rank's rows to what has been added up since the last optimizer step.

        Returns:
            What the model said before the step, ``[batch, length]``, if the batch lacks it.
        """
        if batch.loss_weights is None or batch.advantages is None:
            raise ValueError("a training batch needs loss_weights and advantages")
        before = torch.zeros(batch.tokens.shape) if self._fills(batch) else None
        with sharded_afterwards(self.model), self._dropping():
            micros = self._micro_batches(batch, self.cfg.trainer.micro_train_batch_size_per_gpu)
            once = getattr(self.settings, "reduce_gradients", "micro_batch") == "update"
            following = next(micros, None)
            while following is not None:
                micro, following = following, next(micros, None)
                if once and isinstance(self.model, FSDPModule):  # over the ranks they are added up behind the last
                    self.model.set_requires_gradient_sync(following is None)
                current = self._backward(micro, self._totals)
                if before is not None:
                    put_rows(before, micro, current)
        return before

    def _dropping(self) -> AbstractContextManager[None]:
        """Around a gradient: the adapters' dropout acts, by draws that a resumed run repeats."""
        if self.adapters is None:
            return nullcontext()
        self._passes += 1
        return self.adapters.dropping(hash((self.cfg.trainer.seed, self.step, self._passes, self.rank)))

    def optimizer_step(self, schedule_step: int | None = None, scale: float = 1.0) -> dict[str, float]:
        """Change the weights by the gradient that has been added up, and forget it.

        Args:
            schedule_step: optimizer step by which the learning rate goes; by default this worker's own count.
            scale: gradient and loss are multiplied by it first: one over the loss's denominator, where the weights
                lack it.

        Returns:
            ``loss``, ``grad_norm`` (before clipping), ``lr``, ``tokens`` and the objective's metrics, averaged
            over the loss tokens of all ranks.

        Raises:
            NonFiniteError: on every rank alike, before any weight changes.
        """
        try:
            if problem := self.examine(scale):
                raise NonFiniteError(problem)
            found = self._examined
            assert found is not None
            self._clip()
            return found.metrics | self._change(self.step if schedule_step is None else schedule_step)
        finally:
            self.drop_gradient()

    def _change(self, scheduled: int) -> dict[str, float]:
        """The weights, by the gradient that was examined and clipped; the learning rate."""
        rate = learning_rate(scheduled, self.settings.optimizer_config, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.offloads == OPTIMIZER:
            move_moments(self.optimizer, self.device)
        self.optimizer.step()
        self._stow()
        self.step += 1
        return {"lr": rate}

    def examine(self, scale: float = 1.0) -> str:
        """Scale the gradient that has been added up, and say what is not finite of it and the loss, "" if all is.

        On every rank alike; ``optimizer_step`` or ``drop_gradient`` must follow.
        """
        if self._examined is None:
            self._examined = self._look(scale)
        return self._examined.problem

    def drop_gradient(self) -> None:
        """Forget what has been added up: weights, moments and the count of steps are as they were."""
        self._totals, self._passes, self._examined = Totals(), 0, None
        self.optimizer.zero_grad()  # gradients are as large as the weights: none is kept until the next update
        if self.cfg.trainer.placement.colocate_all and self.device.type == "cuda":
            torch.cuda.empty_cache()  # for the engine that wakes on this GPU

    def _look(self, scale: float) -> Examined:
        metrics = self._totals.reduce(self.sum_over_ranks)
        metrics["loss"] *= scale
        if not math.isfinite(metrics["loss"]):
            return Examined(metrics, problem=f"the loss of optimizer step {self.step} is not finite: {metrics}")
        if scale != 1.0:
            for gradient in self._gradients():
                gradient.mul_(scale)
        self._alike = self._alike or are_alike(self.model, self.mesh)
        norm = total_norm(self._gradients(), self.mesh)
        metrics["grad_norm"] = float(norm)
        if math.isfinite(metrics["grad_norm"]):
            return Examined(metrics, norm)
        where = f"the gradient of optimizer step {self.step} is not finite in: {self._culprits()}"
        return Examined(metrics, norm, where)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.model.parameters() if p.grad is not None]

    @overload
    def _here(self, tensor: Tensor) -> Tensor: ...
    @overload
    def _here(self, tensor: Tensor | None) -> Tensor | None: ...
    def _here(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(self.device)

    def _clip(self) -> None:
        """Clip the gradient that was examined to the configured norm."""
        assert self._examined is not None and self._examined.norm is not None
        if limit := self.settings.optimizer_config.max_grad_norm:
            clip(self._gradients(), self._examined.norm, limit)

    def _culprits(self) -> str:
        """Parameters whose gradient is not finite (of this rank's shard), a few of them by name."""
        bad = [
            name
            for name, p in self.model.named_parameters()
            if p.grad is not None and not local(p.grad).isfinite().all()
        ]
        if not bad:
            return "another rank's shard"
        return ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")

    def _move(self, device: torch.device) -> None:
        self.optimizer.zero_grad()  # the next update begins without gradients in any case
        super()._move(device)
        if self.offloads == "none":
            move_moments(self.optimizer, device)

    def _stow(self) -> None:
        """What is the host's between steps goes there."""
        if self.offloads == OPTIMIZER:
            move_moments(self.optimizer, HOST)

    def save(self, folder: str) -> Saved:
        """Model, optimizer, step and random state, sharded; all ranks call it with the same empty folder."""
        return checkpoint.save(self.model.model, self.optimizer, self.step, Path(folder), self._beside())

    def begin_save(self, folder: str) -> None:
        """As ``save``, but of a copy, while other calls go on."""
        if self._checkpoint_group is None and dist.is_initialized():
            # Of its own: in the group that trains, its messages would get between the others' in no fixed order.
            self._checkpoint_group = dist.new_group(backend="gloo")
        self._behind = checkpoint.begin(
            self.model.model, self.optimizer, self.step, Path(folder), self._checkpoint_group, self._beside()
        )

    def saved(self) -> Saved | None:
        return self._behind.saved()

    def verify(self, folder: str, sums: Sums) -> list[str]:
        """What is wrong with a checkpoint's files, in words; each rank reads its share of them."""
        mine = dict(sorted(sums.items())[self.rank :: self.world_size])
        return list(manifest.damage(Path(folder), mine))

    def load(self, folder: str) -> None:
        """What ``save`` wrote, by any number of ranks."""
        key = f"{self.role.section}.model.path"
        model = self.model.model
        self.step = checkpoint.load(model, self.optimizer, Path(folder), self.role.name, key, self._beside())
        self._stow()

    def _beside(self) -> checkpoint.Beside | None:
        """What is trained beside the model, and saved with it."""
        return None

    def export(self, folder: str) -> None:
        """Write a Hugging Face folder: safetensors, config, tokenizer. All ranks call it."""
        if self.adapters and self.settings.lora.export == "adapter":
            own = self.adapters.own()
            if self.rank == 0:
                self.adapters.export(own, Path(folder))
                checkpoint.export_tokenizer(self.path, Path(folder))
            return
        weights, model = self.weights(), self.model.model
        tensors = FullTensors(weights, self.dtype, FileLayout(model, specs_in(weights, self.dtype), self.adapters))
        if self.rank != 0:
            tensors.only_gather()
            return
        with self.adapters.aside() if self.adapters else nullcontext():
            checkpoint.export(model, tensors, self.path, Path(folder))

    def weights(self) -> Mapping[str, Any]:
        """By the names of the files; adapters are added to them as they are gathered."""
        return self.adapters.merged() if self.adapters else checkpoint.own_tensors(self.model.model)

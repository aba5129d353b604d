"""One rank of a role that has a model: its backend, and what it learns."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from skyasync.algorithms.sampled import SampledDistribution
from skyasync.models.backend import (
    LOGPROBS,
    MODEL,
    VALUE_HEAD,
    LossFn,
    ModelBackend,
    ModelSpec,
    OutputRequest,
    RankContext,
    SaveResult,
    new_backend,
)
from skyasync.models.batch import TokenBatch, UpdateBatch
from skyasync.models.packing import sequences_as_batch
from skyasync.workers.model_worker import learning_rate
from skyasync.workers.worker import LOOPBACK, Worker

SPEC_KEYS = (
    "lora", "cpu_offload", "fsdp_size", "gradient_checkpointing", "reduce_gradients", "torch_compile", "router_replay",
)  # fmt: skip
"""Keys of a role's section that a backend reads, if the section has them."""


class ModelWorker(Worker):
    """Holds the model of its role's section, and trains it if the role says so and there is a ``loss``.

    Use: construct on every rank, ``open_rendezvous`` on rank 0, ``setup`` on all ranks at once.

    Attributes:
        loss: what the model learns of a batch; None: the model is frozen.
    """

    backend: ModelBackend
    loss: LossFn | None = None
    _store: dist.Store | None = None

    def open_rendezvous(self, host: str) -> int:
        """Rank 0 listens on a free port of ``host``, which is returned; bound here, so that it stays free."""
        listener = socket.create_server((host, 0))  # the store itself would listen on every interface
        port: int = listener.getsockname()[1]
        self._store = dist.TCPStore(
            host, port, self.world_size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return port

    def new_backend(self) -> ModelBackend:
        return new_backend(self.cfg.trainer.strategy)

    def spec(self) -> ModelSpec:
        """Which model the backend loads."""
        role, cfg, model = self.role, self.cfg, self.role.model(self.cfg)
        section: dict[str, Any] = vars(self.settings) if self.settings else {}
        filtered = cfg.trainer.algorithm.filter_logprobs
        return ModelSpec(
            role=role.name,
            section=role.section,
            path=model.path,
            dtype=model.dtype,
            head=role.head,
            config_kwargs=role.config_kwargs(cfg),
            distribution=SampledDistribution.of(cfg.generator.sampling_params, filtered=filtered),
            axes=role.axes(cfg, self.world_size),
            optimizers={MODEL: section["optimizer_config"]} if role.trains else {},
            trainer=cfg.trainer,
            **{name: section[name] for name in SPEC_KEYS if name in section},
        )

    def setup(self, host: str = LOOPBACK, port: int = 0) -> None:
        """Join the other ranks, if there are any, then load the model."""
        self.backend = self.new_backend()
        self.backend.load(self.spec(), self.rank_context(host, port))

    def rank_context(self, host: str, port: int) -> RankContext:
        return RankContext(self.rank, self.world_size, self.device, host, port, self._store)

    def hidden_size(self) -> int:
        return self.backend.hidden_size

    def logprobs(self, batch: TokenBatch, plain: bool = False) -> Tensor:
        """Log-probability of each loss token, ``[batch, length]``.

        Args:
            plain: of the model's own distribution, at temperature 1 and without filters.
        """
        return self.backend.forward(batch, OutputRequest(plain=plain))[LOGPROBS]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of each token after the first of each sequence, at temperature 1."""
        values = self.logprobs(sequences_as_batch(sequences), plain=True).tolist()
        return [row[1 : len(sequence)] for row, sequence in zip(values, sequences, strict=True)]

    def offload(self) -> None:
        self.backend.offload()

    def onload(self) -> None:
        self.backend.onload()

    # ---------------------------------------------------------------- training

    def forward_backward(self, batch: UpdateBatch) -> Tensor | None:
        """Add the gradient of this rank's rows to the gradient since the last optimizer step.

        Returns:
            The log-probabilities before the step, ``[batch, length]``, if this is the policy and the batch lacks them.
        """
        if batch.loss_weights is None or batch.advantages is None:
            raise ValueError("a training batch needs loss_weights and advantages")
        return self._accumulate(batch)

    def _accumulate(self, batch: UpdateBatch) -> Tensor | None:
        assert self.loss is not None
        self.backend.forward_backward(batch, self.loss)
        return None

    def optimizer_step(self, schedule_step: int | None = None, scale: float = 1.0) -> dict[str, float]:
        """Change the weights by the gradient, and forget the gradient.

        Args:
            schedule_step: optimizer step by which the learning rate goes; by default this worker's own count.
            scale: gradient and loss are multiplied by it first: one over the loss's denominator, if the weights lack
                it.

        Returns:
            ``loss``, ``grad_norm`` (before clipping), ``lr``, ``tokens`` and the loss's metrics; those of a critic on
            the model's layers as ``critic/...``.

        Raises:
            NonFiniteError: on every rank alike, before any weight changes.
        """
        step = self.backend.step if schedule_step is None else schedule_step
        rates = {
            part: learning_rate(step, options, self.total_steps)
            for part, options in self.backend.spec.optimizers.items()
        }
        found: dict[str, float] = {}
        for part, metrics in self.backend.optimizer_step(rates, scale).items():
            prefix = "critic/" if part == VALUE_HEAD else ""
            found |= {prefix + name: value for name, value in {**metrics, "lr": rates[part]}.items()}
        return found

    def examine(self, scale: float = 1.0) -> str:
        """What is not finite of the loss and the gradient, "" if all is; before the step."""
        return self.backend.examine(scale)

    def drop_gradient(self) -> None:
        self.backend.drop_gradient()

    # ---------------------------------------------------------------- files

    def save(self, folder: str) -> SaveResult:
        return self.backend.save(Path(folder))

    def begin_save(self, folder: str) -> None:
        self.backend.begin_save(Path(folder))

    def saved(self) -> SaveResult | None:
        return self.backend.saved()

    def load(self, folder: str) -> None:
        self.backend.restore(Path(folder))

    def export(self, folder: str) -> None:
        """Write a Hugging Face folder. All ranks call it."""
        self.backend.export(Path(folder))

"""One rank of a role with a model: its backend, its loss, and its learning rate."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from skyasync.algorithms.sampled import SampledDistribution
from skyasync.config.schema import OptimizerConfig
from skyasync.errors import UserError
from skyasync.models import BACKENDS, VOCABULARY
from skyasync.models.backend import (
    LOGPROBS,
    LOOPBACK,
    MODEL,
    VALUE_HEAD,
    LossFn,
    ModelBackend,
    ModelSpec,
    OutputRequest,
    RankContext,
    SaveResult,
)
from skyasync.models.batch import TokenBatch, UpdateBatch
from skyasync.models.packing import sequences_as_batch
from skyasync.workers.worker import Worker

SPEC_KEYS = (
    "lora",
    "cpu_offload",
    "fsdp_size",
    "gradient_checkpointing",
    "reduce_gradients",
    "torch_compile",
    "router_replay",
    "freeze",
)
"""Keys of a role's section that a backend reads, if the section has them."""


class ModelWorker(Worker):
    """Holds the model of its role's section, and trains it by its ``loss``.

    Use: construct on every rank, ``open_rendezvous`` on rank 0, ``setup`` on all ranks at once.

    Attributes:
        loss: of a batch; None: the model is frozen.
    """

    backend: ModelBackend
    loss: LossFn | None = None
    _store: dist.Store | None = None

    def open_rendezvous(self, host: str) -> int:
        """Listen for the other ranks on a free port of ``host``, which is returned (rank 0)."""
        # Bound here, so that the port stays free; the store itself would listen on every interface.
        listener = socket.create_server((host, 0))
        port: int = listener.getsockname()[1]
        self._store = dist.TCPStore(
            host,
            port,
            self.world_size,
            is_master=True,
            wait_for_workers=False,  # they learn the port from what this returns
            master_listen_fd=listener.detach(),
        )
        return port

    def new_backend(self) -> ModelBackend:
        backend: ModelBackend = BACKENDS.find(self.cfg.trainer.strategy)()
        return backend

    def spec(self) -> ModelSpec:
        """The model that the backend loads."""
        role = self.role
        cfg = self.cfg
        model = role.model(cfg)
        section: dict[str, Any] = vars(self.settings) if self.settings else {}
        filters_logprobs = cfg.trainer.algorithm.filter_logprobs
        options = {name: section[name] for name in SPEC_KEYS if name in section}
        return ModelSpec(
            role=role.name,
            section=role.section,
            path=model.path,
            dtype=model.dtype,
            head=role.head,
            config_kwargs=role.config_kwargs(cfg),
            distribution=SampledDistribution.of(
                cfg.generator.sampling_params, filtered=filters_logprobs
            ),
            mesh_shape=role.mesh_shape(cfg, self.world_size),
            optimizers={MODEL: section["optimizer_config"]} if role.trains else {},
            trainer=cfg.trainer,
            float32_head=role.head == VOCABULARY and cfg.trainer.policy.head_dtype == "float32",
            **options,
        )

    def setup(self, host: str = LOOPBACK, port: int = 0) -> None:
        """Join the other ranks, if there are any, then load the model."""
        self.backend = self.add_backend(host, port)

    def add_backend(self, host: str, port: int, **changes: Any) -> ModelBackend:
        """Add a backend with the model of ``spec()``, with these fields changed."""
        backend = self.new_backend()
        ranks = RankContext(self.rank, self.world_size, self.device, host, port, self._store)
        backend.load(replace(self.spec(), **changes), ranks)
        self.backends.append(backend)
        return backend

    def logprobs(self, batch: TokenBatch, plain: bool = False) -> Tensor:
        """Log-probability of each loss token, ``[batch, length]``.

        Args:
            plain: of the model's distribution at temperature 1 and without filters, not of the
                sampled one.
        """
        return self.backend.forward(batch, OutputRequest(plain=plain))[LOGPROBS]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of each token after the first of each sequence, at temperature 1."""
        # [sequences, longest length]
        logprobs = self.logprobs(sequences_as_batch(sequences), plain=True).tolist()
        return [row[1 : len(sequence)] for row, sequence in zip(logprobs, sequences, strict=True)]

    # ---------------------------------------------------------------- training

    def forward_backward(self, batch: UpdateBatch) -> Tensor | None:
        """Add the gradient of this rank's rows to the gradient since the last optimizer step.

        Returns:
            The log-probabilities before the step, ``[batch, length]``, if this is the policy and
            the batch lacks them.
        """
        return self.accumulate(batch, self.loss)

    def accumulate(
        self, batch: UpdateBatch, loss: LossFn | None, returns: Collection[str] = ()
    ) -> Tensor | None:
        """Add the gradient of a loss, as ``forward_backward`` does.

        Args:
            returns: names of outputs; with ``LOGPROBS`` the log-probabilities are returned.
        """
        assert loss is not None, f"the {self.role.name} is not trained"
        if batch.loss_weights is None or batch.advantages is None:
            raise ValueError("a training batch needs loss_weights and advantages")
        return self.backend.forward_backward(batch, loss, returns).get(LOGPROBS)

    def optimizer_step(
        self,
        schedule_step: int | None = None,
        scale: float = 1.0,
        lr_scale: float = 1.0,
        beta1: float | None = None,
    ) -> dict[str, float]:
        """Change the weights by the gradient, and forget the gradient.

        Args:
            schedule_step: optimizer step by which the learning rate goes; by default as this worker
                counts.
            scale: gradient and loss are multiplied by it first: one over the loss's denominator, if
                the weights lack it.
            lr_scale: factor of the model's learning rate; that of a critic on its layers stays.
            beta1: AdamW's first decay rate, likewise; None: by the settings.

        Returns:
            ``loss``, ``grad_norm`` (before clipping), ``lr``, ``tokens`` and the loss's metrics;
            those of a critic on the model's layers as ``critic/...``.

        Raises:
            NonFiniteError: on every rank alike, before any weight changes.
        """
        backend = self.backend
        step = backend.step if schedule_step is None else schedule_step
        rates = {}
        for part, options in backend.spec.optimizers.items():
            rates[part] = learning_rate(step, options, self.total_steps)
        rates[MODEL] *= lr_scale  # by the staleness of the policy's samples
        results = {}
        # A critic on the model's layers has another optimizer, with other metrics.
        for part, metrics in backend.optimizer_step(rates, scale, beta1).items():
            prefix = "critic/" if part == VALUE_HEAD else ""
            for name, value in metrics.items():
                results[prefix + name] = value
            results[f"{prefix}lr"] = rates[part]
        return results

    def examine(self, scale: float = 1.0) -> str:
        """The problem of a loss or gradient that is not finite, before the step; "" if both are."""
        return self.backend.examine(scale)

    def drop_gradient(self) -> None:
        """Drop the gradient instead of a step."""
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
        """Write a Hugging Face folder; all ranks call it at once."""
        self.backend.export(Path(folder))


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of optimizer step ``step``, from 0.

    A pure function, so a resumed run continues its schedule. Linear warm-up over
    ``num_warmup_steps``, or ``warmup_ratio`` of all steps, then transformers' schedule of this
    name. The first step already learns, by ``warmup_lr_rate`` of the rate if ``scheduler_kwargs``
    has one.

    Raises:
        UserError: for a schedule that needs the number of steps, if that is not known.
    """
    endless = config.scheduler in ("constant", "constant_with_warmup", "inverse_sqrt")
    if (not endless or config.warmup_ratio > 0) and total_steps <= 0:
        raise UserError(
            f"scheduler={config.scheduler} needs a known number of steps: set trainer.max_training_steps"
        )
    warmup = config.num_warmup_steps or math.ceil(config.warmup_ratio * total_steps)
    # transformers' first rate is 0, and the first step would learn nothing.
    if step < warmup and "warmup_lr_rate" not in config.scheduler_kwargs:
        return config.lr * (step + 1) / warmup
    if config.scheduler in ("constant", "constant_with_warmup"):
        return config.lr
    # The common schedules, without an import of transformers.
    if config.scheduler in ("linear", "cosine") and not config.scheduler_kwargs:
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        if config.scheduler == "linear":
            factor = 1.0 - progress
        else:
            factor = 0.5 * (1.0 + math.cos(math.pi * progress))
        return config.lr * factor
    options = tuple(sorted(config.scheduler_kwargs.items()))
    schedule = _schedule(config.scheduler, config.lr, warmup, total_steps, options)
    return config.lr * schedule(step)


@lru_cache(maxsize=16)
def _schedule(
    name: str, lr: float, warmup: int, total_steps: int, options: tuple[tuple[str, object], ...]
) -> Callable[[int], float]:
    """transformers' schedule: step -> fraction of the peak rate."""
    import torch
    from torch.optim import SGD
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import get_scheduler

    # Its schedulers drive an optimizer; this one trains nothing.
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = get_scheduler(
        name, optimizer, warmup, total_steps, scheduler_specific_kwargs=dict(options)
    )
    assert isinstance(scheduler, LambdaLR)
    fraction: Callable[[int], float] = scheduler.lr_lambdas[0]
    return fraction

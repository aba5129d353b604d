"""What the trainer asks of the models it trains; where and how they run is not its business."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from skyasync.models.batch import TokenBatch, UpdateBatch
from skyasync.utils.manifest import Sums
from skyasync.weight_sync.transfers.base import WeightTransfer


class Dispatch(Protocol):
    """The roles of a run as one object, however many ranks each has (``skyasync.workers.roles``)."""

    async def ask(self, role: str, method: str, batch: TokenBatch) -> Tensor:
        """What a role says of a batch: ``[batch, length]`` or ``[batch]``, in the batch's order.

        The policy's ranks answer for a role that they host (a reference under adapters, a critic on its layers).
        Workers are sent tokens, masks, groups, and the columns that the role's entry names.

        Args:
            method: of the role's worker: ``logprobs`` of policy, reference and teacher, ``values`` of the critic.
        """

    async def call(self, role: str, method: str, *args: object) -> list[Any]:
        """The same call on every rank of a role; results by rank."""

    async def forward_backward(self, batch: UpdateBatch, role: str = "policy") -> None:
        """Add the gradient of these rows to what has been added up since the last optimizer step.

        A missing ``proximal_logprobs`` means that the current policy is the proximal one; it is filled in.
        """

    async def optimizer_step(
        self, schedule_step: int | None = None, scale: float = 1.0, role: str = "policy"
    ) -> dict[str, float]:
        """Change the weights; returns metrics (loss, grad_norm, lr, ...).

        Args:
            schedule_step: optimizer step by which the learning rate goes; by default the workers' own count.
            scale: gradient and loss are multiplied by it first: one over the loss's denominator, where the weights of
                the parts lack it.
        """

    async def examine(self, scale: float = 1.0, role: str = "policy") -> str:
        """What is not finite of the loss and the gradient that have been added up, "" if all is; before the step."""

    async def drop_gradient(self, role: str = "policy") -> None:
        """In the place of the step: forget the gradient. Weights, moments and the count of steps stay."""

    @property
    def transfer(self) -> WeightTransfer:
        """How the policy's weights reach the engines."""

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """As ``InferenceEngine.score``, by the trainer's policy."""

    async def offload(self) -> None:
        """Move the models' state to host memory; until ``onload`` only ``save`` and ``load`` may be asked."""

    async def onload(self) -> None:
        """Bring it back to the devices, bit for bit."""

    async def save(self, folder: Path) -> Sums | None:
        """Write model and optimizer state of each role that trains into ``folder/<role>``.

        Returns:
            What the files must hold that are synced by now, by path from ``folder``.

        Raises:
            OSError: if the disk does not take them. The models are as they were, and may go on.
        """

    async def begin_save(self, folder: Path) -> None:
        """As ``save``, but of a copy of the state: this returns when it is made. One at a time."""

    async def saved(self) -> Sums | None:
        """What ``save`` would have returned, or raised, of what was begun; None while it is being written."""

    async def verify(self, folder: Path, sums: Sums) -> list[str]:
        """What is wrong with a checkpoint's files, in words. Each is read."""

    async def load(self, folder: Path) -> None:
        """What ``save`` wrote there."""

    async def export(self, folder: Path, role: str = "policy") -> None:
        """Write a role's model as a Hugging Face folder (safetensors, config, tokenizer)."""

    async def begin_profile(self) -> None:
        """From here on what the workers compute is recorded."""

    async def end_profile(self, folder: Path) -> None:
        """Write what has been recorded there, a trace and a table of each rank."""

    async def stats(self) -> dict[str, Any]:
        """``busy_s`` of the policy since start, and whatever else is worth a metric."""

    async def shutdown(self) -> None: ...

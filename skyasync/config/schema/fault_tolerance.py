"""What a run does when something fails: a checkpoint, a loss, a process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyasync.config.keys import When, key
from skyasync.config.resume import keeps_checkpoints

if TYPE_CHECKING:
    from skyasync.config.schema import TrainerConfig


#: Checkpoints are saved.
CHECKPOINTS = When("trainer.ckpt_interval", "trainer.ckpt_minutes", "trainer.ckpt_best_metric", "trainer.ckpt_on_exit")


@dataclass
class FaultToleranceConfig:
    """The part of ``TrainerConfig`` that is about failures."""

    ckpt_patience: int = key(3, low=1, when=CHECKPOINTS)
    """Checkpoints in a row that the disk does not take (it is full, or may not be written) before the run ends."""
    sigterm_grace_s: float = key(25.0, above=0.0, when=CHECKPOINTS)
    """Seconds that a run has from SIGTERM to its end: the update under way is finished and saved."""
    max_restarts: int = key(3, low=0)
    """Failures of workers or of the controller in an hour after which they are started again from the newest
    checkpoint; at the next failure, or with 0 at the first, the run ends, as it does if it saves no checkpoints."""
    heartbeat_timeout_s: float = key(120.0, above=0.0)
    """Seconds without a heartbeat after which a process of a model, while it works on a request, or the controller
    counts as failed; if checkpoints are saved and trainer.max_restarts is above 0."""
    on_nonfinite: str = key("raise", choices=("raise", "skip"))
    """What a loss, gradient or reward that is NaN or infinite does: end the run, or (skip) leave out the optimizer
    step. The batch is written to nonfinite/, for skyasync replay."""
    spike_limits: dict[str, Any] = key({})
    """Metric -> the largest value that is not a spike, such as {policy/approx_kl: 0.2, off_policy/ratio_max: 50}."""
    on_spike: str = key("warn", choices=("warn", "raise", "rollback"), when="trainer.spike_limits")
    """What a spike does: a line and a count; end the run; or return to the weights and optimizer state of the newest
    checkpoint, and leave out the data since then."""
    max_bad_steps: int = key(3, low=1, when=When("trainer.on_nonfinite=skip", "trainer.on_spike=rollback"))
    """Optimizer steps in a row that are left out (on_nonfinite=skip), or steps undone (on_spike=rollback), at which the
    run ends."""


def check_fault_tolerance(trainer: TrainerConfig) -> Iterator[str]:
    for name, limit in trainer.spike_limits.items():
        if isinstance(limit, bool) or not isinstance(limit, int | float):
            yield f"trainer.spike_limits.{name}={limit!r} is no number: it is the largest value that is not a spike"
        elif trainer.on_spike == "rollback" and name.startswith(("sync/", "eval/")):
            yield (
                f"trainer.spike_limits.{name} is known when the engines have the weights, too late for "
                f"trainer.on_spike=rollback: limit what training finds (policy/..., off_policy/..., critic/...), or "
                f"set warn or raise"
            )
    if trainer.on_spike == "rollback" and not keeps_checkpoints(trainer):
        yield (
            "trainer.on_spike=rollback goes back to a checkpoint, and this run saves none: set trainer.ckpt_interval "
            "or trainer.ckpt_minutes"
        )

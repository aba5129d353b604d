"""What a run does when something goes wrong: settings of checkpoints that fail, numbers that do, and what dies.

Invariant: as of ``schema``, whose part this is.
"""

# ruff: noqa: RUF009  (key() returns a dataclasses.field, with a factory where the default is mutable)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyasync.config.field import key
from skyasync.config.frozen import Settings

CHECKPOINTS = "trainer.ckpt_interval or trainer.ckpt_minutes or trainer.ckpt_best_metric or trainer.ckpt_on_exit"


@dataclass
class SurvivalConfig(Settings):
    """The part of ``TrainerConfig`` that is about failures."""

    ckpt_patience: int = key(
        3,
        "Checkpoints in a row that the disk does not take (it is full, or may not be written) before the run ends.",
        low=1,
        when=CHECKPOINTS,
    )
    sigterm_grace_s: float = key(
        25.0,
        "Seconds that a run has from SIGTERM to its end: the update under way is finished and saved.",
        above=0.0,
        when=CHECKPOINTS,
    )
    max_restarts: int = key(
        3,
        "Times in an hour that workers or the controller, whose process has died, are started again from the newest "
        "checkpoint; at the next death, or with 0 at the first, the run ends, as it does where it keeps none.",
        low=0,
    )
    restart_from: str = key(
        "checkpoint",
        "What workers that are started again resume from: the newest checkpoint.",
        choices=("checkpoint",),
        refused=(("engines", "removed; workers restart from the newest checkpoint: lower trainer.ckpt_interval"),),
        when="trainer.max_restarts",
    )
    heartbeat_timeout_s: float = key(
        120.0,
        "Seconds without a sign of life after which a process of a model, while it is asked for something, or the "
        "controller counts as dead; where checkpoints are kept and trainer.max_restarts is above 0.",
        above=0.0,
    )
    on_nonfinite: str = key(
        "raise",
        "What a loss, gradient or reward that is NaN or infinite does: end the run, or (skip) leave out the optimizer "
        "step. The batch is written to nonfinite/, for skyasync replay.",
        choices=("raise", "skip"),
    )
    spike_limits: dict[str, Any] = key(
        {}, "Metric -> the largest value that is no spike, such as {policy/approx_kl: 0.2, off_policy/ratio_max: 50}."
    )
    on_spike: str = key(
        "warn",
        "What a spike does: a line and a count; end the run; or go back to the weights and moments of the newest "
        "checkpoint, with the data behind it left out.",
        choices=("warn", "raise", "rollback"),
        when="trainer.spike_limits",
    )
    max_bad_steps: int = key(
        3,
        "Optimizer steps in a row that are left out (on_nonfinite=skip), or steps undone (on_spike=rollback), at which "
        "the run ends.",
        low=1,
        when="trainer.on_nonfinite=skip or trainer.on_spike=rollback",
    )

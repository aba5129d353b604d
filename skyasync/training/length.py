"""How long a run is, in training steps and in optimizer steps.

Invariant: pure arithmetic on the configuration, the prompt stream and the progress; the learning rate goes by it, so
that a schedule ends with the run whatever was left out on the way.
"""

from __future__ import annotations

from skyasync.config.schema import Config
from skyasync.data.prompts import PromptStream
from skyasync.training.progress import Progress


class RunLength:
    """Steps done and to come."""

    def __init__(self, cfg: Config, prompts: PromptStream, progress: Progress) -> None:
        self._cfg, self._prompts, self._progress = cfg.trainer, prompts, progress

    @property
    def refilling(self) -> bool:
        """Rejected groups are replaced while a batch is generated."""
        return self._cfg.algorithm.dynamic_sampling.mode == "refill"

    @property
    def steps(self) -> int:
        """Of the whole run: those trained, and as many as the prompts that are left make.

        While rejected prompts are replaced this is the most that it can be.
        """
        done, most = self._progress.step, self._cfg.max_training_steps
        left = self._prompts.steps(self._progress.position, self._progress.ahead)
        return done + (min(left, max(most - done, 0)) if most and self.refilling else left)

    @property
    def updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps * self.updates_per_batch(self._cfg.train_batch_size)

    def updates_per_batch(self, groups: int) -> int:
        """Optimizer steps on a batch of so many groups."""
        return self._cfg.update_epochs_per_batch * -(-groups // (self._cfg.policy_mini_batch_size or groups))

    @property
    def planned_updates(self) -> int:
        """Optimizer steps before this training step as the learning rate counts them: those that groups left out
        would have made included, so that the schedule ends with the run."""
        updates = self.updates_per_batch(self._cfg.train_batch_size)
        by_steps = self._progress.step * updates
        if not self.refilling:
            return by_steps
        steps, most = self._prompts.steps(), self._cfg.max_training_steps
        total = min(steps, most or steps) * updates
        trained = self._progress.position + len(self._progress.ahead)
        return max(by_steps, trained * total // self._prompts.total)

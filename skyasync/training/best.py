"""Whether a step is the best so far, by the metric that the user has named.

Invariant: what is better stands only until its checkpoint is written or is not; from then on the checkpoints know.
"""

from __future__ import annotations

from skyasync.config.schema import TrainerConfig
from skyasync.errors import UserError, nearest
from skyasync.state.best import Best
from skyasync.training.phases import Metrics


class BestSoFar:
    """Steps that were better than all before, and whose checkpoints are not written yet."""

    def __init__(self, cfg: TrainerConfig) -> None:
        self._metric, self._better = cfg.ckpt_best_metric, max if cfg.ckpt_best_mode == "max" else min
        self._logged = False  # the metric, ever
        self._values: dict[int, float] = {}  # by step

    def improves(self, step: int, metrics: Metrics, best: Best | None, *, evaluated: bool) -> bool:
        """Whether these metrics of a step are better than ``best`` and than those that wait.

        Raises:
            UserError: if there is no such metric.
        """
        name = self._metric
        if not name or (name.startswith("eval/") and not evaluated):
            return False
        if name not in metrics:
            if self._logged:
                return False  # no group of this step was worth training, say
            close = nearest(name, metrics, count=1)
            hint = f"did you mean {close[0]}?" if close else "metrics.jsonl has their names"
            raise UserError(f"trainer.ckpt_best_metric={name}: step {step} has no such metric: {hint}")
        self._logged = True
        value, before = metrics[name], list(self._values.values())
        if best is not None and best.metric == name:
            before.append(best.value)
        if value != value or (before and self._better([value, *before]) in before):
            return False
        self._values[step] = value
        return True

    def pop(self, step: int) -> float | None:
        """The checkpoint of this step is written, or is not; its value, if it was better."""
        return self._values.pop(step, None)

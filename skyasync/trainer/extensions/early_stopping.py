"""A callback that ends a run when a metric improves no more."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan, nan
from typing import Any, Literal

from skyasync.callbacks import Answer, TrainerCallback, Watched
from skyasync.errors import UserError
from skyasync.trainer.extensions import nearest_metric


class EarlyStopping(TrainerCallback):
    """Ends the run after ``patience`` values of a metric in a row without improvement.

    A value counts when it is new: of ``eval/...`` metrics after each evaluation, of others after
    each step.

    Args:
        metric: by its name in ``metrics.jsonl``.
        patience: values without improvement.
        mode: "max" if a larger value is better.
        min_delta: how much better a value must be to count as an improvement.
    """

    def __init__(
        self,
        metric: str,
        patience: int = 3,
        *,
        mode: Literal["max", "min"] = "max",
        min_delta: float = 0.0,
    ) -> None:
        if mode not in ("max", "min"):
            raise UserError(f"EarlyStopping: mode={mode!r} must be 'max' or 'min'")
        if patience < 1 or min_delta < 0:
            raise UserError(
                f"EarlyStopping: patience={patience} must be at least 1, min_delta={min_delta} at least 0"
            )
        self._metric = metric
        self._patience = patience
        self._mode = mode
        self._min_delta = min_delta
        self._best: float | None = None
        self._waits = 0
        self._has_value = False

    def on_start(self, trainer: Watched) -> Answer:
        if self._metric.startswith("eval/") and not trainer.eval_dataset:
            raise UserError(
                f"EarlyStopping: {self._metric} needs held-out prompts: set data.val_data or data.val_sets"
            )
        return super().on_start(trainer)

    def on_evaluate(self, trainer: Watched, metrics: dict[str, float]) -> None:
        if self._metric.startswith("eval/"):
            self._add_value(trainer, metrics, required=True)

    def on_step_end(self, trainer: Watched, metrics: dict[str, float]) -> None:
        if not self._metric.startswith("eval/"):
            trained = "policy/loss" in metrics
            self._add_value(trainer, metrics, required=trained)

    def _add_value(self, trainer: Watched, metrics: Mapping[str, float], *, required: bool) -> None:
        """Compare the metric's value with the best one; stop the run if it waited too long.

        Args:
            required: the metric must be there, unless it was there before.
        """
        value = metrics.get(self._metric)
        if value is None:
            if required and not self._has_value:
                hint = nearest_metric(self._metric, metrics)
                raise UserError(f"EarlyStopping: there is no metric {self._metric}: {hint}")
            return
        self._has_value = True
        if self._best is None:
            gain = 0.0
        elif self._mode == "max":
            gain = value - self._best
        else:
            gain = self._best - value
        # NaN is no improvement. As the best value it would make every later value none.
        if not isnan(value) and (self._best is None or gain > self._min_delta):
            self._best = value
            self._waits = 0
            return
        self._waits += 1
        if self._waits >= self._patience:
            best = nan if self._best is None else self._best
            trainer.stop(
                f"{self._metric} has not improved on {best:g} in {self._waits} values (EarlyStopping)"
            )

    def state_dict(self) -> Mapping[str, Any]:
        return {"metric": self._metric, "best": self._best, "waited": self._waits}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["metric"] == self._metric:
            self._best = state["best"]
            self._waits = state["waited"]

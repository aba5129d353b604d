"""Trackers: the files and services that a run's metrics go to.

Invariant: ``metrics.jsonl`` has one line per step, in ascending order, however many calls logged
parts of it, and is complete on disk after every call. A tracker that fails is reported once, until
it works again, and does not stop the run. Rows that a full disk refuses are written as soon as
there is room.

A tracker of a service imports its package when a run names it. A resumed run continues the same run
there: an id that is made up for the service is stored in the run's folder. MLflow, trackio and
SwanLab are installed by the user: as extras of this library they would hold back the versions of
other packages.
"""

from __future__ import annotations

import importlib
import logging
import math
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

from skyasync.config.values import dotted
from skyasync.errors import UserError
from skyasync.observability import TRACKERS, jsonl
from skyasync.observability.lines import status_line
from skyasync.observability.run_dir import RunDirectory

NON_FINITE = "warnings/non_finite"
MLFLOW_VALUE_CHARS = 500  # characters of a parameter's value, the most that MLflow's servers take
MLFLOW_BATCH = 100  # parameters in a request

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float | None]


class Tracker(Protocol):
    """Receives metrics. A value is a finite number, or ``None`` if it was NaN or infinite."""

    def log(self, metrics: Metrics, step: int) -> None:
        """Take the metrics that belong to ``step``; later calls for the same step add to them."""

    def close(self) -> None:
        """Write or send what is left. Safe to call twice. By default nothing is left."""
        return


@dataclass(frozen=True)
class TrackerContext:
    """The argument of a tracker's constructor: ``TRACKERS[name](context)``."""

    run_dir: RunDirectory
    config: Mapping[str, Any] = field(default_factory=dict)
    project_name: str = "skyasync"


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Python floats from numbers, NumPy scalars and one-element tensors.

    A value that is not finite becomes ``None``, and ``warnings/non_finite`` counts such values.

    Raises:
        TypeError: for a value that is no number, naming the metric.
    """
    plain: dict[str, float | None] = {}
    for name, value in metrics.items():
        if isinstance(value, str | bytes):
            raise TypeError(f"metric {name!r} is {value!r}, not a number")
        try:
            number = math.nan if value is None else float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"metric {name!r} is {value!r}, not a number") from error
        plain[name] = number if math.isfinite(number) else None
    non_finite = list(plain.values()).count(None)
    if non_finite:
        plain[NON_FINITE] = float(non_finite)
    return plain


class MultiTracker:
    """Hands the same metrics to several trackers.

    Args:
        names: registered trackers, as in ``trainer.logger``.
        extra: trackers that are already built.

    Raises:
        UserError: for an unknown name or a missing package, when built and never later.
    """

    def __init__(
        self,
        names: Sequence[str],
        run_dir: RunDirectory,
        config: Mapping[str, Any] | None = None,
        *,
        project_name: str = "skyasync",
        extra: Iterable[Tracker] = (),
    ) -> None:
        context = TrackerContext(run_dir, config or {}, project_name)
        self._trackers: list[tuple[str, Tracker]] = []
        for name in names:
            self._trackers.append((name, TRACKERS[name](context)))
        for tracker in extra:
            self._trackers.append((type(tracker).__name__, tracker))
        self._failed: set[str] = set()

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        plain = plain_metrics(metrics)
        for name, tracker in self._trackers:
            with self._reported(name):
                tracker.log(plain, step)

    def keep(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log the metrics of a step before its checkpoint is written, in the run's own folder.

        ``log`` follows, from which services get the step.
        """
        plain = plain_metrics(metrics)
        for name, tracker in self._trackers:
            with self._reported(name):
                if isinstance(tracker, JsonlTracker):
                    tracker.log(plain, step)

    def close(self) -> None:
        for name, tracker in self._trackers:
            with self._reported(name):
                tracker.close()

    @contextmanager
    def _reported(self, name: str) -> Iterator[None]:
        """An error in the block is a warning, once until the tracker works again."""
        try:
            yield
            self._failed.discard(name)
        except Exception as error:  # of any type: services raise their own
            if name not in self._failed:
                problem = f"{type(error).__name__}: {error}"
                logger.warning("tracker %s failed, the run continues: %s", name, problem)
            self._failed.add(name)


@TRACKERS.register("jsonl")
class JsonlTracker(Tracker):
    """``metrics.jsonl``: ``{"step": k, "time": seconds since 1970, "reward/mean": ..., ...}``.

    The newest line is written again whenever its step gets more metrics. The first step that is
    logged says where a resumed run continues: lines of later steps, from the interrupted run, are
    dropped. The line of this step is dropped, too, if it has one of the same metrics.
    """

    def __init__(self, context: TrackerContext) -> None:
        self._path = context.run_dir.metrics
        self._newest: jsonl.Row | None = None
        self._unwritten: list[jsonl.Row] = []  # rows before the newest that a full disk refused
        self._written = True  # the newest row
        self._offset = 0  # bytes: where the first unwritten line begins, else the newest

    def log(self, metrics: Metrics, step: int) -> None:
        if self._newest is None:
            rows = jsonl.read_rows(self._path)
            end_step = step
            if any(row["step"] == step and metrics.keys() & row.keys() for row in rows):
                end_step = step - 1  # the step is made again
            rows = [row for row in rows if row["step"] <= end_step]
            self._newest = self._rewrite([*rows, {"step": step}])
        row = {"step": step, "time": round(time.time(), 3), **metrics}
        if step < self._newest["step"]:  # rare, so that all rows may be written again
            self._newest = self._rewrite([*jsonl.read_rows(self._path), row])
        elif step == self._newest["step"]:
            self._write_newest({**self._newest, **row})
        else:
            if self._written:
                self._unwritten = []
                self._offset = self._path.stat().st_size
            else:
                self._unwritten.append(self._newest)
            self._write_newest(row)

    keep = log  # the row is complete on disk after every call

    def _rewrite(self, rows: list[jsonl.Row]) -> jsonl.Row:
        """Write all rows again, one per step and in order.

        Returns:
            The newest row.
        """
        by_step: dict[int, jsonl.Row] = {}
        for row in rows:
            by_step.setdefault(row["step"], {}).update(row)
        ordered = [by_step[step] for step in sorted(by_step)]
        newest = ordered[-1]
        jsonl.write_rows(self._path, ordered)
        self._offset = self._path.stat().st_size - len(jsonl.encode(newest).encode())
        return newest

    def _write_newest(self, row: jsonl.Row) -> None:
        """Write the row over the newest line, after the rows that the disk refused before."""
        self._newest = row
        self._written = False
        text = "".join(map(jsonl.encode, [*self._unwritten, row]))
        with self._path.open("r+b") as file:
            file.seek(self._offset)
            file.write(text.encode())
            file.truncate()  # what a write that failed has left behind the text
        self._written = True


@TRACKERS.register("console")
class ConsoleTracker(Tracker):
    """One line per call on standard output."""

    def __init__(self, context: TrackerContext) -> None:
        del context

    def log(self, metrics: Metrics, step: int) -> None:
        print(status_line(step, metrics), flush=True)


def need(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UserError(
            f"tracker {package!r}: the package is not installed; add it with: uv pip install {package}"
        ) from error


@TRACKERS.register("tensorboard", extra="tensorboard")
class TensorboardTracker:
    """Event files in ``<run folder>/tensorboard``.

    Steps that are made again hide those of the interrupted run.
    """

    def __init__(self, context: TrackerContext) -> None:
        need("tensorboard")
        self._folder = str(context.run_dir.path / "tensorboard")
        self._writer: Any = None  # until the first step is known

    def log(self, metrics: Metrics, step: int) -> None:
        if self._writer is None:
            # Imported here: importing this package must not import torch.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._folder, purge_step=step)
        for name, value in metrics.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _ServiceRun:
    """``_run``: the service's own run object, with ``log`` and ``finish``."""

    _run: Any

    def log(self, metrics: Metrics, step: int) -> None:
        finite = {name: value for name, value in metrics.items() if value is not None}
        self._run.log(finite, step=step)

    def close(self) -> None:
        self._run.finish()


@TRACKERS.register("wandb", extra="wandb")
class WandbTracker(_ServiceRun):
    """Weights & Biases; a resumed run continues the same W&B run, by an id in the run's folder."""

    def __init__(self, context: TrackerContext) -> None:
        wandb = need("wandb")
        id_file = context.run_dir.path / "wandb_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        self._run = wandb.init(
            project=context.project_name,
            name=context.run_dir.name,
            id=id_file.read_text(),
            resume="allow",  # continue a run of this id, or begin it
            dir=str(context.run_dir.path),
            config=dict(context.config),
        )


@TRACKERS.register("mlflow", package="mlflow")
class MlflowTracker:
    """MLflow, where MLFLOW_TRACKING_URI leads; the experiment is ``trainer.project_name``."""

    def __init__(self, context: TrackerContext) -> None:
        mlflow = need("mlflow")
        self._entities: Any = mlflow.entities
        self._client: Any = mlflow.MlflowClient()
        id_file = context.run_dir.path / "mlflow_id"
        if id_file.exists():
            self._run = id_file.read_text()
            self._client.update_run(self._run, "RUNNING")
            return
        experiment = self._client.get_experiment_by_name(context.project_name)
        if experiment:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self._client.create_experiment(context.project_name)
        run = self._client.create_run(experiment_id, run_name=context.run_dir.name)
        self._run = run.info.run_id
        id_file.write_text(self._run)
        params = []
        for name, value in _flat(context.config).items():
            params.append(self._entities.Param(name, str(value)[:MLFLOW_VALUE_CHARS]))
        for start in range(0, len(params), MLFLOW_BATCH):
            self._client.log_batch(self._run, params=params[start : start + MLFLOW_BATCH])

    def log(self, metrics: Metrics, step: int) -> None:
        now_ms = int(time.time() * 1000)
        rows = []
        for name, value in metrics.items():
            if value is not None:
                rows.append(self._entities.Metric(name, value, now_ms, step))
        self._client.log_batch(self._run, metrics=rows)

    def close(self) -> None:
        self._client.set_terminated(self._run)


@TRACKERS.register("trackio", package="trackio")
class TrackioTracker(_ServiceRun):
    """trackio, on this machine (``trackio show``) or where TRACKIO_SPACE_ID leads."""

    def __init__(self, context: TrackerContext) -> None:
        trackio = need("trackio")
        self._run = trackio.init(
            project=context.project_name,
            name=context.run_dir.name,
            config=_flat(context.config),
            resume="allow",
        )


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by dotted key; an empty mapping is a value."""
    return dict(dotted(config, lambda path, group: bool(group)))


@TRACKERS.register("swanlab", package="swanlab")
class SwanlabTracker(_ServiceRun):
    """SwanLab; its files are in the run's folder. SWANLAB_MODE says if they go to the service."""

    def __init__(self, context: TrackerContext) -> None:
        swanlab = need("swanlab")
        id_file = context.run_dir.path / "swanlab_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(11)[:21])  # the service's ids have 21 characters
        self._run = swanlab.init(
            project=context.project_name,
            name=context.run_dir.name,
            id=id_file.read_text(),
            resume="allow",
            log_dir=str(context.run_dir.path / "swanlab"),
            config=dict(context.config),
        )

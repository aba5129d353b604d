"""Trackers of other services: each needs a package, which is imported when a run names it and installed by the user
(as extras of this library they would hold back what others need).

Invariant: a resumed run goes on in the service's same run, whose id is kept in the run's folder where the service makes
one up; a service that fails costs a warning (``MultiTracker``), never the run.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from skyasync.observe import TRACKERS
from skyasync.observe.trackers import Metrics, TrackerContext, need

_LONGEST = 500  # characters of a parameter's value, which MLflow's servers take
_AT_ONCE = 100  # parameters in a request


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
        found = self._client.get_experiment_by_name(context.project_name)
        experiment = found.experiment_id if found else self._client.create_experiment(context.project_name)
        self._run = self._client.create_run(experiment, run_name=context.run_dir.name).info.run_id
        id_file.write_text(self._run)
        params = [self._entities.Param(name, str(value)[:_LONGEST]) for name, value in _flat(context.config)]
        for start in range(0, len(params), _AT_ONCE):
            self._client.log_batch(self._run, params=params[start : start + _AT_ONCE])

    def log(self, metrics: Metrics, step: int) -> None:
        now = int(time.time() * 1000)
        rows = [self._entities.Metric(name, value, now, step) for name, value in metrics.items() if value is not None]
        self._client.log_batch(self._run, metrics=rows)

    def close(self) -> None:
        self._client.set_terminated(self._run)


@TRACKERS.register("trackio", package="trackio")
class TrackioTracker:
    """trackio, on this machine (``trackio show``) or where TRACKIO_SPACE_ID leads."""

    def __init__(self, context: TrackerContext) -> None:
        trackio = need("trackio")
        self._run: Any = trackio.init(
            project=context.project_name, name=context.run_dir.name, config=dict(_flat(context.config)), resume="allow"
        )

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log({name: value for name, value in metrics.items() if value is not None}, step=step)

    def close(self) -> None:
        self._run.finish()


@TRACKERS.register("swanlab", package="swanlab")
class SwanlabTracker:
    """SwanLab; its files are in the run's folder, and SWANLAB_MODE says whether they go to the service."""

    def __init__(self, context: TrackerContext) -> None:
        swanlab = need("swanlab")
        id_file = context.run_dir.path / "swanlab_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(11)[:21])  # of the length that the service asks for
        self._run: Any = swanlab.init(
            project=context.project_name, name=context.run_dir.name, id=id_file.read_text(), resume="allow",
            log_dir=str(context.run_dir.path / "swanlab"), config=dict(context.config),
        )  # fmt: skip

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log({name: value for name, value in metrics.items() if value is not None}, step=step)

    def close(self) -> None:
        self._run.finish()


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value

"""A run in the program that starts it: folder, Ray, controller process, final report.

Invariant: however a run ends, its status says how, its timeline is complete, its page is made. A
run in which no process was started leaves no folder.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from traceback import format_exception
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from skyasync.callbacks import Metrics
from skyasync.config.secrets import Secrets
from skyasync.errors import Terminated
from skyasync.inference.elastic import FILE as ENGINES_FILE
from skyasync.inference.settings import chosen_backend, chosen_engine
from skyasync.observability.run_dir import RunDirectory, shown, unlock_run
from skyasync.run.controller import run_in_controller
from skyasync.run.recovery import Recovery
from skyasync.utils.task_group import run_in_own_loop

if TYPE_CHECKING:
    from skyasync.run.experiment import BasePPOExp

T = TypeVar("T")


def run(experiment: BasePPOExp, folder: RunDirectory) -> Metrics | None:
    """Train; returns the last metrics, or None if the run was stopped."""
    if experiment.began_s is None:
        experiment.began_s = time.time()
    metrics = _run(experiment, folder)
    _print_times(folder, experiment.began_s)
    return metrics


def _run(experiment: BasePPOExp, folder: RunDirectory) -> Metrics | None:
    from skyasync.observability.report.page import write_report
    from skyasync.observability.run_dir import status_file
    from skyasync.observability.timeline import to_the_end

    started: list[bool] = []  # not empty once the run has started processes
    engine = chosen_engine(experiment.cfg)
    folder.error.unlink(missing_ok=True)  # of a previous command with this folder
    try:
        status = status_file(folder.path, engine, experiment.began_s)
        with status, to_the_end(folder.timeline), _live_page(experiment, folder):
            return _run_on_ray(experiment, folder, started)
    except (Exception, KeyboardInterrupt) as error:
        if not started:  # nothing in the folder would help anyone
            folder.discard()
        if isinstance(error, Exception) and folder.path.exists() and not folder.error.exists():
            folder.save_error("".join(format_exception(error)))
        raise
    finally:
        if experiment.cfg.trainer.report and folder.metrics.exists():
            write_report(folder.path)  # last: it shows how the run has ended
        unlock_run(folder.path)


def _print_times(folder: RunDirectory, began_s: float) -> None:
    """Print how the time of the run, until now, was spent."""
    from skyasync.observability import jsonl
    from skyasync.observability.summary import run_times

    rows = [row for row in jsonl.read_rows(folder.metrics) if row.get("time", 0.0) >= began_s]
    line = run_times(rows, time.time())
    if line:
        print(line)


@contextlib.contextmanager
def _live_page(experiment: BasePPOExp, folder: RunDirectory) -> Iterator[None]:
    if not experiment.cfg.trainer.live_page:
        yield
        return
    from skyasync.run.live_page import live_page

    with live_page(folder.path) as url:
        print(f"live page: {url}", flush=True)
        yield


def _run_on_ray(
    experiment: BasePPOExp, folder: RunDirectory, started: list[bool]
) -> Metrics | None:
    from skyasync.observability import jsonl
    from skyasync.observability.plots import plot_reward
    from skyasync.observability.summary import print_summary
    from skyasync.run.logs import ProcessLogs
    from skyasync.run.ray_cluster import cluster

    experiment.restarting = Recovery(experiment, folder.path)
    # A run that was killed has left it, and its requests for engines are not for this command.
    (folder.path / ENGINES_FILE).unlink(missing_ok=True)
    logs = ProcessLogs(folder.logs, hide=folder.secrets.hide_all)
    with (
        _terminated() as hear,
        cluster(experiment.cfg, roles=experiment.roles(), logs=logs) as gpus,
    ):
        hear()  # after the start of Ray, which installs its own handler
        started.append(True)
        experiment.gpus = gpus
        engine = chosen_engine(experiment.cfg)
        if engine:
            print(f"engine: {engine}", flush=True)
        line = chosen_backend(experiment.cfg, gpus=gpus)
        if line:
            print(line)
        since = experiment.began_s or 0.0
        try:
            metrics = run_in_controller(experiment, logs)
            # Print the summary in any case: a resumed run may have had nothing left to do.
            since = 0.0
            return metrics
        finally:
            rows = jsonl.read_rows(folder.metrics)
            # After a failure only if this command has written metrics.
            if any(row.get("time", 0.0) >= since for row in rows):
                if any("reward/mean" in row for row in rows):
                    plot_reward(folder.metrics, folder.reward_plot)
                print_summary(folder.metrics)
                print(f"run folder: {shown(folder.path)}")


def run_without_controller(
    experiment: BasePPOExp, folder: RunDirectory, work: Callable[[], Coroutine[Any, Any, T]]
) -> T:
    """Run ``work`` in this process on the run's cluster, and return its result.

    ``folder`` gets the logs of the cluster's processes. After an error it gets the traceback and
    the last lines of the logs.
    """
    from skyasync.run.logs import ProcessLogs, last_words
    from skyasync.run.placement import release
    from skyasync.run.ray_cluster import cluster

    folder.secrets = Secrets.of(experiment.cfg)
    logs = ProcessLogs(folder.logs, hide=folder.secrets.hide_all)
    try:
        with cluster(experiment.cfg, roles=experiment.roles(), logs=logs) as gpus:
            experiment.gpus = gpus
            engine = chosen_engine(experiment.cfg)
            if engine:
                print(f"engine: {engine}", file=sys.stderr)  # standard output may be JSON
            try:
                return run_in_own_loop(work())
            finally:
                release(experiment.placement_name)
    except Exception as error:
        folder.save_error("".join(format_exception(error)) + last_words(logs, error))
        raise


@contextlib.contextmanager
def _terminated() -> Iterator[Callable[[], object]]:
    """After the yielded function is called, SIGTERM ends the block as Ctrl-C does.

    Until then Ray's handler, installed by its start, ends the program with status 15, and aborts it
    if it has not ended 3 s later.
    """

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    previous_handler = signal.getsignal(signal.SIGTERM)
    in_main_thread = threading.current_thread() is threading.main_thread()
    hear: Callable[[], object] = bool  # does nothing: no other thread can have handlers
    if in_main_thread:
        hear = partial(signal.signal, signal.SIGTERM, terminate)
    try:
        yield hear
    except SystemExit as end:
        if end.code != signal.SIGTERM:
            raise
        signal.alarm(0)  # by which Ray's handler would abort this program
        raise Terminated from None
    finally:
        if in_main_thread and previous_handler is not None:  # None: it was not set by Python
            signal.signal(signal.SIGTERM, previous_handler)

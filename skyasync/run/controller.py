"""The process that trains, and the terminal that watches it.

Invariant: a run ends by its last step, an error in any component, or Ctrl-C. In each case the
trackers are flushed, every component is shut down, and the user sees the first error.

| who waits  | for what                          | woken by                                             |
|------------|-----------------------------------|------------------------------------------------------|
| the driver | the controller's ``run``          | its end or error; polls for progress meanwhile, and  |
|            |                                   | kills it if it is silent for too long                |
| ``run``    | the trainer's ``run``             | its end or error; ``stop`` cancels it                |
| shutdown   | the shutdown of every component   | each of them, or ``GRACE_S``, then they are killed   |
| SIGTERM    | as shutdown, with a save before   | the same, or ``trainer.sigterm_grace_s``             |

A worker whose process fails ends the plan; the controller then has all workers started again, and
another trainer resumes from the newest checkpoint with the same engines. If the controller fails
its components end too, and the program starts another. Both draw on ``trainer.max_restarts``.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from traceback import format_exception
from types import FrameType
from typing import TYPE_CHECKING, Any

from skyasync.callbacks import Metrics, RunExtension, Watched
from skyasync.config.resume import keeps_checkpoints
from skyasync.errors import RayEndedError, Terminated, UserError
from skyasync.heap import freeze_start
from skyasync.observability.alarms import AlarmWatch
from skyasync.observability.progress import ProgressRecorder, ProgressReport, warnings_to
from skyasync.observability.terminal import ProgressView
from skyasync.registry import UserParts, add_user_parts, user_parts
from skyasync.run.logs import ProcessLogs, last_words
from skyasync.run.ray_cluster import await_end, ended
from skyasync.trainer import RayPPOTrainer
from skyasync.utils.rpc import START_S
from skyasync.utils.task_group import afterwards

if TYPE_CHECKING:
    import ray.exceptions

    from skyasync.run.experiment import BasePPOExp
    from skyasync.utils.machine import ProcessIdentity

POLL_S = 0.5  # between two readings of the progress
ANSWER_S = 10.0  # for the controller to report
GRACE_S = 30.0  # for the shutdown of all components


class _Recording(RunExtension):
    def __init__(self, recorder: ProgressRecorder) -> None:
        self._recorder = recorder

    def on_start(self, trainer: Watched) -> None:
        self._recorder.resume(trainer.global_step)

    def on_step_end(self, trainer: Watched, metrics: Metrics) -> None:
        self._recorder.log(metrics, trainer.global_step)

    on_evaluate = on_step_end


class Controller:
    """The Ray actor that has the components of an experiment.

    Args:
        registered: functions and classes that the user has registered in the program.
    """

    def __init__(self, experiment: BasePPOExp, registered: UserParts) -> None:
        add_user_parts(registered)  # before anything looks a part up
        self._experiment = experiment
        self._trainer: Any = None
        self._recorder = ProgressRecorder()
        self._recorder.phase("starting")
        self._task: asyncio.Task[None] | None = None
        self._loaded = False  # models of the current trainer
        self._stopped = False

    async def run(self) -> Metrics | None:
        """Train to the end; returns the last metrics, or None if stopped."""
        self._task = asyncio.create_task(self._train())
        try:
            await self._task
        except asyncio.CancelledError as error:
            if not self._stopped:
                raise RuntimeError(
                    "training ended with CancelledError although the run was not stopped: something that it awaited "
                    "was cancelled (a task, a timeout, a closed client)"
                ) from error
            return None
        return dict(self._trainer.last_metrics)

    async def _train(self) -> None:
        """Train; after a failure of a worker again, as long as restarts are left."""

        async def close() -> None:
            with contextlib.suppress(TimeoutError):  # Ray ends the remaining processes
                async with asyncio.timeout(GRACE_S):
                    await self._experiment.close()

        with warnings_to(self._recorder):
            # ``close`` has its own limit, which comes first.
            async with afterwards(close, grace_s=2 * GRACE_S):
                self._record(await asyncio.to_thread(self._experiment.build))
                self._recorder.phase("loading models")
                await self._experiment.start(self._trainer)
                self._loaded = True
                freeze_start()
                while True:
                    recovery = self._experiment.restarting
                    try:
                        if not self._loaded:
                            assert recovery is not None
                            self._record(await recovery.restart_workers())
                            self._loaded = True
                        return await self._trainer.run()
                    except Exception:
                        if recovery is None or not recovery.lost_workers(self._trainer.global_step):
                            raise
                    self._loaded = False
                    self._recorder.phase("starting workers again")

    def _record(self, trainer: RayPPOTrainer) -> None:
        self._trainer = trainer
        self._recorder.total = trainer.total_steps
        trainer.callbacks.append(_Recording(self._recorder))

    async def who(self) -> ProcessIdentity:
        from skyasync.utils.machine import ProcessIdentity

        return ProcessIdentity.mine()

    async def report(self, seen: int) -> ProgressReport:
        if self._loaded:
            self._recorder.phase(self._trainer.context.phases.name)
            self._recorder.sample = self._trainer.reporter.last_sample
        return self._recorder.report(seen)

    async def stop(self, saving: bool = False) -> int:
        """Cancel training and wait until every component is shut down.

        Args:
            saving: finish the current update and save it, also without ``ckpt_on_exit``.

        Returns:
            the step of the saved checkpoint, 0 if there is none.
        """
        self._stopped = True
        if saving and self._trainer is not None:
            checkpointer = self._trainer.checkpointer
            checkpointer.saves_on_exit |= keeps_checkpoints(self._experiment.cfg.trainer)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])  # not awaited: its error is raised in ``run``
        if self._trainer is not None:
            return self._trainer.checkpointer.saved_step
        return 0


class Heartbeat:
    """Asks the controller's process for its progress, and kills a process that stays silent.

    Only the time of waiting for answers counts: if this program was stopped meanwhile, the
    controller is not killed for it.

    Args:
        report: ``Controller.report`` of the actor's handle.
        limit_s: the process is killed when it has been silent for so long; 0: never.
    """

    def __init__(self, report: Any, process: ProcessIdentity, limit_s: float) -> None:  # noqa: ANN401
        self._report = report
        self._process = process
        self._limit_s = limit_s
        self._answer_s = ANSWER_S
        if limit_s:
            # Two calls at least: one late answer is not yet silence.
            self._answer_s = min(ANSWER_S, limit_s / 2)
        self._silent_s = 0.0

    def ask(self, seen: int) -> ProgressReport | None:
        """The progress since step ``seen``; None without an answer."""
        import ray

        try:
            report: ProgressReport = ray.get(self._report.remote(seen), timeout=self._answer_s)
            self._silent_s = 0.0
            return report
        except ray.exceptions.GetTimeoutError:
            self._silent_s += self._answer_s
            if self._limit_s and self._silent_s >= self._limit_s:
                problem = f"the controller has not answered for {self._silent_s:g} s (trainer.heartbeat_timeout_s)"
                print(f"{problem}: it is ended", file=sys.stderr)
                self._process.end()
        except ray.exceptions.RayError:  # it has ended, which ``run`` reports
            pass
        return None


def run_in_controller(experiment: BasePPOExp, logs: ProcessLogs) -> Metrics | None:
    """Train in a Ray actor on this node and show its progress here. Ray is initialised.

    Args:
        logs: lines that the processes print are shown above the progress.

    Raises:
        UserError, SyntaxError: the original error, without the traceback of Ray.
        Exception: any other error, with the original traceback in its text.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    on_this_node = NodeAffinitySchedulingStrategy(node, soft=False)
    # More than one call at a time: reports and ``stop`` must not wait for ``run``.
    actor_class: Any = ray.remote(Controller).options(
        num_cpus=0, max_concurrency=16, scheduling_strategy=on_this_node
    )
    trainer = experiment.cfg.trainer
    run_dir = experiment.run_dir
    watch = AlarmWatch(run_dir.path) if run_dir is not None else None
    with (
        _hearing_sigterm() as heard,
        ProgressView(
            mode=trainer.terminal, folder=logs.folder, steps="console" not in trainer.logger
        ) as view,
        logs.shown_by(view.say),
    ):
        while True:
            controller: Any = actor_class.remote(experiment, user_parts())
            try:
                return _run(controller, experiment, view, heard, watch)
            except ray.exceptions.RayError as error:
                ray_process = ended()
                if ray_process:
                    lost = RayEndedError(
                        f"{ray_process}: no run can continue without it; the same command resumes this one"
                    )
                    if run_dir is not None:
                        run_dir.save_error("".join(format_exception(lost)))
                    raise lost from None
                recovery = experiment.restarting
                if (
                    _controller_failed(error)
                    and recovery is not None
                    and not heard.is_set()
                    and recovery.lost_controller(max(view.seen, 0), error)
                ):
                    continue
                cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
                if isinstance(cause, UserError | SyntaxError):
                    if run_dir is not None:
                        run_dir.save_error(str(error))
                    # The original error: Python shows nothing of Ray's type of SyntaxError.
                    raise cause from None
                if run_dir is not None:
                    run_dir.save_error(str(error) + last_words(logs, error))
                raise


def _controller_failed(error: ray.exceptions.RayError) -> bool:
    """Whether the controller's process has failed.

    If the process of a component fails, the controller raises a task error, which is an actor error
    too.
    """
    import ray

    is_of_task = isinstance(error, ray.exceptions.RayTaskError)
    return isinstance(error, ray.exceptions.RayActorError) and not is_of_task


def _run(
    controller: Any,  # noqa: ANN401  (the actor's handle)
    experiment: BasePPOExp,
    view: ProgressView,
    heard: threading.Event,
    watch: AlarmWatch | None,
) -> Metrics | None:
    """Run the controller and poll its progress until it or Ray ends.

    Then stop it and free its devices.
    """
    import ray

    from skyasync.run.placement import release

    trainer = experiment.cfg.trainer
    get = ray.get
    try:
        try:
            process = get(controller.who.remote(), timeout=START_S)
        except ray.exceptions.GetTimeoutError:
            # Ray would try for ever; its reasons are in the terminal by then.
            ray.kill(controller)
            problem = f"Ray did not start the controller's process within {START_S:g} s; its log above says why"
            raise RuntimeError(problem) from None
        run = controller.run.remote()
        # A silent controller is killed only if the program could start another one.
        limit_s = 0.0
        if experiment.restarting is not None and experiment.restarting.possible:
            limit_s = trainer.heartbeat_timeout_s
        heartbeat = Heartbeat(controller.report, process, limit_s)
        seen = view.seen
        done = False
        while not done:
            ray_process = ended()
            if ray_process:
                raise ray.exceptions.RaySystemError(ray_process)
            finished, _ = ray.wait([run], timeout=POLL_S)
            done = bool(finished)
            report = heartbeat.ask(seen)  # also after the end, for the last steps
            if report is not None:
                view.update(report)
                for step, _ in report.rows:
                    seen = max(seen, step)
            if watch is not None and not done:  # the summary at the end has all alarms
                line = watch.line()
                if line:
                    view.say([line], error=False)
        return get(run)
    except ray.exceptions.RayActorError as error:
        if _controller_failed(error):
            # The controller may have failed because Ray ends, which takes a moment. No call may go
            # to a Ray that ends: it would answer late, or end this process.
            await_end()
        raise
    except KeyboardInterrupt:
        if not heard.is_set():
            if trainer.ckpt_on_exit:
                print(
                    "stopping: the update under way ends, then a checkpoint is saved (Ctrl-C again ends it at once)"
                )
            raise
        # It was SIGTERM: Ray makes a KeyboardInterrupt of any exception of a signal's handler.
        grace_s = trainer.sigterm_grace_s
        try:
            step = get(controller.stop.remote(saving=True), timeout=grace_s)
        except Exception as error:  # of any type: this process must end
            problem = repr(error)
            if isinstance(error, ray.exceptions.GetTimeoutError):
                problem = f"it took more than {grace_s:g} s (trainer.sigterm_grace_s)"
            raise Terminated(f": the run was not saved, {problem}") from None
        saved = ""
        if step:
            saved = (
                f": the newest checkpoint is of step {step}, resume with trainer.resume_mode=latest"
            )
        raise Terminated(saved) from None
    finally:
        try:
            if not heard.is_set() and not ended():
                stop_s = GRACE_S + 5
                if trainer.ckpt_on_exit or trainer.ckpt_async:
                    stop_s += 2 * trainer.step_timeout_s  # the current update, and its checkpoint
                with contextlib.suppress(Exception):  # it is killed below
                    get(controller.stop.remote(), timeout=stop_s)
        finally:
            if not ended():
                ray.kill(controller)
                release(experiment.placement_name)


@contextlib.contextmanager
def _hearing_sigterm() -> Iterator[threading.Event]:
    """Have SIGTERM interrupt the block once and set the event.

    It replaces Ray's handler, which would end the process at once.
    """
    heard = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # no other can have handlers
        yield heard
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        if not heard.is_set():
            heard.set()
            raise KeyboardInterrupt

    previous_handler = signal.signal(signal.SIGTERM, terminate)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGTERM, previous_handler)

"""The process that trains, and the terminal that watches it.

Invariant: whatever ends a run (its last step, an error in any part, Ctrl-C), the trackers are flushed, every
part is shut down, and the first error is what the user sees.

| who waits  | for what                          | woken by                                            |
|------------|-----------------------------------|-----------------------------------------------------|
| the driver | the controller's ``run``          | its end or error; polls for progress meanwhile, and |
|            |                                   | kills it if it is silent for too long               |
| ``run``    | the trainer's ``train``           | its end or error; ``stop`` cancels it               |
| shutdown   | every part's own shutdown         | each part, or ``GRACE_S``, after which it is killed |
| SIGTERM    | as shutdown, with a save before   | the same, or ``trainer.sigterm_grace_s``            |

A worker whose process dies ends the plan; the controller then has all workers started again, and another trainer goes
on from the newest checkpoint with the engines that there are. A controller that dies takes its parts with it, and the
program starts another. Both draw on ``trainer.max_restarts``.
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
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from skyasync.callbacks import RunExtension, Watched
from skyasync.config.schema import TrainerConfig
from skyasync.errors import RayEndedError, Terminated, UserError
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
    from ray import ObjectRef

    from skyasync.run.experiment import BasePPOExp
    from skyasync.utils.process_identity import ProcessIdentity

R = TypeVar("R")

POLL_S = 0.5
ANSWER_S = 10.0  # for the controller to report
GRACE_S = 30.0


class _Recording(RunExtension):
    def __init__(self, recorder: ProgressRecorder) -> None:
        self._recorder = recorder

    def on_step_end(self, trainer: Watched, metrics: dict[str, float]) -> None:
        self._recorder.log(metrics, trainer.global_step)

    def on_evaluate(self, trainer: Watched, metrics: dict[str, float]) -> None:
        self._recorder.log(metrics, trainer.global_step)


class Controller:
    """Lives in a Ray actor and holds the experiment's parts.

    Args:
        experiment: a ``BasePPOExp``.
        parts: what the user has registered in the program.
    """

    def __init__(self, experiment: BasePPOExp, parts: UserParts) -> None:
        add_user_parts(parts)
        self._experiment = experiment
        self._trainer: Any = None
        self._recorder = ProgressRecorder()
        self._recorder.phase("starting")
        self._task: asyncio.Task[None] | None = None
        self._loaded = self._stopped = False

    async def run(self) -> dict[str, float] | None:
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
        with warnings_to(self._recorder):
            await self._train_and_close()

    async def _train_and_close(self) -> None:
        async with afterwards(self._close, grace_s=2 * GRACE_S):  # which limits itself
            self._watch(await asyncio.to_thread(self._experiment.build))
            self._recorder.phase("loading models")
            await self._experiment.start(self._trainer)
            self._loaded = True
            while not await self._trained():
                self._loaded = False
                self._recorder.phase("starting workers again")

    async def _trained(self) -> bool:
        """False if a worker's process has died and another may take its place."""
        try:
            if not self._loaded:
                assert self._experiment.restarting is not None
                self._watch(await self._experiment.restarting.restart_workers())
                self._loaded = True
            await self._trainer.train()
        except Exception:
            restarting = getattr(self._experiment, "restarting", None)  # an experiment that is not ours has none
            if restarting is None or not restarting.lost_workers(self._trainer.global_step):
                raise
            return False
        return True

    def _watch(self, trainer: RayPPOTrainer) -> None:
        self._trainer = trainer
        self._recorder.total = trainer.total_steps
        trainer.callbacks.append(_Recording(self._recorder))

    async def _close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self._experiment.close()

    async def who(self) -> ProcessIdentity:
        from skyasync.utils.process_identity import ProcessIdentity

        return ProcessIdentity.mine()

    async def report(self, seen: int) -> ProgressReport:
        if self._loaded:
            self._recorder.phase(self._trainer.context.phases.name)
            self._recorder.sample = self._trainer.reporter.last_sample
        return self._recorder.report(seen)

    async def stop(self, saving: bool = False) -> int:
        """Cancel training and wait until every part is shut down; the step that has been saved, 0 if none has.

        Args:
            saving: finish the update under way and save it, whatever ``ckpt_on_exit`` says.
        """
        self._stopped = True
        if saving and self._trainer is not None:
            self._trainer.checkpointer.save_on_exit()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        return self._trainer.checkpointer.saved_step if self._trainer is not None else 0


class Remote(Protocol[R]):
    """A method of an actor's handle."""

    def remote(self, *args: object, **options: object) -> ObjectRef[R]: ...


class ControllerHandle(Protocol):
    """The ``Controller`` from another process."""

    run: Remote[dict[str, float] | None]
    stop: Remote[int]
    report: Remote[ProgressReport]
    who: Remote[ProcessIdentity]


class Heartbeat:
    """Asks the controller's process for its progress, and kills a process that stays silent.

    Only the time spent waiting for answers counts: a program that was itself stopped does not blame it.

    Args:
        limit_s: it is killed when it has been silent for so long; 0: never.
    """

    def __init__(self, report: Remote[ProgressReport], process: ProcessIdentity, limit_s: float) -> None:
        self._report, self._process, self._limit_s = report, process, limit_s
        self._answer_s = min(ANSWER_S, limit_s / 2) if limit_s else ANSWER_S
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
                problem = f"the controller gave no sign of life for {self._silent_s:g} s (trainer.heartbeat_timeout_s)"
                print(f"{problem}: it is ended", file=sys.stderr)
                self._process.end()
        except ray.exceptions.RayError:  # it has ended, which ``run`` reports
            pass
        return None


def run_in_controller(experiment: BasePPOExp, logs: ProcessLogs) -> dict[str, float] | None:
    """Train in a Ray actor on this node and show its progress here. Ray is initialised.

    Args:
        logs: what the processes print is shown above the progress meanwhile.

    Raises:
        UserError, SyntaxError: as it was raised, without the way it took.
        Exception: any other error, with the original traceback in its text.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class: Any = ray.remote(Controller).options(num_cpus=0, max_concurrency=16, scheduling_strategy=here)
    trainer = experiment.cfg.trainer
    with (
        _hearing_sigterm() as heard,
        ProgressView(mode=trainer.terminal, folder=logs.folder, steps="console" not in trainer.logger) as view,
        logs.shown_by(view.say),
    ):
        while True:
            controller: Any = actor_class.remote(experiment, user_parts())
            try:
                return _run(controller, experiment, view, heard)
            except ray.exceptions.RayError as error:
                if died := ended():
                    lost = RayEndedError(f"{died}: no run goes on without it; the same command goes on with this one")
                    if experiment.run_dir is not None:
                        experiment.run_dir.save_error("".join(format_exception(lost)))
                    raise lost from None
                recovery = experiment.restarting if _has_died(error) else None
                if heard.is_set() or recovery is None or not recovery.lost_controller(max(view.seen, 0), error):
                    _raise_told(experiment, logs, error)


def _has_died(error: ray.exceptions.RayError) -> bool:
    """It is the controller's process that has died; of a part's the controller has lived to tell."""
    import ray

    of_a_part = isinstance(error, ray.exceptions.RayTaskError)
    return isinstance(error, ray.exceptions.RayActorError) and not of_a_part


def _raise_told(experiment: BasePPOExp, logs: ProcessLogs, error: ray.exceptions.RayError) -> NoReturn:
    cause = getattr(error, "cause", None)
    expected = cause if isinstance(cause, UserError | SyntaxError) else None
    if experiment.run_dir is not None:
        experiment.run_dir.save_error(str(error) + ("" if expected else last_words(logs, error)))
    if expected is not None:  # Python shows nothing of Ray's kind of SyntaxError
        raise expected from None
    raise error


def _run(
    controller: ControllerHandle, experiment: BasePPOExp, view: ProgressView, heard: threading.Event
) -> dict[str, float] | None:
    import ray

    from skyasync.run.placement import release

    trainer = experiment.cfg.trainer
    try:
        process = _await_process(controller)
        running = controller.run.remote()
        revived = experiment.restarting is not None and experiment.restarting.possible
        _watch(running, Heartbeat(controller.report, process, trainer.heartbeat_timeout_s if revived else 0.0), view)
        return ray.get(running)
    except ray.exceptions.RayActorError as error:
        if _has_died(error):
            await_end()  # nothing is asked of a Ray that ends: it would answer late, or end this process
        raise
    except KeyboardInterrupt:
        if heard.is_set():  # Ray makes a KeyboardInterrupt of whatever a signal's handler raises
            raise Terminated(_saved_in_time(controller, trainer)) from None
        if trainer.ckpt_on_exit:
            print("stopping: the update under way ends, then a checkpoint is saved (Ctrl-C again ends it at once)")
        raise
    finally:
        try:
            if not heard.is_set() and not ended():
                with contextlib.suppress(Exception):
                    ray.get(controller.stop.remote(), timeout=_patience_s(trainer))
        finally:
            if not ended():
                _end(controller)
                release(experiment.placement_name)


@contextlib.contextmanager
def _hearing_sigterm() -> Iterator[threading.Event]:
    """SIGTERM interrupts what is inside, once, and is noted; Ray, whose handler this replaces, would end at once."""
    heard = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # which alone hears signals
        yield heard
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        if not heard.is_set():
            heard.set()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGTERM, before)


def _saved_in_time(controller: ControllerHandle, trainer: TrainerConfig) -> str:
    """Let the run save, for as long as it may; what came of that, in words."""
    import ray

    try:
        step = ray.get(controller.stop.remote(saving=True), timeout=trainer.sigterm_grace_s)
    except Exception as error:  # whatever it is, the process is to end
        late = isinstance(error, ray.exceptions.GetTimeoutError)
        problem = f"it took more than {trainer.sigterm_grace_s:g} s (trainer.sigterm_grace_s)" if late else repr(error)
        return f": the run was not saved, {problem}"
    return f": the newest checkpoint is of step {step}, go on with trainer.resume_mode=latest" if step else ""


def _patience_s(trainer: TrainerConfig) -> float:
    """How long the controller may take to stop: its parts' shutdown, and what is saved before it."""
    return GRACE_S + 5 + (2 * trainer.step_timeout_s if trainer.ckpt_on_exit or trainer.ckpt_async else 0)


def _await_process(controller: ControllerHandle) -> ProcessIdentity:
    """Ray tries for ever to start a process that cannot start; its reasons are in the terminal by then."""
    import ray

    try:
        return ray.get(controller.who.remote(), timeout=START_S)
    except ray.exceptions.GetTimeoutError:
        _end(controller)
        problem = f"Ray did not start the controller's process within {START_S:g} s; its log above says why"
        raise RuntimeError(problem) from None


def _end(controller: ControllerHandle) -> None:
    import ray

    ray.kill(controller)  # type: ignore[arg-type]  # Ray's own type of it knows no methods


def _watch(running: object, heartbeat: Heartbeat, view: ProgressView) -> None:
    """Poll until the run has ended, or Ray has."""
    import ray

    seen, done = view.seen, False
    while not done:
        if died := ended():
            raise ray.exceptions.RaySystemError(died)
        done = bool(ray.wait([running], timeout=POLL_S)[0])
        if (report := heartbeat.ask(seen)) is not None:
            view.update(report)
            seen = max([seen, *(step for step, _ in report.rows)])

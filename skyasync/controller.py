"""The process that trains, and the terminal that watches it.

Invariant: whatever ends a run (its last step, an error in any part, Ctrl-C), the trackers are flushed, every
part is shut down, and the first error is what the user sees.

| who waits  | for what                          | woken by                                            |
|------------|-----------------------------------|-----------------------------------------------------|
| the driver | the controller's ``run``          | its end or error; polls for progress meanwhile      |
| ``run``    | the trainer's ``train``           | its end or error; ``stop`` cancels it               |
| shutdown   | every part's own shutdown         | each part, or ``GRACE_S``, after which it is killed |
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Protocol

from skyasync.callbacks import TrainerCallback, Watched
from skyasync.cleanup import afterwards
from skyasync.config.schema import Config, TrainerConfig
from skyasync.errors import UserError
from skyasync.observe.progress import ProgressRecorder, ProgressReport, ProgressView
from skyasync.observe.run_dir import RunDirectory
from skyasync.processes.calls import START_S
from skyasync.registry import UserParts, add_user_parts, user_parts
from skyasync.trainer import RayPPOTrainer

POLL_S = 0.5
GRACE_S = 30.0


class Experiment(Protocol):
    """What the controller runs; see ``skyasync.experiment.BasePPOExp``."""

    cfg: Config
    placement_name: str
    run_dir: RunDirectory | None

    def build(self) -> RayPPOTrainer: ...
    async def start(self, trainer: RayPPOTrainer) -> None: ...
    async def close(self) -> None: ...


class _Recording(TrainerCallback):
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

    def __init__(self, experiment: Experiment, parts: UserParts) -> None:
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
                raise RuntimeError("training met something that was cancelled, and ended") from error
            return None
        return dict(self._trainer.last_metrics)

    async def _train(self) -> None:
        async with afterwards(self._close, grace_s=2 * GRACE_S):  # which limits itself
            self._trainer = await asyncio.to_thread(self._experiment.build)
            self._recorder.total = self._trainer.total_steps
            self._trainer.callbacks.append(_Recording(self._recorder))
            self._recorder.phase("loading models")
            await self._experiment.start(self._trainer)
            self._loaded = True
            await self._trainer.train()

    async def _close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self._experiment.close()

    async def report(self, seen: int) -> ProgressReport:
        if self._loaded:
            self._recorder.phase(self._trainer.phase_name)
        return self._recorder.report(seen)

    async def stop(self) -> None:
        """Cancel training and wait until every part is shut down."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


def run_in_controller(experiment: Experiment, *, progress: bool) -> dict[str, float] | None:
    """Train in a Ray actor on this node and show its progress here. Ray is initialised.

    Raises:
        UserError, SyntaxError: as it was raised, without the way it took.
        Exception: any other error, with the original traceback in its text.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from skyasync.cluster.placement import release

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class: Any = ray.remote(Controller).options(num_cpus=0, max_concurrency=16, scheduling_strategy=here)
    controller: Any = actor_class.remote(experiment, user_parts())
    try:
        _await_process(ray, controller)
        running = controller.run.remote()
        with ProgressView(live=progress) as view:
            _watch(ray, controller, running, view)
        return ray.get(running)
    except ray.exceptions.RayTaskError as error:
        if experiment.run_dir is not None:
            experiment.run_dir.save_error(str(error))
        if isinstance(error.cause, UserError | SyntaxError):  # Python shows nothing of Ray's kind of SyntaxError
            raise error.cause from None
        raise
    except KeyboardInterrupt:
        if experiment.cfg.trainer.ckpt_on_exit:
            print("stopping: the update under way ends, then a checkpoint is saved (Ctrl-C again ends it at once)")
        raise
    finally:
        try:
            with contextlib.suppress(Exception):
                ray.get(controller.stop.remote(), timeout=_patience_s(experiment.cfg.trainer))
        finally:
            ray.kill(controller)
            release(experiment.placement_name)


def _patience_s(trainer: TrainerConfig) -> float:
    """How long the controller may take to stop: its parts' shutdown, and what ``ckpt_on_exit`` finishes before it."""
    return GRACE_S + 5 + (2 * trainer.step_timeout_s if trainer.ckpt_on_exit else 0)


def _await_process(ray: Any, controller: Any) -> None:
    """Ray tries for ever to start a process that cannot start; its reasons are in the terminal by then."""
    try:
        ray.get(controller.report.remote(-1), timeout=START_S)
    except ray.exceptions.GetTimeoutError:
        ray.kill(controller)
        problem = f"Ray did not start the controller's process within {START_S:g} s; its log above says why"
        raise RuntimeError(problem) from None


def _watch(ray: Any, controller: Any, running: object, view: ProgressView) -> None:
    """Poll until the run has ended."""
    seen, ended = -1, False
    while not ended:
        ended = bool(ray.wait([running], timeout=POLL_S)[0])
        with contextlib.suppress(ray.exceptions.RayError):
            report = ray.get(controller.report.remote(seen), timeout=10)
            view.update(report)
            seen = max([seen, *(step for step, _ in report.rows)])

"""Extensions and callbacks of a run: when they are called, what they keep, how they end it (in simulation)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

import pytest

from skyasync import EarlyStopping, TrainerCallback
from skyasync.callbacks import RunExtension
from skyasync.errors import UserError
from skyasync.observability.run_dir import FINISHED, RunDirectory, read_status, status_file
from skyasync.simulate.clock import run_virtual
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.extensions import FILE
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer
from skyasync.utils.task_group import together
from tests.trainer.plans.parts import PLANS, make_run

every_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)


class Recorder(TrainerCallback):
    """Half of the methods are async, and take time."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_start(self, trainer: Any) -> None:
        self.events.append(("start", trainer.global_step))

    async def on_step_begin(self, trainer: Any, step: int) -> None:
        await asyncio.sleep(0.5)
        self.events.append(("step_begin", step))

    async def on_rollout(self, trainer: Any, groups: Sequence[Any]) -> None:
        await asyncio.sleep(0.5)
        self.events.append(("rollout", len(groups)))

    async def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        await asyncio.sleep(0.5)
        metrics["my/metric"] = 1.0
        self.events.append(("step_end", trainer.global_step))

    def on_weight_update(self, trainer: Any, version: int) -> None:
        self.events.append(("weight_update", version))

    async def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        await asyncio.sleep(0.5)
        self.events.append(("evaluate", trainer.global_step))

    async def on_checkpoint(self, trainer: Any, folder: Path) -> None:
        await asyncio.sleep(0.5)
        self.events.append(("checkpoint", folder.name))

    async def on_failure(self, trainer: Any, error: BaseException) -> None:
        await asyncio.sleep(0.5)
        self.events.append(("failure", str(error)))

    async def on_end(self, trainer: Any) -> None:
        await asyncio.sleep(0.5)
        self.events.append(("end", trainer.global_step))


@every_plan
def test_all_methods_are_called_and_awaited_in_every_plan(
    plan: type[RayPPOTrainer], tmp_path: Path
) -> None:
    recorder = Recorder()
    run = make_run(plan, callbacks=[recorder], eval_prompts=2, trainer__eval_interval=2, trainer__ckpt_interval=2,
                   trainer__ckpt_path=str(tmp_path)).train()  # fmt: skip
    assert recorder.events[:3] == [("weight_update", 0), ("start", 0), ("step_begin", 1)]
    assert sum(groups for event, groups in recorder.events if event == "rollout") == 12
    others = [
        event for event in recorder.events[3:] if event[0] not in ("rollout", "weight_update")
    ]
    assert others == [
        ("step_end", 1), ("step_begin", 2), ("evaluate", 2), ("step_end", 2), ("checkpoint", "step_000002"),
        ("step_begin", 3), ("evaluate", 3), ("step_end", 3), ("checkpoint", "step_000003"), ("end", 3),
    ]  # fmt: skip
    assert [version for event, version in recorder.events if event == "weight_update"] == [
        0,
        1,
        2,
        3,
    ]
    assert run.tracker.of("my/metric") == {1: 1.0, 2: 1.0, 3: 1.0}


def test_no_step_begins_in_a_resumed_run_that_has_trained_all(tmp_path: Path) -> None:
    settings = {"trainer__ckpt_path": str(tmp_path), "trainer__ckpt_interval": 3}
    make_run(RayPPOTrainer, **settings).train()
    recorder = Recorder()
    make_run(RayPPOTrainer, callbacks=[recorder], trainer__resume_mode="latest", **settings).train()
    assert recorder.events == [("weight_update", 3), ("start", 3), ("end", 3)]


class StopsAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if trainer.global_step == self.step:
            trainer.stop("enough is learned")
            trainer.stop("a second reason")


@every_plan
@pytest.mark.parametrize("in_background", [False, True])
def test_a_stopped_run_ends_well_after_its_step_with_a_checkpoint_and_a_reason(
    plan: type[RayPPOTrainer], in_background: bool, tmp_path: Path
) -> None:
    recorder, run_dir = Recorder(), RunDirectory(tmp_path, "run")
    run = make_run(plan, prompts=24, callbacks=[StopsAfter(2), recorder], run_dir=run_dir, trainer__ckpt_interval=4,
                   trainer__ckpt_async=in_background)  # fmt: skip
    with status_file(run_dir.path):
        run.train()
    assert [step for step, _ in run.tracker.rows] == [1, 2]
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step_000002"]
    assert recorder.events[-1] == ("end", 2)
    assert run.tracker.closed == run.timeline.closed == 1
    status = read_status(run_dir.path)
    assert (status.state, status.reason) == (FINISHED, "step 2: enough is learned")

    more = make_run(plan, prompts=24, run_dir=RunDirectory(tmp_path, "run", resume=True), trainer__ckpt_interval=4,
                    trainer__resume_mode="latest").train()  # fmt: skip
    assert [step for step, _ in more.tracker.rows] == [3, 4, 5, 6]
    trained = [*run.trained, *more.trained]
    assert len(trained) == len(set(trained)) == 24


def test_a_run_that_is_stopped_before_its_first_step_ends_after_it() -> None:
    class StopsAtOnce(TrainerCallback):
        def on_start(self, trainer: Any) -> None:
            trainer.stop("nothing to learn")

    run = make_run(RayPPOTrainer, callbacks=[StopsAtOnce()]).train()
    assert [step for step, _ in run.tracker.rows] == [1]


def test_a_stop_in_the_last_step_changes_nothing() -> None:
    run = make_run(RayPPOTrainer, callbacks=[StopsAfter(3)]).train()
    assert [step for step, _ in run.tracker.rows] == [1, 2, 3]


def test_a_plan_whose_steps_end_in_a_task_of_its_own_is_stopped_too() -> None:
    class InATask(RayPPOTrainer):
        async def train(self) -> None:
            task = asyncio.create_task(self.steps())
            await asyncio.Event().wait()
            await task

        async def steps(self) -> None:
            for prompts in self.remaining_prompts():
                status = await self.train_on(await self.generate(prompts))
                await self.sync_policy_weights_to_inference_engines()
                await self.end_step(status)

    run = make_run(InATask, callbacks=[StopsAfter(2)]).train()
    assert [step for step, _ in run.tracker.rows] == [1, 2]
    assert run.tracker.closed == 1


class Counter(TrainerCallback):
    def __init__(self) -> None:
        self.steps = 0
        self.at_start = -1

    def on_start(self, trainer: Any) -> None:
        self.at_start = self.steps

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.steps += 1

    def state_dict(self) -> Mapping[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


@pytest.mark.parametrize("in_background", [False, True])
def test_checkpoints_keep_the_state_of_callbacks_and_a_resumed_run_gives_it_back(
    in_background: bool, tmp_path: Path
) -> None:
    settings = {
        "trainer__ckpt_path": str(tmp_path),
        "trainer__ckpt_interval": 2,
        "trainer__ckpt_async": in_background,
    }
    first, second = Counter(), Counter()
    run = make_run(RayPPOTrainer, callbacks=[first, second], **settings)
    run.faults["update", 3] = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        run.train()
    assert json.loads((tmp_path / "step_000002" / FILE).read_text()) == {
        "Counter": {"steps": 2},
        "Counter#2": {"steps": 2},
    }
    again = [Counter(), Counter()]
    make_run(RayPPOTrainer, callbacks=again, trainer__resume_mode="latest", **settings).train()
    assert [counter.at_start for counter in again] == [2, 2]
    assert [counter.steps for counter in again] == [3, 3]


def test_a_checkpoint_without_states_is_as_it_was(tmp_path: Path) -> None:
    make_run(RayPPOTrainer, trainer__ckpt_path=str(tmp_path), trainer__ckpt_interval=3).train()
    assert not (tmp_path / "step_000003" / FILE).exists()


def test_a_state_that_a_checkpoint_cannot_keep_is_an_error_of_one_line(tmp_path: Path) -> None:
    class Odd(TrainerCallback):
        def state_dict(self) -> Mapping[str, Any]:
            return {"seen": {1, 2}}

    run = make_run(
        RayPPOTrainer, callbacks=[Odd()], trainer__ckpt_path=str(tmp_path), trainer__ckpt_interval=1
    )
    with pytest.raises(
        UserError,
        match=r"^Odd\.state_dict\(\) returns what a checkpoint cannot keep .*set.*mappings$",
    ):
        run.train()
    assert not (tmp_path / "step_000001").exists()


@every_plan
def test_extensions_see_the_error_that_ends_a_run(plan: type[RayPPOTrainer]) -> None:
    recorder = Recorder()
    run = make_run(plan, callbacks=[recorder])
    run.faults["update", 1] = ZeroDivisionError("in the update")
    with pytest.raises(ZeroDivisionError):
        run.train()
    assert recorder.events[-1] == ("failure", "in the update")


def test_an_error_while_one_is_handled_is_a_note_on_the_first() -> None:
    class Fails(RunExtension):
        def on_failure(self, trainer: Any, error: BaseException) -> None:
            raise KeyError("of the handler")

    run = make_run(RayPPOTrainer, callbacks=[Fails()])
    run.faults["update", 1] = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError) as raised:
        run.train()
    assert "and then, in on_failure: KeyError('of the handler')" in raised.value.__notes__


def test_a_run_that_is_cancelled_has_not_failed() -> None:
    recorder = Recorder()
    run = make_run(RayPPOTrainer, callbacks=[recorder])

    async def cancelled() -> None:
        task = asyncio.create_task(run.trainer.run())
        await asyncio.sleep(4.0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        run_virtual(cancelled())
    assert not {"failure", "end"} & {event[0] for event in recorder.events}


def test_a_method_that_never_returns_ends_the_run_by_name() -> None:
    class Hangs(TrainerCallback):
        async def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
            await asyncio.Event().wait()

    run = make_run(RayPPOTrainer, callbacks=[Hangs()], trainer__step_timeout_s=60.0)
    with pytest.raises(
        TimeoutError, match=r"the Hangs\.on_step_end of step 1 did not end within 60 s"
    ):
        run.train()


def test_a_trainer_has_few_attributes_besides_those_of_a_printed_plan() -> None:
    printed = {"generation_ack", "sync_finished", "_all_generated", "_open_step"}
    for plan in (RayPPOTrainer, FullyAsyncRayPPOTrainer):
        names = vars(make_run(plan).trainer).keys() - {
            "asynchronous"
        }  # which one plan sets by its settings
        assert printed < names and len(names - printed) <= 12, sorted(names)


# ---------------------------------------------------------------- early stopping


class Scores(TrainerCallback):
    def __init__(self, *scores: float) -> None:
        self.scores = scores

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if trainer.global_step <= len(self.scores):
            metrics["my/score"] = self.scores[trainer.global_step - 1]


@pytest.mark.parametrize(
    "scores, options, steps",
    [
        ([1, 2, 2, 1], {"patience": 2}, 4),
        ([1, 2, 1, 3, 2, 1], {"patience": 2}, 6),
        ([3, 2, 1, 1, 1], {"patience": 2, "mode": "min"}, 5),
        ([1.0, 1.05, 1.08, 1.2], {"patience": 2, "min_delta": 0.1}, 3),
        ([1, 2, 3, 4], {"patience": 1}, 6),
        ([nan, 1, 2, 3, 4, 5], {"patience": 2}, 6),
        ([1, nan, nan, 2], {"patience": 2}, 3),
    ],
)
def test_early_stopping_ends_a_run_that_improves_no_more(
    scores: list[float], options: dict[str, Any], steps: int
) -> None:
    stopping = EarlyStopping("my/score", **options)
    run = make_run(RayPPOTrainer, prompts=24, callbacks=[Scores(*scores), stopping]).train()
    assert len(run.tracker.rows) == steps


def test_early_stopping_counts_evaluations_of_an_evaluations_metric() -> None:
    run = make_run(FullyAsyncRayPPOTrainer, prompts=48, eval_prompts=2, trainer__eval_interval=2,
                   callbacks=[EarlyStopping("eval/score", patience=2)]).train()  # fmt: skip
    assert [step for step, _ in run.tracker.rows][-1] == 6, "the first evaluation is the best one"


def test_early_stopping_goes_on_counting_in_a_resumed_run(tmp_path: Path) -> None:
    settings = {"prompts": 24, "trainer__ckpt_path": str(tmp_path), "trainer__ckpt_interval": 1}
    run = make_run(
        RayPPOTrainer, callbacks=[Scores(2, 1, 1, 1), EarlyStopping("my/score", 3)], **settings
    )
    run.faults["update", 3] = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        run.train()
    more = make_run(RayPPOTrainer, callbacks=[Scores(2, 1, 1, 1), EarlyStopping("my/score", 3)],
                    trainer__resume_mode="latest", **settings).train()  # fmt: skip
    assert [step for step, _ in more.tracker.rows] == [3, 4]


def test_early_stopping_on_a_metric_that_there_is_not_names_the_nearest() -> None:
    run = make_run(RayPPOTrainer, callbacks=[EarlyStopping("reward/maen")])
    with pytest.raises(
        UserError, match=r"there is no metric reward/maen: did you mean reward/mean\?"
    ):
        run.train()


def test_early_stopping_on_an_evaluation_that_there_is_not_is_an_error_at_the_start() -> None:
    run = make_run(RayPPOTrainer, callbacks=[EarlyStopping("eval/score")])
    with pytest.raises(
        UserError,
        match=r"^EarlyStopping: eval/score needs held-out prompts: set data\.val_data or ",
    ):
        run.train()
    assert run.trained == []


@pytest.mark.parametrize(
    "arguments, problem",
    [
        ({"mode": "most"}, "mode='most' must be 'max' or 'min'"),
        ({"patience": 0}, "patience=0 must be at least 1"),
    ],
)
def test_early_stopping_refuses_wrong_arguments(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        EarlyStopping("my/score", **arguments)


async def test_a_stop_among_loops_that_run_together_is_raised_as_itself() -> None:
    from skyasync.trainer.plan_tasks import RunStopped

    async def stops() -> None:
        raise RunStopped

    with pytest.raises(RunStopped):
        async with together() as tasks:
            tasks.start(stops())
            tasks.start(asyncio.sleep(1000))

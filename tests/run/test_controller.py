"""The process that trains, without Ray: after any end every part is shut down and the first error is reported."""

import asyncio
import signal
from types import SimpleNamespace

import pytest

from skyasync.config.schema import Config
from skyasync.run import controller
from skyasync.run.controller import Controller
from skyasync.run.experiment import BasePPOExp


class Trainer:
    total_steps = 3
    context = SimpleNamespace(phases=SimpleNamespace(name="training"))
    reporter, checkpointer = SimpleNamespace(last_sample=None), SimpleNamespace(saved_step=0)

    def __init__(self, error=None, seconds=0.0):
        self.error, self.seconds, self.callbacks, self.last_metrics = (
            error,
            seconds,
            [],
            {"reward/mean": 1.0},
        )
        self.started = asyncio.Event()

    async def run(self):
        self.started.set()
        await asyncio.sleep(self.seconds)
        if self.error:
            raise self.error


class Experiment:
    """``errors`` are raised by the methods they name."""

    restarting = None

    def __init__(self, trainer=None, **errors):
        self.trainer, self.errors, self.closed = trainer or Trainer(), errors, 0

    def _pass_or_raise(self, method):
        if method in self.errors:
            raise self.errors[method]

    def build(self):
        self._pass_or_raise("build")
        return self.trainer

    async def start(self, trainer):
        self._pass_or_raise("start")

    async def close(self):
        self.closed += 1
        self._pass_or_raise("close")


async def test_a_run_that_ends_gives_its_last_metrics_and_closes_its_parts():
    experiment = Experiment()
    assert await Controller(experiment, {}).run() == {"reward/mean": 1.0}
    assert experiment.closed == 1


@pytest.mark.parametrize("method", ["build", "start"])
async def test_an_error_while_parts_are_made_is_raised_as_it_is_and_what_was_made_is_closed(method):
    error = ValueError("no memory")
    experiment = Experiment(**{method: error})
    with pytest.raises(ValueError, match="no memory") as caught:
        await Controller(experiment, {}).run()
    assert caught.value is error
    assert experiment.closed == 1


async def test_an_error_while_closing_does_not_hide_why_training_failed():
    error = ValueError("training")
    with pytest.raises(ValueError, match="training") as caught:
        await Controller(Experiment(Trainer(error), close=OSError("closing")), {}).run()
    assert caught.value is error
    assert "closing" in "".join(error.__notes__)


async def test_stopping_cancels_training_waits_for_the_parts_and_is_no_error():
    experiment = Experiment(Trainer(seconds=1000.0))
    running = Controller(experiment, {})
    task = asyncio.create_task(running.run())
    await experiment.trainer.started.wait()
    await running.stop()
    assert experiment.closed == 1
    assert await task is None


async def test_stopping_before_anything_runs_or_after_the_end_is_no_error():
    experiment = Experiment()
    running = Controller(experiment, {})
    await running.stop()
    assert not experiment.trainer.started.is_set()
    assert await running.run() == {"reward/mean": 1.0}
    await running.stop()
    assert experiment.closed == 1


async def test_an_unrequested_cancellation_is_an_error_and_not_a_stop():
    with pytest.raises(
        RuntimeError, match="ended with CancelledError although the run was not stopped"
    ):
        await Controller(Experiment(Trainer(asyncio.CancelledError())), {}).run()


async def test_parts_that_do_not_shut_down_are_waited_for_with_a_limit(monkeypatch):
    monkeypatch.setattr(controller, "GRACE_S", 0.05)

    class Hangs(Experiment):
        async def close(self):
            await asyncio.sleep(1000)

    assert await Controller(Hangs(), {}).run() == {"reward/mean": 1.0}


async def test_progress_can_be_asked_for_at_any_time():
    trainer = Trainer(seconds=1000.0)
    running = Controller(Experiment(trainer), {})
    assert (await running.report(-1)).phase == "starting"
    task = asyncio.create_task(running.run())
    await trainer.started.wait()
    report = await running.report(-1)
    assert (report.phase, report.total) == ("training", 3)
    await running.stop()
    await task


class Tracker:
    closed = 0

    def close(self):
        self.closed += 1


class OwnTracker(BasePPOExp):
    """Fails while it is built, after the tracker."""

    def get_tokenizer(self):
        return None

    def get_train_dataset(self):
        return []

    def get_tracker(self):
        self.mine = Tracker()
        return self.mine

    def get_colocate_pg(self, timeout=180):
        return None

    get_inference_client = get_dispatch = lambda self: None

    def get_generator(self, cfg, tokenizer, inference_engine_client):
        raise ConnectionError("no environments")


async def test_a_tracker_is_closed_also_if_no_trainer_comes_to_run():
    experiment = OwnTracker(Config())
    with pytest.raises(ConnectionError, match="no environments"):
        await Controller(experiment, {}).run()
    assert experiment.mine.closed == 1


def test_sigterm_interrupts_once_and_is_told_from_ctrl_c():
    before = signal.getsignal(signal.SIGTERM)
    with controller._hearing_sigterm() as heard:
        assert not heard.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert heard.is_set()
        signal.raise_signal(signal.SIGTERM)  # while the run saves
    assert signal.getsignal(signal.SIGTERM) is before


async def test_a_resumed_run_is_reported_at_the_step_where_it_was():
    trainer = Trainer(seconds=60)
    trainer.global_step = 10
    part = Controller(Experiment(trainer), {})
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(part.run())
        await trainer.started.wait()
        (recording,) = trainer.callbacks
        recording.on_start(trainer)
        assert (await part.report(-1)).step == 10
        await part.stop()

"""A sync is proven by log-probabilities, or it is an error."""

import asyncio
import math

import pytest

from skyasync.weight_sync.sync import WeightSync, WeightSyncError
from skyasync.weight_sync.update import WeightUpdate
from tests.virtual_time import virtual_time


class Trainer:
    def __init__(self, scores=((-1.0, -2.0),), seconds=0.0, fault=None, publishes_in=0.0):
        self.scores, self.released, self.publishes_in = [list(s) for s in scores], [], publishes_in
        self.seconds, self.fault = seconds, fault

    async def publish_weights(self, version):
        await asyncio.sleep(self.publishes_in)
        return WeightUpdate(version, "memory", {"path": "p"})

    async def send_weights(self, update):
        await asyncio.sleep(self.seconds)
        if self.fault:
            raise self.fault

    async def release_weights(self, update):
        self.released.append(update.version)

    async def score(self, sequences):
        return self.scores


class Engines:
    def __init__(self, *scores, seconds=0.0, fault=None):
        self.scores, self.updates = [[list(s) for s in e] for e in scores], []
        self.seconds, self.fault = seconds, fault

    async def update_weights(self, update):
        self.updates.append(update)
        await asyncio.sleep(self.seconds)
        if self.fault:
            raise self.fault

    async def score(self, sequences):
        return self.scores


def sync(trainer, engines, probe=((1, 2, 3),)):
    return WeightSync(trainer, engines, probe, tolerance=1e-3)


async def sync_and_verify(version, trainer, engines, **options):
    both = sync(trainer, engines, **options)
    await both.sync(version)
    return await both.verify(version)


@virtual_time
async def test_the_weights_are_published_fetched_and_released_and_the_gap_is_reported():
    trainer, engines = Trainer(), Engines([(-1.0, -2.0)], [(-1.0005, -2.0)])
    found = await sync_and_verify(7, trainer, engines)
    assert found == {"sync/logprob_gap": pytest.approx(5e-4)}
    assert [u.version for u in engines.updates] == trainer.released == [7]


@pytest.mark.parametrize(
    ("second", "gap"),
    [
        ([(-1.0, -2.002)], "0.002"),
        ([(-1.0, math.nan)], "nan"),
        ([(-1.0, -math.inf)], "inf"),
        ([(-1.0,)], "nan"),
        ([], "nan"),
        ([(-1.0, -2.0), (0.0,)], "nan"),
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_an_engine_that_computes_something_else_is_an_error_that_names_it_wherever_it_stands(second, gap, order):
    @virtual_time
    async def run():
        both = [[(-1.0, -2.0005)], second][::order]
        trainer = Trainer()
        with pytest.raises(WeightSyncError, match=rf"version 3 engine {max(order, 0)} .* by {gap} .*is 0.001 \(gener"):
            await sync_and_verify(3, trainer, Engines(*both))
        assert trainer.released == [3]

    run()


@virtual_time
async def test_a_nan_behind_a_number_within_one_engine_is_found():
    with pytest.raises(WeightSyncError, match="nan"):
        await sync_and_verify(1, Trainer([(-1.0, -2.0, -3.0)]), Engines([(-1.0, math.nan, -3.0)]))


@virtual_time
async def test_a_trainer_whose_own_probabilities_are_nan_is_an_error_too():
    with pytest.raises(WeightSyncError, match="nan"):
        await sync_and_verify(1, Trainer([(math.nan,)]), Engines([(math.nan,)]))


@virtual_time
async def test_without_a_probe_nothing_is_compared():
    assert await sync_and_verify(1, Trainer(), Engines([(9.0,)]), probe=()) == {}


@virtual_time
async def test_weights_are_released_after_a_failure_and_cancellation():
    trainer = Trainer()
    with pytest.raises(ConnectionError):
        await sync(trainer, Engines(fault=ConnectionError("engine died"))).sync(1)
    task = asyncio.create_task(sync(trainer, Engines(seconds=1000.0)).sync(2))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert trainer.released == [1, 2]


@virtual_time
async def test_weights_whose_publication_is_cancelled_are_released_once_they_are_there():
    trainer = Trainer(publishes_in=5.0)
    task = asyncio.create_task(sync(trainer, Engines()).sync(3))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert trainer.released == [3]


@virtual_time
async def test_a_publication_that_never_ends_does_not_keep_a_cancellation_back():
    task = asyncio.create_task(sync(Trainer(publishes_in=1e9), Engines()).sync(3))
    await asyncio.sleep(1)
    task.cancel()
    before = asyncio.get_running_loop().time()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.get_running_loop().time() - before < 30


@pytest.mark.parametrize("part", ["sender", "engines"])
def test_if_sender_and_engines_wait_for_each_other_the_first_failure_of_either_is_raised_at_once(part):
    """As inside NCCL, where neither knows of the other's end."""

    @virtual_time
    async def run():
        error = ConnectionError(part)
        stuck = {"seconds": 1800.0}
        trainer = Trainer(**(stuck if part == "engines" else {"fault": error}))
        engines = Engines(**(stuck if part == "sender" else {"fault": error}))
        with pytest.raises(ConnectionError) as caught:
            await sync(trainer, engines).sync(1)
        assert caught.value is error
        assert asyncio.get_running_loop().time() == 0
        assert trainer.released == [1]

    run()


@virtual_time
async def test_a_failure_to_release_does_not_hide_why_the_update_failed():
    class Forgetful(Trainer):
        async def release_weights(self, update):
            raise OSError("no such file")

    error = ConnectionError("engine died")
    with pytest.raises(ConnectionError) as caught:
        await sync(Forgetful(), Engines(fault=error)).sync(1)
    assert caught.value is error
    assert any("no such file" in note for note in error.__notes__)
    with pytest.raises(OSError, match="no such file"):
        await sync(Forgetful(), Engines([(-1.0, -2.0)])).sync(1)

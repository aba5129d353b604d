"""A sync is verified by log-probabilities, or it raises an error."""

import asyncio
import math
from contextlib import asynccontextmanager

import pytest

from skyasync.weight_sync.sync import WeightSync
from skyasync.weight_sync.transfers.base import WeightTransfer
from skyasync.weight_sync.update import WeightSyncError, WeightUpdate
from skyasync.weight_sync.verify.log_probabilities import BFLOAT16, FLOAT32, Rounding
from tests.virtual_time import virtual_time


class Trainer(WeightTransfer):
    def __init__(
        self, scores=((-1.0, -2.0),), seconds=0.0, fault=None, publishes_in=0.0, backend="memory"
    ):
        self.scores, self.released, self.publishes_in = [list(s) for s in scores], [], publishes_in
        self.seconds, self.fault, self.backend, self.probed = seconds, fault, backend, 0
        self.proves_content = backend == "shared_memory"

    @property
    def transfer(self):
        return self

    async def publish(self, version):
        await asyncio.sleep(self.publishes_in)
        return WeightUpdate(version, self.backend, {"path": "p"})

    async def send(self, update):
        await asyncio.sleep(self.seconds)
        if self.fault:
            raise self.fault

    async def release(self, update):
        self.released.append(update.version)

    async def for_late_engine(self, version):
        raise NotImplementedError

    async def score(self, sequences):
        self.probed += 1
        return self.scores


class Engines:
    proves_weights = True

    def __init__(self, *scores, seconds=0.0, fault=None, unproven=None):
        self.scores, self.updates, self.unproven = (
            [[list(s) for s in e] for e in scores],
            [],
            unproven,
        )
        self.seconds, self.fault = seconds, fault

    async def update_weights(self, update):
        self.updates.append(update)
        await asyncio.sleep(self.seconds)
        if self.fault:
            raise self.fault
        return self.unproven

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
    assert found == {
        "sync/logprob_gap": pytest.approx(5e-4),
        "sync/logprob_gap_mean": pytest.approx(2.5e-4),
        "sync/logprob_gap_limit": 1e-3,
    }
    assert [u.version for u in engines.updates] == trainer.released == [7]


@virtual_time
async def test_engines_go_on_while_the_weights_are_published_and_are_paused_while_they_take_them():
    trainer, engines, seen = (
        Trainer(publishes_in=5.0, seconds=0.5),
        Engines([(-1.0, -2.0)], seconds=2.0),
        [],
    )
    clock = asyncio.get_running_loop().time

    @asynccontextmanager
    async def paused():
        seen.append(clock())
        yield
        seen.append(clock())

    both, started = sync(trainer, engines), clock()
    await both.sync(1, paused)
    assert [at - started for at in seen] == [5.0, 7.0]
    engines.fault = RuntimeError("no")
    with pytest.raises(RuntimeError, match="no"):
        await both.sync(2, paused)
    assert trainer.released == [1, 2]


@pytest.mark.parametrize(
    ("second", "gap"),
    [
        ([(-1.0, -2.004)], "0.002"),
        ([(-1.0, math.nan)], "inf"),
        ([(-1.0, -math.inf)], "inf"),
        ([(-1.0,)], "inf"),
        ([], "inf"),
        ([(-1.0, -2.0), (0.0,)], "inf"),
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_an_engine_that_computes_something_else_is_an_error_that_names_it_wherever_it_stands(
    second, gap, order
):
    @virtual_time
    async def run():
        both = [[(-1.0, -2.0005)], second][::order]
        trainer = Trainer()
        with pytest.raises(
            WeightSyncError,
            match=rf"version 3 engine {max(order, 0)} .* by {gap} .*by 0.00025, .*is 0.001 \(gener",
        ):
            await sync_and_verify(3, trainer, Engines(*both))
        assert trainer.released == [3]

    run()


@virtual_time
async def test_a_nan_after_a_number_within_one_engine_is_found():
    with pytest.raises(WeightSyncError, match="inf"):
        await sync_and_verify(1, Trainer([(-1.0, -2.0, -3.0)]), Engines([(-1.0, math.nan, -3.0)]))


@virtual_time
async def test_a_trainer_whose_own_probabilities_are_nan_is_an_error_too():
    with pytest.raises(WeightSyncError, match="inf"):
        await sync_and_verify(1, Trainer([(math.nan,)]), Engines([(math.nan,)]))


def shifted(scores, by):
    return [[value + by for value in row] for row in scores]


@virtual_time
async def test_the_limit_follows_from_the_gap_at_start_up_and_both_are_said():
    trainer, engines = Trainer(), Engines([(-1.0, -2.0001)])
    both = WeightSync(
        trainer, engines, [[1, 2, 3]], rounding=Rounding(lowest_limit=1e-6, highest_limit=1.0)
    )
    await both.measure_floor()
    engines.scores = [[[-1.0, -2.0003]]]
    await both.sync(1)
    assert (await both.verify(1))["sync/logprob_gap_limit"] == pytest.approx(2e-4)
    engines.scores = [[[-1.0, -2.0005]]]
    with pytest.raises(
        WeightSyncError,
        match=r"by 0\.00025 in .*largest 0\.0005.*start-up they differed by 5e-05.*is 0\.0002",
    ):
        await both.verify(1)


@virtual_time
async def test_one_token_with_a_large_difference_does_not_end_the_run():
    row = [-1.0] * 200
    trainer, engines = Trainer([row]), Engines(shifted([row], 1e-5))
    both = WeightSync(
        trainer, engines, [[0] * 201], rounding=Rounding(lowest_limit=1e-6, highest_limit=1.0)
    )
    await both.measure_floor()
    engines.scores[0][0][7] += 3e-3  # 300 times the noise floor
    await both.verify(1)


@virtual_time
async def test_a_noise_floor_of_zero_allows_for_rounding():
    trainer, engines = Trainer(), Engines([(-1.0, -2.0)])
    both = WeightSync(trainer, engines, [[1, 2, 3]])
    await both.measure_floor()
    engines.scores = [shifted(engines.scores[0], 1e-5)]
    await both.verify(1)


def adapted(engines, backend="shared_memory"):
    trainer, rounding = Trainer(backend=backend), Rounding(lowest_limit=1e-6, highest_limit=1e-3)
    return WeightSync(trainer, engines, [[1, 2, 3]], rounding=rounding, adapted=True)


@virtual_time
async def test_the_rounding_of_added_adapters_is_measured_after_the_first_sync_and_holds_from_then_on():
    engines = Engines([(-1.0, -2.0)], [(-1.0, -2.0)])
    both = adapted(engines)
    await both.measure_floor()
    engines.scores = [shifted(each, 4e-5) for each in engines.scores]
    await both.sync(1)
    assert (await both.verify(1))["sync/logprob_gap_limit"] == pytest.approx(1.6e-4)
    engines.scores = [shifted(each, 1e-4) for each in engines.scores]
    await both.sync(2)
    assert (await both.verify(2))["sync/logprob_gap_limit"] == pytest.approx(1.6e-4), "once"
    engines.scores = [shifted(each, 4e-5) for each in engines.scores]
    with pytest.raises(WeightSyncError, match=r"allowed is 0\.00016"):
        await both.verify(2)


@pytest.mark.parametrize(("backend", "by"), [("nccl", 4e-5), ("shared_memory", 1.1e-3)])
def test_what_nothing_proves_and_what_no_rounding_can_be_is_no_floor(backend, by):
    @virtual_time
    async def run():
        engines = Engines([(-1.0, -2.0)])
        both = adapted(engines, backend)
        await both.measure_floor()
        engines.scores = [shifted(engines.scores[0], by)]
        await both.sync(1)
        with pytest.raises(WeightSyncError, match="after the weight sync to version 1"):
            await both.verify(1)

    run()


@virtual_time
async def test_an_engine_that_computes_another_model_from_the_same_file_is_an_error_at_start_up():
    for rounding, gap in ((FLOAT32, 0.01), (BFLOAT16, 1.0)):
        both = WeightSync(
            Trainer(), Engines([(-1.0 - gap, -2.0 - gap)]), [[1, 2, 3]], rounding=rounding
        )
        with pytest.raises(WeightSyncError, match="with the weights of one file engine 0"):
            await both.measure_floor()


@virtual_time
async def test_of_two_engines_the_one_that_is_off_at_start_up_is_named():
    engines = Engines([(-1.0, -2.0)], [(-1.0, -2.0004)])
    with pytest.raises(WeightSyncError, match="engine 1"):
        await WeightSync(Trainer(), engines, [[1, 2, 3]]).measure_floor()


@pytest.mark.parametrize(
    ("backend", "unproven", "probed"),
    [
        ("shared_memory", None, [1, 2, 4, 8]),
        ("shared_memory", [], [1, 2, 4, 8]),
        ("shared_memory", ["experts"], list(range(1, 10))),
        ("nccl", None, list(range(1, 10))),
        ("cuda_ipc", None, list(range(1, 10))),
    ],
)
def test_where_digests_prove_a_sync_the_probe_follows_the_first_two_and_every_nth(
    backend, unproven, probed
):
    @virtual_time
    async def run():
        trainer = Trainer(backend=backend)
        both = WeightSync(
            trainer, Engines([(-1.0, -2.0)], unproven=unproven), [[1, 2, 3]], interval=4
        )
        found = []
        for version in range(1, 10):
            await both.sync(version)
            if await both.verify(version):
                found.append(version)
        assert found == probed
        assert trainer.probed == len(probed)

    run()


def sampling_sync(interval=4, engines=1):
    found = [[(-1.0, -2.0)]] * engines
    return WeightSync(
        Trainer(backend="shared_memory"),
        Engines(*found),
        [[1, 2, 3]],
        tolerance=1e-3,
        interval=interval,
    )


async def steps(both, gaps):
    """A sync per step, then the difference of its tokens; by version, whether the verification prompts ran."""
    probed = []
    for version, gap in enumerate(gaps, start=both._syncs + 1):
        await both.sync(version)
        if await both.verify(version):
            probed.append(version)
        if gap is not None:
            both.sampled(version, gap)
    return probed


@virtual_time
async def test_tokens_of_the_former_version_replace_scheduled_verification_prompts():
    assert await steps(sampling_sync(), [1e-4] * 9) == [1, 2]
    assert await steps(sampling_sync(), [1e-4, 1e-4, None, 1e-4, 1e-4, 1e-4, 1e-4]) == [1, 2, 4], (
        "none of version 3"
    )
    assert await steps(sampling_sync(), [None] * 9) == [1, 2, 4, 8]
    assert await steps(sampling_sync(interval=1), [1e-4] * 5) == [1, 2, 3, 4, 5], "as requested"
    assert await steps(sampling_sync(engines=4), [1e-4, 1e-4, 3e-4, 1e-4]) == [1, 2, 4], (
        "one of four may be off"
    )


@virtual_time
async def test_tokens_that_are_further_off_than_the_limit_end_the_run_and_both_numbers_are_said():
    both = sampling_sync()
    await steps(both, [1e-4, 1e-4, 1e-4])
    with pytest.raises(
        WeightSyncError, match=r"version 4 .*by 0\.002 in log-probability.*allowed is 0\.001 "
    ):
        await steps(both, [2e-3])


@virtual_time
async def test_sampled_tokens_differ_more_by_rounding_than_prompts_and_have_a_floor_of_their_own():
    """Differences of SmolLM2 in bfloat16."""
    engines = Engines([(-1.0116, -2.0116)])
    both = WeightSync(
        Trainer(backend="shared_memory"), engines, [[1, 2, 3]], rounding=BFLOAT16, interval=100
    )
    await both.measure_floor()
    await steps(both, [0.0436, 0.0389, 0.0469])
    with pytest.raises(
        WeightSyncError, match=r"by 0\.2 in .*differed by 0\.0436, and allowed is 0\.174 "
    ):
        await steps(both, [0.2])


@virtual_time
async def test_tokens_that_are_off_where_the_probe_has_just_found_nothing_are_not_comparable_and_prove_nothing():
    both = sampling_sync()
    assert await steps(both, [2e-3, 1e-4, 2e-3, 1e-4, 2e-3]) == [1, 2, 4]
    both.sampled(3, 2.0)  # of an unknown version: not compared


@virtual_time
async def test_tokens_prove_nothing_where_no_gap_was_measured():
    both = WeightSync(Trainer(), Engines(), [], tolerance=1e-3)
    await both.sync(1)
    both.sampled(1, 9.0)


@virtual_time
async def test_without_a_probe_nothing_is_compared():
    assert await sync_and_verify(1, Trainer(), Engines([(9.0,)]), probe=()) == {}


@virtual_time
async def test_weights_are_released_after_a_failure_and_cancellation():
    trainer = Trainer()
    with pytest.raises(ConnectionError):
        await sync(trainer, Engines(fault=ConnectionError("engine failed"))).sync(1)
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
def test_if_sender_and_engines_wait_for_each_other_the_first_failure_of_either_is_raised_at_once(
    part,
):
    """As in NCCL, where neither side notices the other's failure."""

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
        async def release(self, update):
            raise OSError("no such file")

    error = ConnectionError("engine failed")
    with pytest.raises(ConnectionError) as caught:
        await sync(Forgetful(), Engines(fault=error)).sync(1)
    assert caught.value is error
    assert any("no such file" in note for note in error.__notes__)
    with pytest.raises(OSError, match="no such file"):
        await sync(Forgetful(), Engines([(-1.0, -2.0)])).sync(1)


class Keeper(Trainer):
    """Keeps published weights instead of releasing them."""

    async def release(self, update):
        assert self.expects_late_engines

    async def for_late_engine(self, version):
        return WeightUpdate(version, self.backend, {"path": f"kept {version}"})


def keeping(trainer, engines, **options):
    both = WeightSync(trainer, engines, [[1, 2, 3]], tolerance=1e-3, **options)
    both.expects_late_engines = True
    return both


@virtual_time
async def test_a_late_joining_engine_gets_the_last_synced_weights_and_never_during_a_sync():
    trainer, engines = Keeper(), Engines([(-1.0, -2.0)], seconds=5.0)
    both = keeping(trainer, engines)
    with pytest.raises(WeightSyncError, match="there are no weights for it yet"):
        async with both.between_syncs():
            pass
    await both.sync(1)
    syncing = asyncio.create_task(both.sync(2))
    await asyncio.sleep(1)
    async with both.between_syncs() as update:
        assert syncing.done()
        assert (update.version, update.info) == (2, {"path": "kept 2"})
    assert trainer.released == []


@virtual_time
async def test_while_workers_restart_a_late_joining_engine_waits_for_their_first_sync():
    failed, trainer, engines = (
        Keeper(backend="shared_memory"),
        Keeper(backend="shared_memory"),
        Engines([(-1.0, -2.0)]),
    )
    both = keeping(failed, engines, interval=100)
    for version in (1, 2, 3):
        await both.sync(version)
    both.restart(trainer)

    async def arrive():
        async with both.between_syncs() as update:
            return update.info["path"]

    late = asyncio.create_task(arrive())
    await asyncio.sleep(10)
    assert not late.done(), "weights of the failed workers are gone"
    await both.sync(2)
    assert await late == "kept 2"
    assert await both.verify(2), "the engines are checked although no check is due"


@pytest.mark.parametrize("part", ["publish", "release"])
@virtual_time
async def test_a_late_joining_engine_waits_for_new_workers_after_a_sync_failed_with_the_former_ones(
    part,
):
    async def fails(*_):
        raise ConnectionError("the rank has failed")

    dying, trainer, engines = (
        Keeper(backend="shared_memory"),
        Keeper(backend="shared_memory"),
        Engines([(-1.0, -2.0)]),
    )
    both = keeping(dying, engines)
    await both.sync(1)
    setattr(dying, part, fails)
    with pytest.raises(ConnectionError):
        await both.sync(2)

    async def arrive():
        async with both.between_syncs() as update:
            return update.info["path"]

    late = asyncio.create_task(arrive())
    await asyncio.sleep(10)
    assert not late.done(), (
        "between the failed sync and the workers' restart there are no weights to send"
    )
    both.restart(trainer)
    await both.sync(2)
    assert await late == "kept 2"


@virtual_time
async def test_a_late_joining_engine_is_checked_by_the_next_verification():
    trainer, engines = Keeper(backend="shared_memory"), Engines([(-1.0, -2.0)])
    both = keeping(trainer, engines, interval=100)
    for version in (1, 2, 3):
        await both.sync(version)
        assert bool(await both.verify(version)) == (version < 3)
    async with both.between_syncs():
        pass
    await both.sync(4)
    assert await both.verify(4)
    await both.sync(5)
    assert not await both.verify(5)


@virtual_time
async def test_without_a_running_engine_nothing_is_compared_until_one_is_back():
    trainer, engines = Keeper(backend="shared_memory"), Engines()
    both = keeping(trainer, engines, interval=100)
    for version in (1, 2, 3):
        await both.sync(version)
        assert not await both.verify(version)
    engines.scores = [[[-1.0, -2.0]]]
    await both.sync(4)
    assert await both.verify(4)

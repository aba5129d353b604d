"""Utilization of engines and trainer, from their own counters."""

import pytest

from skyasync.inference.interface import EngineStats
from skyasync.observability.usage import UsageMeter
from tests.virtual_time import virtual_time


class Counters:
    """Client and dispatch in one: counters of engines and trainer since their start."""

    def __init__(self, *engines, trainer=0.0):
        self.engines, self.trainer = engines, trainer


class Client:
    def __init__(self, counters):
        self.counters = counters

    async def stats(self):
        return [
            EngineStats(busy_s=found[0], generated_tokens=found[1])
            if found
            else EngineStats(gone=True)
            for found in self.counters.engines
        ]


class Dispatch:
    def __init__(self, counters):
        self.counters = counters

    async def stats(self):
        return {"busy_s": self.counters.trainer}


class Clock:
    def __init__(self):
        self.between_steps_s = self.seconds = 0.0

    def now(self):
        return self.seconds


async def lap(before, after, interval_s=10.0, between_steps_s=0.0, samples=20):
    counters, clock = Counters(*before.engines, trainer=before.trainer), Clock()
    meter = UsageMeter(Client(counters), Dispatch(counters), clock)
    await meter.start()
    counters.engines, counters.trainer = after.engines, after.trainer
    clock.seconds, clock.between_steps_s = interval_s, between_steps_s
    return await meter.lap(samples)


@virtual_time
async def test_a_lap_counts_what_happened_since_the_last_reading():
    found = await lap(Counters((5.0, 100), trainer=3.0), Counters((9.0, 400), trainer=5.0))
    assert found == {
        "time/step_s": 10.0,
        "time/interval_s": 10.0,
        "idle/engines": pytest.approx(0.6),
        "idle/trainer": pytest.approx(0.8),
        "throughput/tokens_per_s": 30.0,
        "throughput/samples_per_s": 2.0,
    }


@virtual_time
async def test_engines_are_averaged_and_their_tokens_added():
    found = await lap(Counters((0.0, 0), (0.0, 0)), Counters((10.0, 50), (0.0, 70)))
    assert found["idle/engines"] == pytest.approx(0.5)
    assert found["throughput/tokens_per_s"] == 12.0


@virtual_time
async def test_shares_stay_between_0_and_1_whatever_clocks_say():
    more = await lap(Counters((0.0, 0)), Counters((11.0, 0), trainer=12.0))
    less = await lap(Counters((5.0, 0), trainer=5.0), Counters((0.0, 0), trainer=0.0))
    for found in (more, less):
        assert all(0.0 <= found[name] <= 1.0 for name in ("idle/engines", "idle/trainer"))
    assert all(value >= 0 for value in less.values())


@virtual_time
async def test_a_step_of_no_time_divides_by_nothing():
    found = await lap(Counters((0.0, 0)), Counters((0.0, 0)), interval_s=0.0)
    assert found["idle/engines"] == found["idle/trainer"] == 1.0


@virtual_time
async def test_laps_follow_each_other():
    counters, clock = Counters((0.0, 0)), Clock()
    meter = UsageMeter(Client(counters), Dispatch(counters), clock)
    await meter.start()
    counters.engines, clock.seconds = ((4.0, 10),), 10.0
    await meter.lap(1)
    counters.engines, clock.seconds = ((5.0, 30),), 20.0
    assert (await meter.lap(1))["throughput/tokens_per_s"] == 2.0


@virtual_time
async def test_a_step_leaves_out_an_evaluation_while_rates_are_of_all_the_time_in_which_the_counters_counted():
    after = Counters((4.0, 300), trainer=1.0)
    found = await lap(Counters((0.0, 0)), after, interval_s=10.0, between_steps_s=6.0)
    assert (found["time/step_s"], found["time/interval_s"]) == (4.0, 10.0)
    assert found["throughput/tokens_per_s"] == 30.0
    assert found["idle/engines"] == pytest.approx(0.6)
    assert found["idle/trainer"] == pytest.approx(0.9)


@virtual_time
async def test_a_slow_answer_belongs_to_the_step_that_it_ends():
    counters, clock = Counters((0.0, 0)), Clock()

    class SlowClient(Client):
        async def stats(self):
            clock.seconds += 3.0
            return await super().stats()

    meter = UsageMeter(SlowClient(counters), Dispatch(counters), clock)
    await meter.start()
    for _ in range(3):
        clock.seconds += 2.0
        assert (await meter.lap(1))["time/step_s"] == 5.0


@virtual_time
async def test_a_restarted_engine_counts_from_zero_and_a_failed_one_not_at_all():
    found = await lap(Counters((50.0, 5000), (50.0, 5000)), Counters((3.0, 200), (0.0, 0)))
    assert found["throughput/tokens_per_s"] == 20.0
    assert found["idle/engines"] == pytest.approx(0.85)


@virtual_time
async def test_engines_that_have_come_count_and_those_that_are_gone_do_not():
    found = await lap(Counters((0.0, 0), (0.0, 0)), Counters((10.0, 50), (0.0, 70), (5.0, 30)))
    assert found["idle/engines"] == pytest.approx(0.5)
    assert found["throughput/engine_2_tokens_per_s"] == 3.0
    found = await lap(Counters((0.0, 0), (0.0, 0), (0.0, 0)), Counters((10.0, 50), None, (5.0, 30)))
    assert found["idle/engines"] == pytest.approx(0.25)
    assert found["throughput/tokens_per_s"] == 8.0
    assert (
        "throughput/engine_1_tokens_per_s" not in found
        and "throughput/engine_2_tokens_per_s" in found
    )

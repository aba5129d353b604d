"""Simulated time advances without waiting, keeps order, and names the waiting tasks in a deadlock."""

from __future__ import annotations

import asyncio
import time

import pytest

from skyasync.simulate.clock import Deadlock, run_virtual


def test_a_year_passes_at_once_and_in_order() -> None:
    async def sleepers() -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, asyncio.get_running_loop().time()))

        await asyncio.gather(
            sleeper("year", 3.15e7), sleeper("second", 1.0), sleeper("minute", 60.0)
        )
        return seen

    started = time.monotonic()
    assert run_virtual(sleepers()) == [("second", 1.0), ("minute", 60.0), ("year", 3.15e7)]
    assert time.monotonic() - started < 10


def test_a_deadlock_says_who_waits_and_where() -> None:
    async def trainer(samples: asyncio.Queue[int]) -> None:
        await samples.get()

    async def rollouts(swapped: asyncio.Event) -> None:
        await swapped.wait()

    async def plan() -> None:
        await asyncio.sleep(5)
        await asyncio.gather(trainer(asyncio.Queue()), rollouts(asyncio.Event()))

    with pytest.raises(Deadlock, match="at 5 s nothing can happen") as deadlock:
        run_virtual(plan())
    message = str(deadlock.value)
    assert "trainer" in message and "Queue.get" in message
    assert "rollouts" in message and "Event.wait" in message


def test_timeouts_pass_in_virtual_time() -> None:
    async def impatient() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(impatient()) == 600.0

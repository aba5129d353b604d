import asyncio
import time

import pytest

from tests.virtual_time import Deadlock, run_virtual, virtual_time


@virtual_time
async def test_an_hour_passes_at_once_and_timers_keep_their_order():
    woken = []

    async def sleeper(seconds):
        await asyncio.sleep(seconds)
        woken.append(seconds)

    start = time.monotonic()
    await asyncio.gather(*(sleeper(s) for s in (3600, 0.5, 60)))
    assert woken == [0.5, 60, 3600]
    assert asyncio.get_running_loop().time() == pytest.approx(3600)
    assert time.monotonic() - start < 5


@virtual_time
async def test_timeouts_expire_on_the_virtual_clock():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10):
            await asyncio.sleep(11)
    assert asyncio.get_running_loop().time() == pytest.approx(10)


def test_a_deadlock_names_the_tasks_that_wait():
    async def waits_for_nobody():
        await asyncio.Event().wait()

    async def main():
        await asyncio.gather(waits_for_nobody(), asyncio.sleep(5))

    with pytest.raises(Deadlock, match=r"at 5 s .*waits_for_nobody"):
        run_virtual(main())

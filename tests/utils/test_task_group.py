"""Groups of coroutines that end together."""

import asyncio
import threading
import traceback
from concurrent.futures import Future

import pytest

from skyasync.utils.task_group import not_halfway, run_in_own_loop, run_together, within
from tests.virtual_time import virtual_time


class Broken(Exception):
    pass


async def breaks(after, error):
    await asyncio.sleep(after)
    raise error


async def waits(ended, seconds=3600.0):
    try:
        await asyncio.sleep(seconds)
        ended.append("finished")
    except asyncio.CancelledError:
        ended.append("cancelled")
        raise


@virtual_time
async def test_it_ends_when_all_have_ended():
    ended = []
    await run_together(waits(ended, 1), waits(ended, 2))
    assert ended == ["finished"] * 2


@pytest.mark.parametrize(
    "error", [Broken("x"), KeyError("k"), TimeoutError(), ExceptionGroup("own", [Broken()])]
)
def test_the_first_error_is_raised_as_it_was_and_the_others_are_cancelled(error):
    @virtual_time
    async def run():
        ended = []
        with pytest.raises(type(error)) as caught:
            await run_together(waits(ended), breaks(1, error))
        assert caught.value is error
        assert "breaks" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        assert ended == ["cancelled"]
        assert asyncio.get_running_loop().time() == pytest.approx(1)

    run()


@virtual_time
async def test_what_takes_too_long_is_named_with_its_key():
    with pytest.raises(
        TimeoutError, match=r"^loading did not end within 3 s \(trainer\.step_timeout_s\)$"
    ):
        async with within(3, "loading"):
            await waits([])
    with pytest.raises(TimeoutError, match=r"^of its own$"):  # an error from inside keeps its type
        async with within(3, "loading"):
            raise TimeoutError("of its own")


@virtual_time
async def test_the_error_keeps_its_own_cause_and_context():
    async def explicit():
        try:
            raise KeyError("the reason")
        except KeyError as reason:
            raise Broken from reason

    async def implicit():
        try:
            raise KeyError("the reason")
        except KeyError:
            raise Broken  # noqa: B904  (the implicit context is what is tested)

    with pytest.raises(Broken) as caught:
        await run_together(explicit())
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(Broken) as caught:
        await run_together(implicit())
    assert "the reason" in "".join(traceback.format_exception(caught.value))
    assert "ExceptionGroup" not in "".join(traceback.format_exception(caught.value))


@virtual_time
async def test_an_error_during_the_clean_up_is_noted_on_the_first():
    async def fails_to_clean_up():
        try:
            await asyncio.sleep(3600)
        finally:
            raise Broken("while cleaning up")

    first = Broken("first")
    with pytest.raises(Broken) as caught:
        await run_together(fails_to_clean_up(), breaks(1, first))
    assert caught.value is first
    assert "while cleaning up" in "".join(caught.value.__notes__)


@virtual_time
async def test_cancellation_from_outside_cancels_all_and_stays_a_cancellation():
    ended = []
    task = asyncio.create_task(run_together(waits(ended), waits(ended)))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cancelled"] * 2


@virtual_time
async def test_a_cancellation_from_within_is_an_error_and_no_endless_wait():
    """A coroutine may be cancelled by something that it awaits, although its own task is not cancelled."""

    async def awaits_something_cancelled():
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    ended = []
    with pytest.raises(
        RuntimeError,
        match=r"awaits_something_cancelled ended with CancelledError although the run was not stopped",
    ):
        await run_together(waits(ended), awaits_something_cancelled())
    assert ended == ["cancelled"]


@virtual_time
async def test_what_many_met_alike_is_told_once():
    """Requests of one engine share its error; other errors are added as notes, each once."""
    shared = Broken("the engine failed")
    with pytest.raises(Broken) as caught:
        await run_together(
            *(breaks(1, shared) for _ in range(9)), *(breaks(1, KeyError("k")) for _ in range(9))
        )
    assert caught.value is shared
    assert caught.value.__notes__ == ["at the same time: KeyError('k')"]


@virtual_time
async def test_what_must_not_stop_in_the_middle_is_waited_for_when_its_caller_is_cancelled():
    ended = []

    async def update():
        await asyncio.sleep(3)
        ended.append("update")

    task = asyncio.create_task(not_halfway(update()))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["update"]


async def test_ctrl_c_before_the_other_threads_task_starts_ends_it(monkeypatch):
    """``asyncio.run`` in a thread is delayed until Ctrl-C has come."""
    came, began, real = threading.Event(), False, asyncio.run

    async def forever():
        nonlocal began
        began = True
        await asyncio.sleep(3600)

    def late(coroutine):
        came.wait()
        return real(coroutine)

    class Interrupted(Future):
        def result(self, timeout=None):
            threading.Timer(0.05, came.set).start()
            raise KeyboardInterrupt

    monkeypatch.setattr(asyncio, "run", late)
    monkeypatch.setattr("concurrent.futures.thread._base.Future", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_in_own_loop(forever())
    assert not began

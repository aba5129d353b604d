"""Ranks that fail together: which error counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from skyasync.workers import ranks
from skyasync.workers.ranks import RankGroup, WorkerPlacement
from skyasync.workers.roles import POLICY, ROLES


class Actor:
    """Its calls are answered by the test; when it is killed, all others fail as Ray's do."""

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[Any]] = []
        self.call = self

    def remote(self, method: str, *_: object) -> asyncio.Future[Any]:
        self.calls.append(asyncio.get_running_loop().create_future())
        return self.calls[-1]

    def end(self) -> None:
        for call in self.calls:
            if not call.done():
                call.set_exception(RayActorError())


async def test_an_error_of_the_work_is_no_lost_process_though_another_call_was_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A checkpoint is written while a rank raises: the run must end with that error, and not start again."""
    actors = [Actor(), Actor()]
    monkeypatch.setattr(ray, "kill", Actor.end)
    monkeypatch.setattr(ranks, "FAILURE_NOTICE_S", 0.0)
    monkeypatch.setattr(RankGroup, "__init__", lambda self, *_: None)
    group = RankGroup(ROLES[POLICY], WorkerPlacement(None))  # type: ignore[arg-type]
    vars(group).update(
        _actors=actors,
        _failure=None,
        _calls_in_progress=0,
        _finished_s=0.0,
        _silence_s=0.0,
        _processes=[],
        _role=ROLES[POLICY],
    )
    update, saved = (
        asyncio.create_task(group.call(method)) for method in ("forward_backward", "saved")
    )
    await asyncio.sleep(0)
    actors[0].calls[0].set_exception(ValueError("of a loss"))
    with pytest.raises(ValueError, match="of a loss"):
        await update
    with pytest.raises(RayActorError):
        await saved
    assert group.lost is None

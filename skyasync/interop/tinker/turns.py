"""Who computes with the policy: one model at a time, also across the loss of a rank.

Invariant: inside ``run`` the policy has the model's adapters as they are after its last finished request, whatever has
failed before: new ranks load the model's last state, and repeat what has been done since.

| who waits      | for what                        | woken by                                          |
|----------------|---------------------------------|---------------------------------------------------|
| ``run``        | the work of other models        | its end; each takes its turn in order             |
| ``watch``      | ranks that are lost             | nothing: it looks every ``WATCH_S``               |
| ``run``        | new ranks, if one was lost      | ``replace``; the limits of the ranks' own start   |
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from skyasync.interop.tinker.worker import BASE
from skyasync.workers.dispatch import Dispatch
from skyasync.workers.roles import POLICY

T = TypeVar("T")
Replace = Callable[[str, BaseException], Awaitable[Dispatch]]
WATCH_S = 1.0


async def _nothing(dispatch: Dispatch) -> None: ...


class PolicyTurns:
    """Args: replace: starts ranks for those of a role that are lost; raises if it may not.

    Attributes:
        restore: brings a model into new ranks; set before the first ``run``.
        ended: has the error after which the policy cannot be used any more.
    """

    restore: Callable[[str, Dispatch], Awaitable[None]]

    def __init__(self, dispatch: Dispatch, replace: Replace) -> None:
        self.dispatch, self._replace = dispatch, replace
        self._turn, self._resident = asyncio.Lock(), set[str]()
        self._active = BASE  # the model that is in the policy, if it is known
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, model: str, work: Callable[[Dispatch], Awaitable[T]]) -> T:
        """The result of ``work`` with the model's adapters; it begins again if a rank is lost.

        Args:
            model: ``BASE`` is work that chooses the adapters by itself.
        """
        async with self._turn:
            while True:
                if (lost := self.dispatch.lost) is None:
                    try:
                        await self._activate(model)
                        return await work(self.dispatch)
                    except Exception:
                        if (lost := self.dispatch.lost) is None:
                            raise
                try:
                    self.dispatch = await self._replace(*lost)
                except Exception as error:
                    self.end(error)
                    raise
                self._resident.clear()
                self._active = BASE

    async def watch(self) -> None:
        """Replace ranks that were lost while no model needed them: an engine that starts gets its weights from them."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self.dispatch.lost is not None and not self._turn.locked():
                await self.run(BASE, _nothing)

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """A task that serves for ever has ended."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.end(error)

    def end(self, error: BaseException) -> None:
        """The server cannot go on."""
        if not self.ended.done():
            self.ended.set_exception(error)

    async def _activate(self, model: str) -> None:
        if model != BASE and model == self._active:
            return
        self._active = BASE
        if model in self._resident:
            async with self.dispatch.transfer.changing():
                await self.dispatch.call(POLICY, "activate", model)
        elif model != BASE:
            await self.restore(model, self.dispatch)
            self._resident.add(model)
        self._active = model

"""Calls that take time, for code that makes them without ``await``.

Invariant: they run on an event loop in a thread of their own, one at a time for each caller, and the caller, which may
be an event loop's thread, waits for the result or the error.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Loop:
    """Starts its thread when it is first needed."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def wait_for(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call, whatever thread asks."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="steps of a loop", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

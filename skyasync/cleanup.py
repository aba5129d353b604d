"""Cleaning up without hiding why.

Invariant: of an error and another one met while cleaning up after it, the first is raised.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def afterwards(call: Callable[..., Awaitable[Any]], *args: Any) -> AsyncIterator[None]:
    """Await ``call(*args)`` at the end, whatever happened inside.

    ``try`` and ``finally`` would raise the error of ``call`` in the place of the one from inside; here it becomes a
    note on that.
    """
    try:
        yield
    except BaseException as error:
        try:
            await call(*args)
        except Exception as another:
            error.add_note(f"and then, while cleaning up: {another!r}")
        raise
    await call(*args)

"""Cleaning up without hiding why.

Invariant: of an error and another one met while cleaning up after it, the first is raised, and soon: a part that is
stuck after an error does not keep it back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

GRACE_S = 10.0


@asynccontextmanager
async def afterwards(
    call: Callable[..., Awaitable[Any]], *args: object, grace_s: float = GRACE_S
) -> AsyncIterator[None]:
    """Await ``call(*args)`` at the end, whatever happened inside.

    ``try`` and ``finally`` would raise the error of ``call`` in the place of the one from inside; here it becomes a
    note on that.

    Args:
        grace_s: how long the call may take after an error. If all went well its own limits hold.
    """
    try:
        yield
    except BaseException as error:
        try:
            async with asyncio.timeout(grace_s):
                await call(*args)
        except Exception as another:
            error.add_note(f"and then, while cleaning up: {another!r}")
        raise
    await call(*args)

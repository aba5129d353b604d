"""Coroutines that live and die together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run until all have ended; the first error cancels the others and is raised as it was.

    An exception group would hide the error a user is looking for, so the group is opened: the first error
    is raised with its own traceback, and further ones are noted on it.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            for coroutine in coroutines:
                tasks.create_task(coroutine)
    except BaseExceptionGroup as group:
        first, *others = group.exceptions
        for other in others:
            first.add_note(f"at the same time: {other!r}")
        raise first from first.__cause__

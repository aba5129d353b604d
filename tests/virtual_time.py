"""Tests on the simulator's clock: hours pass in milliseconds, the same way every time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any

from skyasync.simulate.clock import run_virtual


def virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in simulated time; a deadlock in it is an error."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_virtual(test(*args, **kwargs))

    return run

"""Judges behind an address: they are there and answer, before any process starts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from skyasync.config.judges import judges_of
from skyasync.config.schema import Config
from skyasync.rewards.llm_judge import ChatServer, key_of


def check_judges(cfg: Config) -> dict[str, str]:
    """The keys of the judges' servers, by the judges' names; each server has answered one short question.

    Raises:
        UserError: for the first judge whose key is missing, or whose server cannot be reached or refuses.
    """
    judges = {name: judge for name, judge in judges_of(cfg.environment.judges).items() if judge.base_url}
    keys = {name: key_of(name, judge) for name, judge in judges.items()}

    async def probe() -> None:
        await asyncio.gather(*(ChatServer(name, judge, keys[name]).probe() for name, judge in judges.items()))

    if judges:
        _run(probe())
    return keys


def _run(probe: Coroutine[Any, Any, None]) -> None:
    """To its end, also where an event loop runs (a notebook)."""
    problems: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(probe)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=run, name="judges")
    thread.start()
    thread.join()
    if problems:
        raise problems[0]

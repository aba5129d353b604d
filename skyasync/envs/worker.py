"""One process of environments: calls come in messages, answers leave as they finish.

Invariant: every call is answered exactly once within about ``step_timeout_s`` of its beginning, whatever its
environment does (short of holding Python's interpreter lock, which the caller notices). Environments whose methods are
``async def`` share an event loop in a thread of its own, all others run in ``StepThreads``; the loop on which
messages come and go runs no code of theirs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from skyasync.envs.episodes import Answer, Call, Episodes, drive, overdue
from skyasync.envs.mailbox import Mailbox
from skyasync.envs.registry import EnvFactory
from skyasync.envs.step_threads import StepThreads

HEARTBEAT_S = 5.0  # an exchange without answers ends after this, which shows that the process is alive
GRACE_S = 1.0  # for an async call to end after it has been cancelled


class WorkerSettings(NamedTuple):
    """``max_threads`` is the most at once; see ``environment.*`` for the others."""

    env_config: dict[str, Any]
    step_timeout_s: float = 60.0
    max_threads: int = 512
    max_observation_chars: int = 200_000

    @staticmethod
    def of(cfg: Any, env_config: dict[str, Any]) -> WorkerSettings:
        """Those of a run; ``env_config`` is what its environments are told."""
        environment = cfg.environment
        return WorkerSettings(
            env_config,
            environment.step_timeout_s,
            environment.max_threads,
            environment.max_observation_chars,
        )


class EnvWorker:
    """Lives in a process of its own; ``define`` and ``exchange`` are called from one event loop."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._episodes = Episodes(settings.env_config, settings.max_observation_chars)
        self._threads: StepThreads[Call, Answer] = StepThreads(
            self._drive, self._answer, most=settings.max_threads, limit_s=settings.step_timeout_s
        )
        self._mailbox: Mailbox | None = None
        self._env_loop: asyncio.AbstractEventLoop | None = None
        self._timers: dict[int, asyncio.TimerHandle] = {}  # of async calls
        self._swallowed = 0  # async calls that did not end when they were cancelled

    async def define(self, name: str, factory: EnvFactory) -> None:
        await asyncio.to_thread(self._episodes.define, name, factory)  # it may take long, and hold up nobody

    async def exchange(self, calls: Sequence[Call]) -> tuple[list[Answer], int]:
        """Begin these calls; returns answers to them or to earlier ones, and how many calls hang.

        Waits until there are answers, a later exchange takes over, or ``HEARTBEAT_S`` have passed.
        """
        mailbox = self._mailbox = self._mailbox or Mailbox()
        if calls:
            mailbox.expect(calls)
            waiting = [call for call in calls if self._episodes.is_async(call)]
            if waiting:
                self._begin_async(waiting)
                others = {call.number for call in waiting}
                calls = [call for call in calls if call.number not in others]
            self._threads.submit(calls)
        answers = await mailbox.collect(HEARTBEAT_S)
        return answers, self._threads.hung + self._swallowed

    async def exchange_tuples(self, calls: Sequence[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], int]:
        """``exchange`` in plain tuples, which take a third of the time to travel."""
        answers, hung = await self.exchange([Call(*call) for call in calls])
        return [tuple(answer) for answer in answers], hung

    def close(self) -> None:
        self._threads.close()
        if self._env_loop is not None:
            asyncio.run_coroutine_threadsafe(self._end_env_loop(), self._env_loop)

    def _drive(self, call: Call) -> Answer:
        return drive(call, self._episodes.run(call))

    def _answer(self, call: Call, answer: Answer | None) -> None:
        assert self._mailbox is not None
        if answer is None:
            self._episodes.give_up(call.episode)
            answer = Answer(call.number, None, overdue(call, self._settings.step_timeout_s))
        self._mailbox.put(answer)

    # ---------------------------------------------------------------- environments that await

    def _begin_async(self, calls: list[Call]) -> None:
        if self._env_loop is None:
            self._env_loop = asyncio.new_event_loop()
            threading.Thread(target=self._env_loop.run_forever, name="async environments", daemon=True).start()
        for call in calls:
            self._begin_one(call, asyncio.get_running_loop(), self._env_loop)

    def _begin_one(self, call: Call, loop: asyncio.AbstractEventLoop, env_loop: asyncio.AbstractEventLoop) -> None:
        limit_s = self._settings.step_timeout_s + GRACE_S
        self._timers[call.number] = loop.call_later(limit_s, self._swallow, call)
        future = asyncio.run_coroutine_threadsafe(self._run_async(call), env_loop)
        future.add_done_callback(lambda ended: loop.call_soon_threadsafe(self._end_async, call, ended))

    async def _run_async(self, call: Call) -> Answer:
        try:
            async with asyncio.timeout(self._settings.step_timeout_s):
                return await self._episodes.run(call)
        except TimeoutError:
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await self._episodes.run(call._replace(method="close", args=()))
            return Answer(call.number, None, overdue(call, self._settings.step_timeout_s))
        except asyncio.CancelledError:
            return Answer(call.number, None, RuntimeError(f"the environment of {call.episode} cancelled itself"))

    @staticmethod
    async def _end_env_loop() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=GRACE_S)
        asyncio.get_running_loop().stop()

    def _end_async(self, call: Call, ended: Any) -> None:
        timer = self._timers.pop(call.number, None)
        if timer is None:
            self._swallowed -= 1  # it has been answered for
            return
        timer.cancel()
        assert self._mailbox is not None
        self._mailbox.put(ended.result())

    def _swallow(self, call: Call) -> None:
        """The call goes on though it was cancelled, or blocks its event loop."""
        self._timers.pop(call.number)
        self._swallowed += 1
        self._answer(call, None)

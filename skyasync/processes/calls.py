"""What is asked of a process, and what it answers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple, Protocol

from skyasync.errors import TransientError, UserError

START_S = 120.0  # for a new process, and for what it imports before its first call
GRACE_S = 1.0  # for a coroutine to end after it has been cancelled


class Call(NamedTuple):
    """A ``method`` of what ``key`` names (an episode); ``number`` is the caller's."""

    number: int
    method: str
    key: str
    args: tuple[Any, ...]

    @property
    def name(self) -> str:
        """Of what it is about, for people."""
        return name_of(self.key)


_keys = count()


def key_of(name: str) -> str:
    """A new one: an episode may begin anew while calls of the one before, of the same name, are on their way."""
    return f"{name}#{next(_keys)}"


def name_of(key: str) -> str:
    return key.rpartition("#")[0] or key


class Answer(NamedTuple):
    """To the call with this number: a result, or the error in its place."""

    number: int
    result: Any
    error: Exception | None = None


class Service(Protocol):
    """What a host carries out. Calls of one key never overlap, but for "close", which ends what it names."""

    @property
    def load(self) -> Callable[..., None]:
        """Get ready for a kind of call; called once for each, in a thread, without a limit of the host's."""

    def is_async(self, call: Call) -> bool:
        """Whether the call awaits: it then runs on an event loop, else in a thread."""

    async def run(self, call: Call) -> Answer:
        """Carry out one call; raises nothing but ``CancelledError``."""

    def overdue(self, call: Call) -> Exception:
        """What the caller is told of a call that has run for longer than it may."""

    def give_up(self, key: str) -> None:
        """Forget what hangs; nobody waits for it any more."""


class Worker(Protocol):
    """A process, wherever it lives."""

    async def load(self, *args: object) -> Exception | None:
        """Have its service load something; the error that this raised there. Raises if the process is gone."""

    async def exchange(self, calls: Sequence[Call]) -> tuple[list[Answer], int]:
        """Begin these calls; answers to them or to earlier ones, and how many calls hang there."""

    def end(self) -> None:
        """Have it end, if it still hears; what it is asked then is not answered."""

    def kill(self) -> None: ...


def portable(error: BaseException, loads: Callable[[bytes], object] = pickle.loads) -> Exception:
    """The error itself if it survives the way to another process, which has ``loads``; else one that says the same."""
    try:
        if isinstance(loads(pickle.dumps(error)), Exception):
            return error  # type: ignore[return-value]
    except Exception:
        pass
    kind = next((kind for kind in (TransientError, UserError) if isinstance(error, kind)), RuntimeError)
    stand_in = kind(f"{type(error).__qualname__}: {error}")
    for note in getattr(error, "__notes__", ()):
        stand_in.add_note(note)
    return stand_in

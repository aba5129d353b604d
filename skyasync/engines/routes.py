"""Which engine gets the next request.

Pure: no asyncio, no I/O. Invariant: nothing is sent to an engine that is dead; a session stays where it began for as
long as that engine lives.
"""

from __future__ import annotations

REMEMBERED_SESSIONS = 65_536  # those used last; a conversation between two turns has no request in flight


class Routes:
    """Attributes: in_flight: by engine, the requests sent there and not ended. dead: engines that get none."""

    def __init__(self, engines: int) -> None:
        self.in_flight = [0] * engines
        self.dead: set[int] = set()
        self.sessions: dict[str, int] = {}  # session -> engine, the one used last at the end

    @property
    def living(self) -> list[int]:
        return [index for index in range(len(self.in_flight)) if index not in self.dead]

    def choose(self, session_id: str | None) -> int | None:
        """The engine with the fewest requests in flight, or the session's; counted there. None if none lives."""
        living = self.living
        if not living:
            return None
        index = min(living, key=self.in_flight.__getitem__)
        if session_id is not None:
            before = self.sessions.pop(session_id, index)
            index = index if before in self.dead else before
            self.sessions[session_id] = index
            if len(self.sessions) > REMEMBERED_SESSIONS:
                self.sessions.pop(next(iter(self.sessions)))
        self.in_flight[index] += 1
        return index

    def ended(self, index: int) -> None:
        """A request that was sent there is no longer in flight."""
        self.in_flight[index] -= 1

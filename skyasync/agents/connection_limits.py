"""Limits of connections to the library's HTTP servers, before a key is checked.

Invariant: a connection without a complete request ends: its head must come within ``HEAD_S`` of its
beginning (``IDLE_S`` of the previous answer), its body within ``BODY_S``. There are never so many
connections that the process has no descriptors left for the run. A body is never inflated, and the
body of a rejected request is not stored. On the loopback a request must name the machine by its
address or as localhost; a page in a browser names its own server, also if that name leads to the
loopback. No request may come from the page of another origin. If the limit is reached, the
connection that has waited longest without a valid key is closed for a new one: episodes are not
shut out. A flood of connections is accepted bit by bit, and what is no HTTP leaves no line in the
logs.

| who waits           | for what              | woken by                                 |
|---------------------|-----------------------|------------------------------------------|
| an idle connection  | a request's head      | the request; ``HEAD_S``, ``IDLE_S``      |
| ``read_json``       | a request's body      | the body; ``BODY_S``                     |
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Handler

from skyasync.agents.api import Body, RequestError, from_json
from skyasync.inference.origin_check import foreign_origin, is_loopback

HEAD_S = 20.0  # clients send it at once
IDLE_S = 600.0  # clients keep connections; those of agents are open for as long as a tool runs
BODY_S = 60.0  # the largest body over a slow line
#: A client whose request is rejected may send for so long, so that it reads the error; what it
#: sends is discarded.
LINGER_S = 1.0
GRACE_S = 5.0  # for connections that are open when the server closes
ACCEPTED_AT_ONCE = 32  # connections between two turns of the event loop: some milliseconds
RESERVED_DESCRIPTORS = 512  # for everything else in this process
log = logging.getLogger(__name__)


def _is_of_the_server(record: logging.LogRecord) -> bool:
    """False for what aiohttp logs about bytes that are no HTTP: anyone may send them."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


log.addFilter(_is_of_the_server)
#: Of aiohttp's runner. No body is decompressed; if a client hangs up, its handler is cancelled.
RUNNER_OPTIONS: dict[str, Any] = {
    "access_log": None,
    "auto_decompress": False,
    "handler_cancellation": True,
    "lingering_time": LINGER_S,
    "logger": log,
    "shutdown_timeout": GRACE_S,
}


class ConnectionLimits:
    """Listens for an application's server, with as many connections as descriptors allow."""

    def __init__(self) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._capacity = max(256, descriptors - RESERVED_DESCRIPTORS)  # connections
        self._open: dict[asyncio.BaseTransport, _Connection] = {}
        # Without a valid key and without a request in progress, oldest first; a set in that order.
        self._without_key: dict[_Connection, None] = {}
        self._server: asyncio.Server | None = None
        self.loopback = False

    async def open(self, runner: web.AppRunner, host: str, port: int, *, backlog: int) -> int:
        """Listen at an address; returns the port."""
        make: Any = runner.server  # of a runner that is set up
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self, make()), host or None, port, backlog=ACCEPTED_AT_ONCE
        )
        # asyncio accepts as many connections at once as may wait. More may wait than that: the
        # kernel's backlog is set again, by another object for the same socket.
        for listening in self._server.sockets:
            with socket.socket(fileno=os.dup(listening.fileno())) as duplicate:
                duplicate.listen(backlog)
        address, bound_port = self._server.sockets[0].getsockname()[:2]
        self.loopback = is_loopback(address)
        return int(bound_port)

    async def close(self) -> None:
        """Accept no more connections; open ones are the runner's. Safe to call twice.

        Accepted connections are opened before asyncio's server is closed, which would forget them
        without hanging up.
        """
        if self._server is not None:
            for listening in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            await asyncio.sleep(0)
            self._server.close()

    def admit(self, connection: _Connection, transport: asyncio.BaseTransport) -> bool:
        """Whether a new connection may stay; the oldest one without a key is closed for it."""
        if len(self._open) >= self._capacity:
            if not self._without_key:
                return False
            oldest = next(iter(self._without_key))
            oldest.hang_up()
        self._open[transport] = connection
        self._without_key[connection] = None
        return True

    def forget(self, transport: asyncio.BaseTransport) -> None:
        """Count a connection no more. Safe to call twice."""
        connection = self._open.pop(transport, None)
        if connection is not None:
            self._without_key.pop(connection, None)

    def has_key(self, request: web.Request) -> None:
        """The request has a valid key: its connection keeps its place."""
        connection = self._connection(request)
        if connection is not None:
            connection.has_key = True

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """An answer may take as long as it likes.

        Raises:
            RequestError: for a request that a browser sends for the page of another origin.
        """
        connection = self._connection(request)
        if connection is not None:
            connection.limit(None)
            self._without_key.pop(connection, None)
        try:
            host = request.headers.get("Host", "")
            origin = request.headers.get("Origin")
            problem = foreign_origin(host, origin, loopback=self.loopback)
            if problem:
                raise RequestError(problem, code="forbidden", status=403)
            return await handler(request)
        finally:
            if connection is not None:
                connection.limit(IDLE_S)
                # The connection may have been closed during the request.
                if not connection.has_key and request.transport in self._open:
                    self._without_key[connection] = None

    def _connection(self, request: web.Request) -> _Connection | None:
        if request.transport:
            return self._open.get(request.transport)
        return None


@dataclass(eq=False)
class _Connection(asyncio.Protocol):
    """Passes everything on to aiohttp's protocol, and hangs up when its time is over."""

    _limits: ConnectionLimits
    _inner: Any
    _transport: asyncio.Transport | None = None
    _timer: asyncio.TimerHandle | None = None
    has_key: bool = False

    def limit(self, seconds: float | None) -> None:
        """Hang up after that time; None: not at all."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None and seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.hang_up)

    def hang_up(self) -> None:
        if self._transport is not None:
            # Now: ``connection_lost`` comes in a later turn of the event loop.
            self._limits.forget(self._transport)
            self._transport.abort()

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401  (narrower than the base's)
        if not self._limits.admit(self, transport):
            transport.abort()
            return
        self._transport = transport
        self.limit(HEAD_S)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is None:  # it was not admitted: aiohttp has never seen it
            return
        self.limit(None)
        self._limits.forget(self._transport)
        self._transport = None
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._transport is not None:
            self._inner.data_received(data)

    def eof_received(self) -> Any:  # noqa: ANN401  (as the base's)
        if self._transport is not None:
            return self._inner.eof_received()
        return None

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


async def read_bytes(request: web.Request) -> bytes:
    """The body of a request.

    Raises:
        RequestError: if it is compressed or too long, before it is read; if it does not come in
            time.
    """
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise RequestError(
            f"Content-Encoding {encoding!r:.100} is not read here: send the body as it is",
            status=415,
        )
    limit = request.client_max_size
    if (request.content_length or 0) > limit:
        raise RequestError(
            f"the body has {request.content_length} bytes; it may have {limit}", status=413
        )
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise RequestError(
            f"the request's body did not come within {BODY_S:g} s", status=408
        ) from None


async def read_json(request: web.Request) -> Body:
    """The body of a request.

    Raises:
        RequestError: as ``read_bytes``; if it is not a JSON object.
    """
    try:
        body = from_json(await read_bytes(request))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request's body is not JSON: {error!s:.500}") from error
    if not isinstance(body, dict):
        raise RequestError("the request's body must be a JSON object")
    return body

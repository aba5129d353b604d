"""Who may ask a vLLM server that ``skyasync serve`` has started: an ASGI middleware in front of all routes.

Invariant: where the server was started with a key no route but ``/health`` is reached without it, those that take
weights included, which vLLM's own key does not guard; pages of others are refused with or without one.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from skyasync.engines.strangers import is_loopback, stranger
from skyasync.engines.vllm.server_check import KEY_VARIABLE

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Any, Send], Awaitable[None]]


class Door:
    """See ASGI for the arguments."""

    def __init__(self, app: App) -> None:
        self._app, self._key = app, os.environ.get(KEY_VARIABLE, "")

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:  # noqa: ANN401  (ASGI's)
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        problem, status = self._problem(scope, headers)
        if not problem:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            told = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": status, "headers": told})
            await send({"type": "http.response.body", "body": problem.encode()})

    def _problem(self, scope: Scope, headers: dict[bytes, str]) -> tuple[str, int]:
        try:
            loopback = is_loopback((scope.get("server") or ("",))[0])
        except ValueError:  # a socket of another kind
            loopback = False
        if problem := stranger(headers.get(b"host", ""), headers.get(b"origin"), loopback=loopback):
            return problem, 403
        said = headers.get(b"authorization", "")
        open_to_all = not self._key or scope["path"] == "/health"
        if open_to_all or hmac.compare_digest(said.encode(), f"Bearer {self._key}".encode()):
            return "", 200
        return f"this server wants the key of {KEY_VARIABLE}", 401

"""Requests that a browser sends to one of our servers for another site's page, and keys.

A page can send requests to every server that its browser can reach, on the loopback too: its site is in ``Origin``. If
the site's own name is made to lead to the loopback, ``Host`` has that name.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

KEY_VARIABLE = "SKYASYNC_ENGINES_KEY"  # the key that server and run share, if the server wants one

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Any, Send], Awaitable[None]]


def foreign_origin(host: str, origin: str | None, *, loopback: bool) -> str:
    """Why a request with these headers is rejected; empty if it is not.

    Args:
        loopback: the request arrived there, where the server has no other name.
    """
    if loopback and not names_the_loopback(host):
        return f"the Host header is {host!r:.100}: this server is asked at 127.0.0.1 or localhost"
    if origin is not None:
        try:
            address = urlsplit(origin).netloc
        except ValueError:  # half an IPv6 address
            address = None
        if address != host:
            return f"the Origin header is {origin!r:.100}: pages of others may not ask this server"
    return ""


def names_the_loopback(host: str) -> bool:
    """Whether a Host header has an address of the loopback, or localhost."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or is_loopback(name)
    except ValueError:
        return False


def is_loopback(address: str) -> bool:
    """Raises ``ValueError`` for what is no address."""
    found = ipaddress.ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


class AccessMiddleware:
    """ASGI, in front of all routes of a vLLM server that ``skyasync serve`` has started.

    Invariant: pages of other sites are rejected. With a key in ``KEY_VARIABLE`` no route but ``/health`` is reached
    without it, also not those that take weights, which vLLM's own key does not guard.
    """

    def __init__(self, app: App) -> None:
        self._app, self._key = app, os.environ.get(KEY_VARIABLE, "")

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:  # noqa: ANN401  (ASGI's)
        problem, status = self._problem(scope) if scope["type"] in ("http", "websocket") else ("", 200)
        if not problem:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": problem.encode()})

    def _problem(self, scope: Scope) -> tuple[str, int]:
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            loopback = is_loopback((scope.get("server") or ("",))[0])
        except ValueError:  # a socket of another kind
            loopback = False
        if problem := foreign_origin(headers.get(b"host", ""), headers.get(b"origin"), loopback=loopback):
            return problem, 403
        given = headers.get(b"authorization", "")
        open_to_all = not self._key or scope["path"] == "/health"
        if open_to_all or hmac.compare_digest(given.encode(), f"Bearer {self._key}".encode()):
            return "", 200
        return f"this server wants the key of {KEY_VARIABLE}", 401

"""Checks of requests to our servers: those that a browser sends for another site's page, and keys.

A page can send requests to every server that its browser can reach, on the loopback too: its site
is in ``Origin``. If the site's own name resolves to the loopback, ``Host`` has that name.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

KEY_VARIABLE = "SKYASYNC_ENGINES_KEY"  # the key that server and run share, if the server needs one

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


def is_loopback(text: str) -> bool:
    """Whether an address is of this machine alone. Raises ``ValueError`` for other text."""
    address = ipaddress.ip_address(text)
    # ``::ffff:127.0.0.1`` reaches the loopback; Python before 3.13 does not count it as one.
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


class AccessMiddleware:
    """ASGI, in front of all routes of a vLLM server that ``skyasync serve`` has started.

    Invariant: pages of other sites are rejected. With a key in ``KEY_VARIABLE`` no route but
    ``/health`` is reached without it, also not those that take weights, which vLLM's own key does
    not guard.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._key = os.environ.get(KEY_VARIABLE, "")

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:  # noqa: ANN401  (ASGI's)
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, str] = {}
        for name, value in scope["headers"]:
            headers[name.lower()] = value.decode("latin-1")
        address = scope.get("server") or ("",)
        try:
            loopback = is_loopback(address[0])
        except ValueError:  # a socket of another kind
            loopback = False
        status = 403
        host = headers.get(b"host", "")
        problem = foreign_origin(host, headers.get(b"origin"), loopback=loopback)
        if not problem and self._key and scope["path"] != "/health":
            authorization = headers.get(b"authorization", "")
            expected = f"Bearer {self._key}"
            # In constant time: the time of ``==`` would tell how much of a key is right.
            if not hmac.compare_digest(authorization.encode(), expected.encode()):
                status = 401
                problem = f"this server wants the key of {KEY_VARIABLE}"
        if not problem:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            plain = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": status, "headers": plain})
            await send({"type": "http.response.body", "body": problem.encode()})

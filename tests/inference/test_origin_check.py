"""Requests of browser pages, and requests without the key, to a server that accepts weights; a server without a key."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from skyasync.inference.origin_check import (
    KEY_VARIABLE,
    AccessMiddleware,
    foreign_origin,
    names_the_loopback,
)

KEY = "k" * 20


def test_what_names_the_loopback() -> None:
    assert all(
        map(
            names_the_loopback,
            ("127.0.0.1", "127.0.0.1:80", "[::1]:80", "localhost", "127.9.9.9:1"),
        )
    )
    others = (
        "",
        "evil.example",
        "10.0.0.1",
        "localhost.evil.example",
        "[::1",
        "127.0.0.1.evil.example:80",
    )
    assert not any(map(names_the_loopback, others))


def test_an_origin_that_is_no_address_is_a_stranger() -> None:
    assert "the Origin header is 'http://['" in foreign_origin(
        "127.0.0.1", "http://[", loopback=True
    )


def status_of(
    server: str = "127.0.0.1", path: str = "/update_weights", kind: str = "http", **headers: str
) -> int:
    """The status of the response; 0 if the request reached the application."""
    said: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        said.append({"status": 0})

    async def send(message: Any) -> None:
        said.append(message)

    given = {"host": "127.0.0.1:8000"} | headers
    scope = {
        "type": kind, "path": path, "server": (server, 8000),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }  # fmt: skip
    asyncio.run(AccessMiddleware(app)(scope, None, send))
    return int(said[0].get("status", said[0].get("code", 0)))


def test_without_a_key_the_loopback_is_open_to_all_but_pages() -> None:
    assert (
        status_of() == status_of(host="localhost:8000") == status_of("::1", host="[::1]:8000") == 0
    )
    assert status_of(origin="http://127.0.0.1:8000") == 0
    assert status_of(origin="https://evil.example") == status_of(origin="null") == 403
    assert status_of(host="evil.example") == 403
    assert status_of("10.0.0.1", host="gpu-7:8000") == 0, (
        "a server's name may be resolved by the network"
    )
    assert status_of("10.0.0.1", host="gpu-7:8000", origin="https://evil.example") == 403
    assert status_of(kind="websocket", origin="https://evil.example") == 1008


@pytest.mark.parametrize(
    "wrong", ["", KEY, f"Bearer {KEY[1:]}", f"Bearer {KEY}x", "Bearer ", "bearer é"]
)
def test_with_a_key_nothing_is_reached_without_it(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert (
        status_of(authorization=wrong)
        == status_of(authorization=wrong, path="/health/../pause")
        == 401
    )
    assert status_of(authorization=f"Bearer {KEY}") == status_of(path="/health") == 0

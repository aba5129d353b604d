"""Answers over HTTP: whole, or as server-sent events.

Invariant: what can be known before the first token is said with an error's status; what goes wrong behind it is said in
the stream, in its form. Who hangs up ends the call, and what had been told is recorded.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from contextlib import aclosing, suppress

from aiohttp import web

from skyasync.endpoint.calls import LONG_REPLY, OneCall
from skyasync.endpoint.door import body as read_body
from skyasync.endpoint.forms.inner import Event, Form, RequestError, from_json

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_ENCODER = json.JSONEncoder()


async def body_of(request: web.Request) -> dict[str, object]:
    """The JSON of a request.

    Raises:
        RequestError: if it is none.
    """
    said = await read_body(request)
    try:
        body = from_json(said)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request's body is not JSON: {error!s:.500}") from error
    if not isinstance(body, dict):
        raise RequestError("the request's body must be a JSON object")
    return body


async def send(request: web.Request, call: OneCall, form: Form) -> web.StreamResponse:
    """Make the call, and answer it in its form."""
    if not call.request.asked.stream:
        choices = await call.answered()
        if call.answer.completion_tokens <= LONG_REPLY:
            return web.json_response(form.whole(call.request, call.answer, choices))
        # a thread encodes it, in Python: json.dumps would hold up the event loop all the same
        text = await asyncio.to_thread(
            lambda: "".join(_ENCODER.iterencode(form.whole(call.request, call.answer, choices)))
        )
        return web.Response(text=text, content_type="application/json")
    sent = _Sent(request)
    stream = form.stream(call.request)
    ended = set[int]()
    try:
        async with aclosing(call.looks()) as looks:
            async for choices in looks:
                if not sent.begun:
                    await sent.send(stream.begin(call.answer))
                for choice in choices:
                    await asyncio.sleep(0)  # others have a turn
                    if choice.index not in ended:
                        await sent.send(stream.go_on(choice))
                        ended |= {choice.index} if choice.finish_reason else set()
        await sent.send(stream.end(call.answer, choices))
    except HungUpError:
        return sent.response
    except Exception as error:
        if not sent.begun:
            raise
        with suppress(HungUpError):
            await sent.send(stream.fail(as_request_error(error)))
    await sent.end()
    return sent.response


def as_request_error(error: Exception) -> RequestError:
    """What a program is told of any failure."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, web.HTTPException):  # no such address, wrong method, too long
        return RequestError(error.reason, status=error.status)
    if isinstance(error, RecursionError):
        return RequestError("the request is nested too deeply")
    return RequestError(f"{type(error).__name__}: {error}", status=500)


class HungUpError(Exception):
    """Nobody listens any more."""


class _Sent:
    """A response that begins with its first event."""

    def __init__(self, request: web.Request) -> None:
        self._request, self.response = request, web.StreamResponse(headers=_HEADERS)

    @property
    def begun(self) -> bool:
        return self.response.prepared

    async def send(self, events: Iterable[Event]) -> None:
        """Raises ``HungUpError``."""
        text = "".join(event.text for event in events)
        try:
            if not self.begun:
                await self.response.prepare(self._request)
            if text:
                await self.response.write(text.encode())
        except ConnectionError as error:
            raise HungUpError from error

    async def end(self) -> None:
        with suppress(ConnectionError):
            await self.response.write_eof()

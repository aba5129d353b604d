"""Answers over HTTP: whole, or as server-sent events.

Invariant: what can be known before the first token is said with an error's status; what goes wrong behind it is said in
the stream, in its form. Who hangs up ends the call, and what had been told is recorded.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable
from contextlib import aclosing, suppress

from aiohttp import web

from skyasync.endpoint.calls import OneCall
from skyasync.endpoint.door import body as read_body
from skyasync.endpoint.forms.inner import Event, Form, RequestError

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


async def body_of(request: web.Request) -> dict[str, object]:
    """The JSON of a request.

    Raises:
        RequestError: if it is none.
    """
    said = await read_body(request)
    collecting = gc.isenabled()
    gc.disable()  # of a body that is all lists it would look through everything again and again
    try:
        body = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request's body is not JSON: {error!s:.500}") from error
    finally:
        if collecting:
            gc.enable()
    if not isinstance(body, dict):
        raise RequestError("the request's body must be a JSON object")
    return body


async def send(request: web.Request, call: OneCall, form: Form) -> web.StreamResponse:
    """Make the call, and answer it in its form."""
    if not call.request.asked.stream:
        choices = await call.answered()
        return web.json_response(form.whole(call.request, call.answer, choices))
    sent = _Sent(request)
    stream = form.stream(call.request)
    ended = set[int]()
    try:
        async with aclosing(call.looks()) as looks:
            async for choices in looks:
                if not sent.begun:
                    await sent.send(stream.begin(call.answer))
                for choice in choices:
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

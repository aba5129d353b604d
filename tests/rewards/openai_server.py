"""A scripted server with OpenAI's API on the loopback interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Reply = Callable[[dict[str, Any]], Any]


class Server:
    """``replies``: to the next requests, in turn, and the last one to all others; a text, a status, or a function
    of the request's body that returns one of them; ``None`` never answers. ``seen``: bodies; ``keys``: their
    headers.
    """

    def __init__(self, *replies: Any) -> None:
        self.replies, self.seen, self.keys = list(replies), [], []
        self.at_once = self.most_at_once = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            await asyncio.sleep(0.005)
            reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
            reply = reply(body) if callable(reply) else reply
            if reply is None:
                await asyncio.sleep(30)
            if isinstance(reply, int):
                problem = {
                    "error": {"message": f"said {reply} to {request.headers.get('Authorization')}"}
                }
                return web.json_response(problem, status=reply)
            if isinstance(reply, bytes):
                return web.Response(body=reply)
            return web.json_response(
                {"choices": [{"message": {"role": "assistant", "content": reply}}]}
            )
        finally:
            self.at_once -= 1

    @property
    def questions(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.seen]


@asynccontextmanager
async def serving(*replies: Any) -> AsyncIterator[Server]:
    server = Server(*replies)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()

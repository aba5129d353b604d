"""An OpenEnv server that exits in the middle of its episodes: ``python -m tests.faults.env_server PORT STEPS LOG``.

It exits at the step with that number, whatever sessions there are, and adds a line to the log.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from aiohttp import web

SCHEMA = {"action": {"properties": {"text": {"type": "string"}}, "required": ["text"]}}


class MortalServer:
    def __init__(self, steps: int, log: Path) -> None:
        self._left, self._log = steps, log

    async def schema(self, request: web.Request) -> web.Response:
        return web.json_response(SCHEMA)

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        ws, turn = web.WebSocketResponse(), 0
        await ws.prepare(request)
        async for message in ws:
            action = message.json()["data"].get("text")
            if action is not None:
                turn, self._left = turn + 1, self._left - 1
                if self._left == 0:
                    with self._log.open("a") as file:
                        file.write(f"turn {turn}\n")
                    os._exit(1)
            reward = 0.0 if action is None else float(len(action) % 2)
            data = {"observation": {"message": f"turn {turn}"}, "reward": reward, "done": turn == 2}
            await ws.send_json({"type": "observation", "data": data})
        return ws


if __name__ == "__main__":
    port, steps, log = sys.argv[1:]
    server, app = MortalServer(int(steps), Path(log)), web.Application()
    app.router.add_get("/schema", server.schema)
    app.router.add_get("/ws", server.session)
    web.run_app(app, host="127.0.0.1", port=int(port), print=None)

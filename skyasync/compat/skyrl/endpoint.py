"""SkyRL's endpoint: one address for all requests, whoever asks.

Invariant: it listens on the loopback alone, since it takes any key; nothing that it answers is recorded, so that what
is trained is what the generator returns.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from skyasync.endpoint.door import Door
from skyasync.endpoint.server import LOOPBACK, WAITING_CONNECTIONS, Endpoint
from skyasync.endpoint.session import Session
from skyasync.envs.registry import Foreign
from skyasync.inference.interface import SamplingParams
from skyasync.rollout.types import PromptId, TrajectoryId


class OpenEndpoint(Endpoint):
    """Its port is taken when it is made, so that the address is known before anything runs."""

    sampling = SamplingParams()

    def __init__(self, client: Foreign, tokenizer: Foreign, max_model_len: int) -> None:
        super().__init__(client, tokenizer, max_model_len)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind((LOOPBACK, 0))
        self._numbers = itertools.count()

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self._socket.getsockname()[1]}"

    async def _listen(self, door: Door, runner: web.AppRunner) -> int:
        return await door.open(runner, sock=self._socket, backlog=WAITING_CONNECTIONS)

    @contextmanager
    def entered(self, request: web.Request) -> Iterator[Session]:
        """A session for this request alone, which is forgotten."""
        yield Session(TrajectoryId(PromptId(0, next(self._numbers)), 0), self.sampling, "endpoint")

"""One episode at the endpoint. Its key and the ids of its requests are its own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any

from skyasync.agents.api.types import Message, ModelRequest
from skyasync.agents.recorder import Recorder
from skyasync.arrays import Ints
from skyasync.inference.interface import GenerationRequest, SamplingParams
from skyasync.models.images import images_of
from skyasync.rollout.types import TrajectoryId

MOST_STORED = 256  # answers that later requests may name; each holds its whole conversation
STORED_CHARACTERS = 32 * 1024**2  # of all these conversations together
INLINE = 16 * 1024  # bytes or characters read in milliseconds; of longer requests an episode has one read at a time


class Session:
    """One episode at the endpoint: its key, its calls, and the failure of an engine if it met one.

    Args:
        affinity: sessions that share it go to the same engine; by default the episode is alone.
        reads_behaviour: the setting for which the objective reads the log-probabilities of what is sampled here; "" for
            none. Requests then cannot ask for a distribution that the trainer could not compute.

    Attributes:
        conversations: by the id of an answer, the conversation that a later request continues if it names the answer.
        over: nothing is answered or recorded any more.
        streams: of each answer that is streamed at present, what records the part that has been sent.
    """

    def __init__(
        self, identity: TrajectoryId, sampling: SamplingParams, affinity: str | None = None, reads_behaviour: str = ""
    ) -> None:
        self.identity, self.sampling, self.affinity = identity, sampling, affinity or str(identity)
        self.reads_behaviour = reads_behaviour
        self.api_key = secrets.token_urlsafe(32)
        self.recorder = Recorder()
        self.conversations: dict[str, list[Message]] = {}
        self._stored: dict[str, int] = {}  # characters of these
        self._reading = asyncio.Lock()
        self.tokenising = asyncio.Lock()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.handlers: set[asyncio.Task[Any]] = set()
        self.streams: set[Callable[[], None]] = set()
        self.over = False
        self._requests = 0

    def requests(self, prompt: Ints, request: ModelRequest, capacity: int) -> list[GenerationRequest]:
        """One request per choice, each with an id (and seed) of its own; ``capacity``: tokens that a reply may have."""
        sampling = request.sampling
        most = min(sampling.max_tokens, capacity)
        sampling = replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))
        first, self._requests = self._requests, self._requests + request.choices
        seeds = [None if sampling.seed is None else (sampling.seed + i) % 2**62 for i in range(request.choices)]
        return [
            GenerationRequest(
                request_id=f"{self.identity}-c{first + choice}",
                prompt_token_ids=prompt,
                sampling=sampling if seed is None else replace(sampling, seed=seed),
                session_id=self.affinity,
                images=images_of(request.messages),
            )
            for choice, seed in enumerate(seeds)
        ]

    def reads(self, size: int | None) -> AbstractAsyncContextManager[object]:
        """Around the reading of a request of so many bytes (None: unknown). Long ones are read one at a time."""
        return nullcontext() if size is not None and size <= INLINE else self._reading

    def store(self, answer: str, conversation: list[Message], characters: int) -> None:
        """Let a later request name the answer; the oldest answers are dropped."""
        self.conversations[answer], self._stored[answer] = conversation, characters
        while len(self._stored) > MOST_STORED or sum(self._stored.values()) > STORED_CHARACTERS:
            oldest = next(iter(self._stored))
            del self.conversations[oldest], self._stored[oldest]

    def settle(self) -> None:
        """Record what has been sent of answers that are still streamed: the program may have read enough."""
        for settle in list(self.streams):
            settle()

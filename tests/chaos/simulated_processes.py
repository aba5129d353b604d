"""Simulated engines and environment processes that can be killed or stopped, and whose messages can be lost.

A token is a function of the weights, the request's random number and all tokens before it, as of the embedded engine.

Invariant: a request to a killed process raises the same error as a request to a killed real process. A stopped process
does not answer, and continues its work when it is continued.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence

import numpy as np

from skyasync.arrays import floats
from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyasync.envs.episodes import EnvSettings, Episodes
from skyasync.inference.backends.transformers.sampling import stream_key, uniforms
from skyasync.inference.interface import (
    EngineFailedError,
    EngineStats,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    InferenceEngine,
    PauseMode,
)
from skyasync.utils.rpc import Answer, Call, LocalTransport
from skyasync.weight_sync.update import WakePart, WeightSyncError, WeightUpdate

TOKEN_S, SYNC_S, START_S = 0.5, 0.5, 20.0
LETTERS = range(ord("k"), ord("z") + 1)  # the tokens that engines generate
SILENCE_S, START_LIMIT_S = 20.0, 300.0


class SimulatedProcess:
    """The state of one process: running, stopped, or killed."""

    def __init__(self, error: type[Exception], what: str) -> None:
        self._error, self._what = error, what
        self.killed, self.runs = asyncio.Event(), asyncio.Event()
        self.runs.set()
        self.dropped, self.late_s = 0, 0.0  # number of messages to lose; their delay

    def kill(self) -> None:
        self.killed.set()
        self.runs.set()

    async def spend(self, seconds: float) -> None:
        """Let time of the process pass; raises an error if the process is killed."""
        if not self.killed.is_set() and seconds:
            try:
                async with asyncio.timeout(seconds):
                    await self.killed.wait()
            except TimeoutError:
                pass
        await self.runs.wait()
        if self.killed.is_set():
            raise self._error(f"the process of {self._what} is gone")

    async def message(self, seconds: float = 0.01) -> None:
        """A message arrives after a delay."""
        if self.dropped:
            self.dropped -= 1
            await asyncio.Event().wait()
        await self.spend(seconds + self.late_s)


class Engine(InferenceEngine):
    """Generates a token in ``TOKEN_S``; the prompt determines the number of tokens."""

    restartable = True

    def __init__(self) -> None:
        self.process = SimulatedProcess(EngineFailedError, "an engine")
        self.version, self.weights_digest, self._paused, self._made = 0, "", False, 0
        self._wire = asyncio.Lock()  # messages arrive in the order in which they were sent
        self._rows: dict[
            str, list[tuple[int, int]]
        ] = {}  # request -> its tokens, each with its version
        self._told: dict[str, int] = {}
        self._prompts: dict[str, GenerationRequest] = {}
        self._ended: set[str] = set()
        self._asleep = False

    def successor(self) -> Engine:
        return Engine()

    def kill(self) -> None:
        self.process.kill()

    async def start(self) -> None:
        async with asyncio.timeout(START_LIMIT_S):
            await self.process.spend(START_S)

    async def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncIterator[list[GenerationOutput]]:
        await self._receive()
        assert not self._asleep, "an engine that sleeps has no memory for a request"
        mine = [request.request_id for request in requests]
        self._prompts.update({request.request_id: request for request in requests})
        self._rows.update({name: [] for name in mine})
        while mine:
            await self.process.spend(TOKEN_S)
            done = []
            for name in mine:
                if not self._paused and name not in self._ended:
                    self._rows[name].append((self._token(name), self.version))
                    self._made += 1
                if (reason := self._end_of(name)) is not None:
                    done.append(self._output(name, 0, reason))
                    self._forget(name)
            mine = [name for name in mine if name in self._rows]
            if done:
                await self.process.message(0.0)
                yield done

    def _token(self, name: str) -> int:
        request, written = self._prompts[name], [token for token, _ in self._rows[name]]
        key = stream_key(request.sampling.seed, 0, name, request.response_tokens)
        number = uniforms(np.array([key], np.uint64), np.array([len(written)]))[0]
        before = [*request.prompt_token_ids.tolist(), *written]
        return LETTERS[int(digest(self.weights_digest, number, before), 16) % 16]

    def _end_of(self, name: str) -> FinishReason | None:
        request = self._prompts[name]
        if name in self._ended:
            return "abort"
        if request.response_tokens + len(self._rows[name]) >= response_tokens(request):
            return "stop"
        return "length" if len(self._rows[name]) >= request.sampling.max_tokens else None

    def _forget(self, name: str) -> None:
        for table in (self._rows, self._told, self._prompts):
            table.pop(name, None)
        self._ended.discard(name)

    def _output(
        self, name: str, start: int, reason: FinishReason | None = None
    ) -> GenerationOutput:
        row = np.array(self._rows[name][start:], np.int32).reshape(-1, 2)
        return GenerationOutput(name, row[:, 0], floats([-0.5] * len(row)), row[:, 1], reason)

    async def progress(self) -> list[GenerationOutput]:
        await self._receive()
        progress = [
            self._output(name, self._told.get(name, 0))
            for name in self._rows
            if name not in self._ended
        ]
        self._told = {name: len(row) for name, row in self._rows.items()}
        return [each for each in progress if len(each.token_ids)]

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        await self._receive()
        return [[-0.5] * (len(each) - 1) for each in sequences]

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._receive()
        self._paused = True
        if mode == "abort":
            self._ended.update(self._rows)

    async def resume(self) -> None:
        await self._receive()
        self._paused = False

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await self._receive()
        self._ended.update(
            name for name in self._rows if request_ids is None or name in request_ids
        )

    async def update_weights(self, update: WeightUpdate) -> None:
        await self._receive(SYNC_S)
        if not update.info["sound"]:
            raise WeightSyncError("an engine holds other weights than the trainer sent in a tensor")
        self.version, self.weights_digest = update.version, update.info["weights"]

    async def sleep(self) -> None:
        await self._receive()
        assert not self._rows, "requests are at an engine that is to sleep"
        self._asleep = True

    async def wake(self, part: WakePart) -> None:
        await self._receive()
        self._asleep = part == "weights"

    async def stats(self) -> EngineStats:
        await self._receive()
        return EngineStats(len(self._rows), sum(not row for row in self._rows.values()), self._made)

    async def shutdown(self) -> None:
        self.kill()

    async def _receive(self, seconds: float = 0.01) -> None:
        async with self._wire:
            await self.process.message(seconds)


def response_tokens(request: GenerationRequest) -> int:
    """The length of the answer: between 1 and 8 tokens, by the prompt's first token."""
    return 1 + int(request.prompt_token_ids[0]) % 8


def digest(*of: object) -> str:
    return hashlib.blake2b(repr(of).encode(), digest_size=8).hexdigest()


class Host(LocalTransport):
    """An environment process."""

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(Episodes(settings), settings.step_timeout_s)
        self.process = SimulatedProcess(ConnectionError, "an environment")

    async def load(self, *args: object) -> Exception | None:
        await self.process.message(1.0)
        return await super().load(*args)

    async def exchange(self, calls: Sequence[Call]) -> tuple[list[Answer], int]:
        await self.process.message(0.05)
        return await super().exchange(calls)

    def kill(self) -> None:
        super().kill()
        self.process.kill()


class Turns(BaseTextEnv):
    """Two turns; the second one has a reward."""

    raw_text = True

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        return {
            "observations": "?",
            "reward": float(self.turns == 2),
            "done": self.turns == 2,
            "metadata": {},
        }


class Letters:
    """A tokenizer with one token per letter."""

    eos_token_id, eos_token, chat_template = 0, "\0", None
    name_or_path = ""

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, tokens: Sequence[int], **_: object) -> str:
        return "".join(map(chr, tokens))

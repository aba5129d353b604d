"""Generation by a schedule: every token again by weights of the version that computed it.

    schedule ──▶ one task per sample ──▶ ScheduledClient ──▶ engines (``GenerationRequest.version_at``)
                                            ▲ announce
    trainer ── quiet ──▶ update ──▶ weight sync

Invariant: while engines have a version, every response gets exactly the tokens that it got from that version, and
continues as a new request where it did. ``quiet`` returns when each has them. After a change of settings a response may
have more tokens than the schedule says: the others are of the version of its last one.

| who waits        | for what                                      | woken by                               |
|------------------|-----------------------------------------------|----------------------------------------|
| a request        | the version of its next token                 | ``announce``                           |
| a running request| the same                                      | the engine's own weight update         |
| ``quiet``        | all samples to end or to wait for new weights | their tasks; engines, every ``POLL_S`` |
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skyasync.inference.inflight import continuation, join
from skyasync.inference.interface import GenerationOutput, GenerationRequest
from skyasync.inference.stop_strings import cut_at_stop_string
from skyasync.rollout.generator_api import Generator, rollout_requests, run_generator
from skyasync.rollout.schedule import ScheduledGroup, Turn
from skyasync.rollout.types import Group, Prompt, Trajectory

if TYPE_CHECKING:
    from skyasync.config.schema import GeneratorConfig
    from skyasync.inference.client import InferenceClient

POLL_S = 0.01


def requests_of(turn: Turn) -> list[tuple[int, list[tuple[int, int]], int | None]]:
    """The requests that a turn is made of: first token, (token, version) of each version, the first token of the next.

    Tokens count from the turn's first one.
    """
    starts = [change.token for change in turn if change.cut and change.token]
    requests = []
    for start, stop in zip([0, *starts], [*starts, None], strict=True):
        own = [c for c in turn if c.token >= start and (stop is None or c.token < stop)]
        requests.append((start, [(change.token, change.version) for change in own], stop))
    return requests


class ScheduledClient:
    """In place of the inference client, for a generator that plays a schedule.

    Attributes:
        version: of the engines' weights.
    """

    def __init__(self, client: InferenceClient, tokenizer: Any = None) -> None:  # noqa: ANN401
        self._client, self._tokenizer = client, tokenizer
        self._groups: dict[str, ScheduledGroup] = {}
        self._running: dict[str, GenerationRequest] = {}  # by sample
        self._known: dict[str, int] = {}  # request -> tokens so far, when it was asked last
        self._waiting: dict[str, int] = {}  # sample -> version
        self._announced = asyncio.Event()
        self.version = 0

    def expect(self, group: ScheduledGroup) -> None:
        """Requests of this group will come."""
        self._groups[group.name] = group

    def announce(self, version: int) -> None:
        """All engines have these weights."""
        self.version = version
        self._announced.set()
        self._announced = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """As ``InferenceClient.generate``."""
        sample, _, number = request.request_id.rpartition("-t")
        name, _, repetition = sample.rpartition("-r")
        if name not in self._groups:
            return await self._client.generate(request)
        turn = self._groups[name].turn(int(repetition), int(number))
        answer = GenerationOutput(request.request_id)
        for start, versions, stop in requests_of(turn):
            while self.version < versions[0][1]:
                self._waiting[sample] = versions[0][1]
                await self._announced.wait()
            self._waiting.pop(sample, None)
            again = start or turn[0].cut
            part = continuation(request, answer) if again else request
            at = tuple((token - start, version) for token, version in versions)
            most = part.sampling.max_tokens if stop is None else min(part.sampling.max_tokens, stop - start)
            part = replace(part, version_at=at, sampling=replace(part.sampling, max_tokens=most))
            self._running[sample] = part
            try:
                more = await self._client.generate(part)
            finally:
                del self._running[sample]
                self._known.pop(part.request_id, None)
            before = len(answer.token_ids)
            answer = join(answer, more) if again else more
            answer = cut_at_stop_string(request, answer, before, lambda: self._tokenizer) if again else answer
            if answer.finish_reason != "length" or len(answer.token_ids) != stop:
                break
        return replace(answer, request_id=request.request_id)

    async def go_on(self, request: GenerationRequest, partial: GenerationOutput) -> GenerationOutput:
        """As ``InferenceClient.go_on``: of an episode whose environment was lost; its turns so far are whole."""
        return await self._client.go_on(request, partial)

    async def progress(self, request_ids: Collection[str] | None = None) -> Mapping[str, GenerationOutput]:
        """As ``InferenceClient.progress``."""
        return await self._client.progress(request_ids)

    async def busy(self, samples: Iterable[str]) -> list[str]:
        """The samples among these that do not wait for new weights."""
        if self._running:
            progress = await self._client.progress()
            self._known = {name: len(output.token_ids) for name, output in progress.items()}
        return [sample for sample in samples if not self._waits(sample)]

    def _waits(self, sample: str) -> bool:
        if sample in self._running:
            request = self._running[sample]
            newer = [token for token, version in request.version_at if version > self.version]
            return bool(newer) and self._known.get(request.request_id, 0) >= newer[0]
        return self._waiting.get(sample, 0) > self.version


class Reenactment:
    """The samples of scheduled groups, each in a task of its own."""

    def __init__(self, client: ScheduledClient, generator: Generator, cfg: GeneratorConfig) -> None:
        self._client, self._generator, self._cfg = client, generator, cfg
        self._tasks: dict[str, asyncio.Task[Trajectory]] = {}
        self._prompts: dict[str, Prompt] = {}

    def start(self, group: ScheduledGroup, prompt: Prompt) -> None:
        """Play its samples."""
        self._client.expect(group)
        self._prompts[group.name] = prompt
        for request in rollout_requests([prompt], self._cfg):

            async def play(request: Any = request) -> Trajectory:  # noqa: ANN401
                (one,), _ = await run_generator(self._generator, [request], group.started)
                return one.trajectories[0]

            self._tasks[str(request.id)] = asyncio.create_task(play())

    async def quiet(self) -> None:
        """Until no token is computed any more by the present weights. Raises what a sample has raised."""
        while True:
            running = {name: task for name, task in self._tasks.items() if not task.done()}
            for task in self._tasks.values():
                if task.done():
                    task.result()
            busy = await self._client.busy(running)
            tasks = [running[name] for name in busy if not running[name].done()]
            if not tasks:
                if not busy:
                    return
                continue
            await asyncio.wait(tasks, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)

    def group(self, name: str) -> Group:
        """A group whose samples have ended."""
        prompt = self._prompts.pop(name)
        names = [str(request.id) for request in rollout_requests([prompt], self._cfg)]
        return Group(prompt, [self._tasks.pop(each).result() for each in names])

    async def close(self) -> None:
        """End what is left: samples of steps that are not replayed."""
        tasks: Sequence[asyncio.Task[Trajectory]] = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

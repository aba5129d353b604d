"""Servers that the run does not start, as engines: what is the same for all kinds of servers.

Invariant: a token's version is the one that the server's core reports for it. A version that this
run did not set is a failure: the server was restarted, or another run uses it. A server that cannot
be reached, or that ends in the middle of an answer, is ``EngineFailedError``; one that rejects a
request is an error with its own message. Of a server's state a run changes the weights only.

Requests that have a token keep their cache over an update; those without a token are sent again.
Prompts are salted with the version, so that no prompt finds blocks that other weights have
computed.

| who waits               | for what               | woken by                                                     |
|-------------------------|------------------------|--------------------------------------------------------------|
| ``generate``, ``score`` | the server's answer    | the server; a broken connection (``EngineFailedError``)        |
| control calls           | the same, each other   | the same                                                     |
| ``start``               | the server             | the server; ``engine_start_timeout_s``                       |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self
from urllib.parse import urlsplit
from uuid import uuid4

import aiohttp
import numpy as np

from skyasync.arrays import Ints, floats, ints
from skyasync.errors import UserError
from skyasync.inference.interface import (
    ENGINES,
    EngineConfig,
    EngineFailedError,
    EngineStats,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    InferenceEngine,
    PauseMode,
    RequestFailedError,
    Stopwatch,
    refusal,
)
from skyasync.inference.origin_check import KEY_VARIABLE
from skyasync.models.config import overrides_of
from skyasync.utils.task_group import within
from skyasync.weight_sync.update import CurrentContent, WeightSyncError, WeightUpdate

INFO = "/server_info"  # the route by which vLLM and SGLang describe themselves
ANSWER_S = 30.0  # a server inspects its machine for seconds before its first answer
CONNECT_S = 10.0  # a host that drops packets would block a request for minutes
# Lifetime of an idle connection: the server closes it after five seconds, and must not do so while
# a request is on its way.
KEEPALIVE_S = 2.0
LONGEST_LINE = 2**25  # bytes; a token of a chunk takes about 80
RETRY_S = 1.0  # between two attempts to find a server that has to come back

JSON = Mapping[str, Any]  # an object


class ServerConnection:
    """HTTP requests to a server.

    Args:
        kind: whose server it is, in messages.
        url: ``http://host:port``.
        key: sent if not empty; it stands in no message.
        core_failures: words of a refusal by which the server says that its core has ended.
    """

    def __init__(
        self,
        kind: str,
        url: str,
        key: str = "",
        core_failures: Sequence[str] = (),
    ) -> None:
        self.url = url.rstrip("/")
        self._key = key
        self._core_failures = core_failures
        self.name = f"the {kind} server {self.url}"
        self._session: aiohttp.ClientSession | None = None

    async def post(self, route: str, body: JSON | None = None, **query: str) -> Any:  # noqa: ANN401  (JSON)
        async with self._request("POST", route, json=body, params=query) as response:
            return await response.json(content_type=None)

    async def get(self, route: str, **query: str) -> Any:  # noqa: ANN401  (JSON)
        async with self._request("GET", route, params=query) as response:
            return await response.json(content_type=None)

    async def text(self, route: str) -> str:
        """An answer that is no JSON; empty if there is no such route."""
        try:
            async with self._request("GET", route) as response:
                return await response.text()
        except RuntimeError:
            return ""

    async def chunks(
        self,
        route: str,
        body: JSON,
        accepted: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[dict[str, Any]]:
        """The pieces of a streamed answer; leaving the iteration early ends the request.

        Args:
            accepted: called when the server has read the request, before the first piece.
        """
        async with self._request("POST", route, json=body) as response:
            accepted()
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise self._refusal(route, chunk)
                yield chunk
        raise self.failure("the connection closed in the middle of a streamed response")

    async def close(self) -> None:
        """Close all connections. Safe to call twice."""
        session = self._session
        self._session = None
        if session is not None:
            await session.close()

    def failure(self, reason: object) -> EngineFailedError:
        if isinstance(reason, BaseException):
            reason = f"{type(reason).__name__}: {reason}"
        return EngineFailedError(f"{self.name} does not answer: {reason}")

    @contextlib.asynccontextmanager
    async def _request(
        self,
        method: str,
        route: str,
        **content: Any,  # noqa: ANN401  (of aiohttp)
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sent once. Raises what the server answers with a status of an error."""
        if self._session is None:
            # Without limits: each request in flight has a connection, and an answer may take hours.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
                read_bufsize=LONGEST_LINE,
            )
        try:
            async with self._session.request(method, self.url + route, **content) as response:
                if response.status >= 400:
                    answer = await response.text()
                    with contextlib.suppress(ValueError):
                        answer = json.loads(answer)
                    raise self._refusal(route, answer, response.status)
                yield response
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            raise self.failure(error) from error

    def _refusal(self, route: str, answer: object, status: int = 0) -> Exception:
        """The error of an answer: text, ``{"error": {"message": ...}}``, or a part of that."""
        message = answer
        for key in ("error", "message"):
            if isinstance(message, dict):
                message = message.get(key, message)
        text = str(message).strip()
        answers = f"answers {status}" if status else "answers"
        line = f"{self.name}{route} {answers}: {text[:400]}"
        for words in self._core_failures:
            if words in text:
                return EngineFailedError(line)
        return RuntimeError(line)


@dataclass(eq=False)
class RemoteRequest:
    """A request at the server, and its tokens so far.

    Args:
        version: of the server's weights when it was sent.

    Attributes:
        certain: how many tokens are surely of that version, once an update may have come.
        left: why it was ended before it had a token: to be sent ``again``, or ``ended``.
        task: reads its answer.
        server_id: its name at the server, if that is not its own; empty before it is sent.
    """

    request: GenerationRequest
    version: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reported: int = 0
    certain: int | None = None
    left: Literal["", "again", "ended"] = ""
    task: asyncio.Task[GenerationOutput] | None = None
    server_id: str = ""

    def leave(self, reason: Literal["again", "ended"]) -> None:
        """Close the connection, so that the server ends the request."""
        self.left = reason
        if self.task is not None:
            self.task.cancel()

    def receive(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add new tokens of the answer; ``tokens`` and ``logprobs`` are ``[new tokens]``."""
        if len(logprobs) != len(tokens):
            name = self.request.request_id
            raise RuntimeError(
                f"{len(tokens)} tokens of {name} have {len(logprobs)} log-probabilities"
            )
        self.tokens += tokens
        self.logprobs += logprobs

    def progress(self) -> GenerationOutput | None:
        """The tokens since the last call that are surely of ``version``."""
        start = self.reported
        stop = len(self.tokens) if self.certain is None else self.certain
        if stop <= start:
            return None
        self.reported = stop
        return GenerationOutput(
            self.request.request_id,
            ints(self.tokens[start:stop]),
            floats(self.logprobs[start:stop]),
            np.full(stop - start, self.version, dtype=np.int32),
        )


def versions_of(spans: Sequence[JSON] | None, count: int) -> Ints | None:
    """The version of each of ``count`` tokens; None if a version is not that of a run's weights.

    Args:
        spans: of the server: tokens from ``start`` to before ``end`` are of ``version``.
    """
    versions = []
    lengths = []
    for span in spans or ():
        version = str(span["version"])
        if not version.isdecimal():
            return None
        versions.append(int(version))
        lengths.append(span["end"] - span["start"])
    if sum(lengths) < count:
        return None
    return np.repeat(ints(versions), ints(lengths))[:count]


class RemoteEngine(InferenceEngine):
    """A server as an engine; a subclass per kind of server overrides what is not supported here.

    ``config.extra``:

    - ``url``: ``http://host:port``.
    - ``key``: the server's, if it needs one.
    - ``start_s``: how long its start may take.
    - ``returns``: it has failed, and may be unreachable for ``start_s``.
    """

    kind: ClassVar[str]  # of server, in messages
    how_to_start: ClassVar[str]  # the command for a server that can be an engine
    core_failures: ClassVar[Sequence[str]] = ()
    core_route: ClassVar[str]  # the server's core answers it, between two steps
    info_query: ClassVar[Mapping[str, str]] = {}
    restartable: ClassVar[bool] = True

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.version = config.version
        extra = config.extra
        self._server = ServerConnection(
            self.kind,
            extra["url"],
            extra.get("key", ""),
            self.core_failures,
        )
        self._run_id = uuid4().hex  # whose versions these are: the server may have served others
        self._requests: dict[str, RemoteRequest] = {}
        self._tasks: set[asyncio.Task[GenerationOutput]] = set()
        self._finished_tokens = 0
        self._cache_tokens = 0
        self._busy = Stopwatch()
        self._paused = Stopwatch()
        self._control = asyncio.Lock()
        self._content = CurrentContent()
        self._close_task: asyncio.Future[None] | None = None

    # -- what each kind of server implements
    # --------------------------------------------------------------

    @classmethod
    def complaint(cls, url: str, info: JSON, config: EngineConfig) -> str:
        """The reason why a server cannot be an engine; empty if it can.

        Args:
            info: the server's description of itself (``INFO``).
            config: of an engine that the run would start itself.
        """
        raise NotImplementedError

    async def _reset(self, info: JSON) -> int:
        """End a pause and requests of an earlier run, and set ``version``.

        Returns the number of tokens that the server's cache holds; 0 if it does not report it.
        """
        raise self.unsupported("start")

    async def _cache_used(self) -> int | None:
        """Tokens of its cache that running requests take; None if it does not report it."""
        return None

    async def _generate(self, pending: RemoteRequest) -> GenerationOutput:
        """Send a request, and receive its answer (``pending.receive``) to its end (``_ended``)."""
        raise self.unsupported("generate")

    async def _abort(self, pending: Collection[RemoteRequest]) -> None:
        raise self.unsupported("abort")

    async def _score(self, sequence: Sequence[int]) -> list[float] | None:
        """Log-probabilities of each token after the first; None if the request was cut."""
        raise self.unsupported("score")

    async def _schedule(self, mode: PauseMode | None) -> None:
        """Pause the server's scheduler; None: resume it."""
        raise self.unsupported("pause")

    async def _load(self, update: WeightUpdate) -> list[str] | None:
        """Have the paused server load the weights, and set their version."""
        raise self.unsupported("update_weights")

    # -- lifecycle
    # ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Check the server, and end a pause and requests of an earlier run.

        A successor waits for its server.
        """
        extra = self.config.extra
        action = f"the start of engine {extra['url']}"
        async with within(extra["start_s"], action, "generator.engine_start_timeout_s"):
            while True:
                try:
                    info: dict[str, Any] = await self._server.get(INFO, **self.info_query)
                    break
                except EngineFailedError as error:
                    if not extra.get("returns"):
                        raise UserError(f"generator.engines: {error}") from error
                    await asyncio.sleep(RETRY_S)
            problem = self.complaint(self._server.url, info, self.config)
            if problem:
                raise UserError(problem)
            self._cache_tokens = await self._reset(info)

    async def shutdown(self) -> None:
        """End the requests of this run; the server continues."""
        for task in list(self._tasks):
            task.cancel()
        if self._paused.on:
            # A server that has failed cannot be resumed, and the end of a run must not fail.
            with contextlib.suppress(Exception):
                await self._schedule(None)
        await self._server.close()

    def kill(self) -> None:
        """Close the connections. The server itself is not the run's to end."""
        for task in list(self._tasks):
            task.cancel()
        self._close_task = asyncio.ensure_future(self._server.close())

    def successor(self) -> Self:
        """The same address, once a server answers there again."""
        extra = {**self.config.extra, "returns": True}
        return type(self)(replace(self.config, version=self.version, extra=extra))

    # -- requests
    # -----------------------------------------------------------------------------------------

    async def generate(
        self,
        requests: Sequence[GenerationRequest],
    ) -> AsyncIterator[list[GenerationOutput]]:
        finished_tasks: asyncio.Queue[asyncio.Task[GenerationOutput]] = asyncio.Queue()
        tasks = [asyncio.create_task(self._answer(request)) for request in requests]
        self._tasks.update(tasks)
        for task in tasks:
            task.add_done_callback(finished_tasks.put_nowait)
        unanswered_count = len(tasks)
        try:
            while unanswered_count:
                batch = [await finished_tasks.get()]
                while not finished_tasks.empty():  # answers that came together leave in one list
                    batch.append(finished_tasks.get_nowait())
                unanswered_count -= len(batch)
                yield [task.result() for task in batch]
        finally:
            for task in tasks:
                task.cancel()
                self._tasks.discard(task)
                if task.done() and not task.cancelled():
                    # A server's failure ends many tasks, and only the first error is raised:
                    # asyncio would log the others as never retrieved.
                    task.exception()

    async def _answer(self, request: GenerationRequest) -> GenerationOutput:
        """The answer to a request; a rejection by the server is an error of that request alone.

        A request without a token is sent again after a weight update.
        """
        name = request.request_id
        try:
            while True:
                pending = self._requests[name] = RemoteRequest(request, self.version)
                self._watch()
                pending.task = asyncio.create_task(self._generate(pending))
                try:
                    await asyncio.wait({pending.task})
                    if not pending.left:
                        return pending.task.result()
                    if pending.left == "ended":
                        return GenerationOutput(name, finish_reason="abort")
                finally:
                    pending.task.cancel()
                    del self._requests[name]
                    self._watch()
        except EngineFailedError:
            raise
        except Exception as error:
            return refusal(request, RequestFailedError(str(error)))

    def _ended(self, pending: RemoteRequest, reason: FinishReason, spans: Any) -> GenerationOutput:  # noqa: ANN401
        """The complete answer.

        Args:
            spans: JSON of the server, as ``versions_of`` reads it.
        """
        name = pending.request.request_id
        count = len(pending.tokens)
        versions = versions_of(spans, count)
        if versions is None:
            raise self._server.failure(
                "it reports a weight version that this run never sent: it was restarted, or another run uses it"
            )
        self._finished_tokens += count
        return GenerationOutput(
            name,
            ints(pending.tokens),
            floats(pending.logprobs),
            versions,
            reason,
        )

    def _salt(self, version: int) -> str:
        """A salt of cache keys: a prompt finds no blocks that other weights have computed."""
        return f"run {self._run_id} version {version}"

    async def heartbeat(self) -> None:
        await self._server.get(self.core_route)

    async def progress(self) -> list[GenerationOutput]:
        """New tokens; of a request that runs during an update, only tokens from before it."""
        await self.heartbeat()
        outputs = []
        for pending in self._requests.values():
            output = pending.progress()
            if output is not None:
                outputs.append(output)
        return outputs

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Waits for ``resume`` while paused. Sequences are shorter than ``max_model_len``."""

        async def scored(sequence: Sequence[int]) -> list[float]:
            while len(sequence) > 1:  # until neither a weight update nor pause("abort") has cut it
                scores = await self._score(sequence)
                if scores is not None:
                    return scores
            return []

        return await asyncio.gather(*map(scored, sequences))

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        names = set(self._requests if request_ids is None else request_ids)
        with_tokens = []
        for name, pending in self._requests.items():
            if name not in names:
                continue
            if pending.tokens:  # the server's last chunk has the reason and the versions
                with_tokens.append(pending)
            else:
                pending.leave("ended")
        if with_tokens:
            await self._abort(with_tokens)

    # -- control
    # ------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "keep") -> None:
        async with self._control:
            await self._set_paused(mode)

    async def resume(self) -> None:
        async with self._control:
            await self._set_paused(None)

    async def _set_paused(self, mode: PauseMode | None) -> None:
        await self._schedule(mode)
        self._paused.switch(mode is not None)
        self._watch()

    async def update_weights(self, update: WeightUpdate) -> list[str] | None:
        """A server that is not paused is paused ("keep") for the update.

        Raises:
            WeightSyncError: if the server is healthy and has not loaded the weights.
        """
        if update.backend != "shared_memory":
            raise UserError(
                f"servers of generator.engines take weights from a file, not by {update.backend}"
            )
        self._content.begin(update)
        async with self._control:
            was_paused = self._paused.on
            if not was_paused:
                await self._set_paused("keep")
            try:
                unproven = await self._load(update)
            except (EngineFailedError, RuntimeError) as error:
                # A server may close the connection at an internal error: one whose core still
                # answers is healthy, but its layers may lack their weights.
                await self._server.get(self.core_route)
                raise WeightSyncError(
                    f"{self._server.name} has rejected the weights of version {update.version} (its own log says why) "
                    f"and must be started again: {error}"
                ) from error
            self.version = update.version
            self._content.complete(update)
            for pending in self._requests.values():
                # Tokens that are on their way may be of either version.
                if not pending.tokens:
                    pending.leave("again")
                elif pending.certain is None:
                    pending.certain = len(pending.tokens)
            if not was_paused:
                await self._set_paused(None)
            return unproven

    # -- watching
    # -----------------------------------------------------------------------------------------

    async def stats(self) -> EngineStats:
        token_counts = [len(pending.tokens) for pending in self._requests.values()]
        running_count = sum(map(bool, token_counts))
        return EngineStats(
            running=running_count,
            waiting=len(token_counts) - running_count,
            generated_tokens=self._finished_tokens + sum(token_counts),
            busy_s=self._busy.seconds,
            paused_s=self._paused.seconds,
            cache_tokens=self._cache_tokens,
            cache_used=await self._cache_used() if self._cache_tokens else None,
        )

    def _watch(self) -> None:
        self._busy.switch(bool(self._requests) and not self._paused.on)

    # -- checks before the start
    # --------------------------------------------------------------------------

    @classmethod
    def foreign(cls, url: str, reason: str) -> str:
        return f"generator.engines: {url} is no {cls.kind} server ({reason}); {cls.how_to_start}"

    @staticmethod
    def mismatch(
        url: str,
        config: EngineConfig,
        *,
        longest: int,
        length: str,
        kwargs: JSON,
        kwargs_flag: str,
        dtype: str,
    ) -> str:
        """The first setting in which the server differs from the run; empty if none does.

        Args:
            longest: tokens of a sequence at the server.
            length: the argument that sets ``longest``.
            kwargs: the server's changes of the model's configuration.
            kwargs_flag: the argument that sets ``kwargs``.
            dtype: in which the server computes.
        """
        if longest < config.max_model_len:
            return (
                f"generator.engines: {url} has room for {longest} tokens per sequence, and generator.max_model_len="
                f"{config.max_model_len} needs more: start it with {length}, or set generator.max_model_len={longest}"
            )
        target = overrides_of(config.model_path, config.extra.get("config_kwargs", {}))
        if target != kwargs:
            return (
                f"generator.engines: {url} was started with {kwargs_flag} {json.dumps(kwargs)}, and "
                f"trainer.policy.model.config_kwargs come to {json.dumps(target)}: start it with that"
            )
        if "auto" not in (dtype, config.dtype) and config.dtype != dtype:
            return (
                f"generator.engines: {url} computes in {dtype}, and generator.dtype is {config.dtype}: start it with "
                f"--dtype {config.dtype}, or set generator.dtype={dtype}"
            )
        return ""


def check_servers(
    urls: list[str],
    config: EngineConfig,
    weight_sync_dir: str = "",
    backend: str = "vllm_server",
) -> None:
    """Raises ``UserError`` for the first server that does not answer or cannot be an engine.

    Blocks.
    """
    engine: type[RemoteEngine] = ENGINES.find(backend)
    if weight_sync_dir and not os.access(weight_sync_dir, os.W_OK):
        raise UserError(f"generator.weight_sync_dir={weight_sync_dir} is not a writable folder")
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for url in urls:
        address = urlsplit(url)
        if (
            address.scheme not in ("http", "https")
            or not address.hostname
            or address.path not in ("", "/")
        ):
            raise UserError(
                f"generator.engines: {url!r} is not the address of a server, such as http://127.0.0.1:8000"
            )
        request = urllib.request.Request(
            f"{url.rstrip('/')}{INFO}?config_format=json", headers=headers
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
                info = json.load(response)
        except urllib.error.HTTPError as error:
            if error.code == 401:
                key_problem = "rejected the key in" if key else "needs a key: set"
                raise UserError(
                    f"generator.engines: {url} {key_problem} {KEY_VARIABLE} (HTTP 401): use the value that the server has"
                ) from None
            raise UserError(engine.foreign(url, f"{INFO} answers {error.code}")) from None
        except OSError as error:
            # urllib wraps the errors of the connection, and does not wrap those of the reading.
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise UserError(
                f"generator.engines: {url} does not answer ({reason}); {engine.how_to_start}"
            ) from None
        except ValueError:
            raise UserError(engine.foreign(url, f"{INFO} is not JSON")) from None
        if not isinstance(info, dict):
            info = {}
        problem = engine.complaint(url, info, config)
        if problem:
            raise UserError(problem)

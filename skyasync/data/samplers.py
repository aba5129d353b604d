"""Which prompts of the stream are taken: a curriculum by what their groups have earned.

    stream (a function of seed and position) ──▶ offered ──chance──▶ taken, at a position of the run
                                                    └──▶ passed over; offered again in the next pass

A sampler thins the prompt stream out: it says with what chance a prompt is taken when its turn
comes. So prompts keep the stream's order and identities, whatever a sampler does, and none is in
the run twice.

Pure: no I/O, no clock. Invariant: what is taken is a function of the seed and of the groups that
were trained, in their order. A group that arrives late counts when it is trained, so that a
checkpoint holds the same as the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isnan, nan
from typing import Any

import numpy as np

from skyasync.config.schema import Config
from skyasync.data.prompts import PromptStream
from skyasync.errors import UserError
from skyasync.registry import Registry
from skyasync.rollout.types import Prompt, PromptId

MOST_OFFERED = 1000  # for one position; then a prompt is taken whatever its chance
MEMORY = 0.7  # of a row's earlier samples, when it is sampled again: the policy has changed
FLOOR = 0.05  # of a chance: a prompt that is always or never solved is tried in one of 20 passes
POOL_MEMORY = 0.98  # of a pool's earlier groups

SAMPLERS = Registry("sampler", [__name__])


@SAMPLERS.register("uniform")
class PromptSampler:
    """The interface of a sampler, which takes every prompt. Your own:
    ``data.sampler=file.py:Class``.

    Args:
        cfg: the run's configuration.
    """

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg

    def chance(self, prompt: Prompt) -> float:
        """With what chance the prompt is taken now, from 0 to 1."""
        return 1.0

    def observe(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """A group of this prompt has been trained, or rejected, with these rewards; failed episodes
        are left out."""

    def state_dict(self) -> Mapping[str, Any]:
        """What checkpoints keep of it: numbers, strings, booleans, None, and lists and mappings of
        them.

        Keys of mappings are text when they are loaded.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave to the checkpoint that the run resumes from."""


@SAMPLERS.register("pass_rate")
class PassRateSampler(PromptSampler):
    """Prefers prompts whose samples are right about half of the time.

    The chance of a prompt with pass rate p is 4 p (1 - p), and ``FLOOR`` at least: the variance of
    its rewards, which a group's advantages have, in proportion to its largest value. Prompts that
    are always right or always wrong have no advantages; the floor tries them again now and then.

    The pass rate is that of the row's own samples, later ones weighing more. One more sample counts
    as the rate of the row's pool (``data.sampler_pool_key``): so rows that have not been sampled
    yet are judged by others of their pool.

    Sources: p (1 - p) is the "learnability" of Rutherford et al. 2024 (arXiv 2408.15099), taken to
    language models by Foster and Foerster 2025 (2502.12272); filtering by pass rates during a run
    is Bae et al. 2025 (2504.03380).
    """

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self._rows: dict[
            str, list[float]
        ] = {}  # row -> samples and right ones, earlier ones discounted
        self._pools: dict[str, list[float]] = {}

    def pool(self, prompt: Prompt) -> str:
        """The pool that a prompt belongs to."""
        key = self.cfg.data.sampler_pool_key
        if key:
            return str(prompt.extras.get(key, ""))
        return ""

    def pass_rate(self, prompt: Prompt) -> float:
        """As estimated now; 1/2 if nothing is known."""
        samples, right = self._pools.get(self.pool(prompt), (0.0, 0.0))
        of_pool = (right + 1) / (samples + 2)
        samples, right = self._rows.get(str(prompt.id.row), (0.0, 0.0))
        return (right + of_pool) / (samples + 1)

    def chance(self, prompt: Prompt) -> float:
        rate = self.pass_rate(prompt)
        return max(4 * rate * (1 - rate), FLOOR)

    def observe(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        right = sum(reward >= self.cfg.data.sampler_passing for reward in rewards)
        for table, name, memory in (
            (self._rows, str(prompt.id.row), MEMORY),
            (self._pools, self.pool(prompt), POOL_MEMORY),
        ):
            before = table.get(name, [0.0, 0.0])
            table[name] = [memory * before[0] + len(rewards), memory * before[1] + right]

    def state_dict(self) -> Mapping[str, Any]:
        return {"rows": self._rows, "pools": self._pools}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rows = dict(state["rows"])
        self._pools = dict(state["pools"])


class SampledStream(PromptStream):
    """The prompts of a stream that a sampler takes, by their positions in the run.

    Attributes:
        offered: prompts whose turn has come.
        total: prompts of the run.
    """

    def __init__(
        self, stream: PromptStream, sampler: PromptSampler, batch_size: int, seed: int
    ) -> None:
        self._stream = stream
        self._sampler = sampler
        self._batch_size = batch_size
        self._seed = seed
        self.total = stream.total
        self.rows = stream.rows
        self.offered = 0
        self._next = 0  # the first position that has no prompt yet
        self._taken_from: dict[
            int, int
        ] = {}  # position in the run -> in the stream, until it is trained

    def prompt(self, position: int) -> Prompt:
        while self._next <= position:
            self._taken_from[self._next] = self._take()
            self._next += 1
        return self._stream.prompt(self._taken_from[position])

    def _take(self) -> int:
        for _ in range(MOST_OFFERED):
            place = self.offered
            self.offered += 1
            prompt = self._stream.prompt(place)
            returned: Any = self._sampler.chance(prompt)
            try:
                chance = float(returned)
            except (TypeError, ValueError):
                chance = nan
            if isnan(chance):  # no prompt would be taken by it
                name = type(self._sampler).__name__
                raise UserError(f"{name}.chance returned {returned!r} for {prompt.id}: no number")
            if np.random.default_rng((self._seed, place, 1)).random() < chance:
                break
        return place

    def preview(self, position: int) -> Prompt:
        return self._stream.preview(position)

    def of_identity(self, identity: PromptId) -> Prompt:
        return self._stream.of_identity(identity)

    @property
    def digest(self) -> str:
        return self._stream.digest

    def observe(
        self, results: Sequence[tuple[Prompt, Sequence[float]]], position: int
    ) -> dict[str, float]:
        for prompt, rewards in results:
            if rewards:
                self._sampler.observe(prompt, rewards)
        self._taken_from = {
            each: place for each, place in self._taken_from.items() if each >= position
        }
        if self.offered:
            return {"sampler/taken": self._next / self.offered}
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        taken = [[position, place] for position, place in self._taken_from.items()]
        state = dict(self._sampler.state_dict())
        if type(self._sampler) is not PassRateSampler:  # whose state is plain, and may be large
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"{type(self._sampler).__name__}.state_dict() returns what a checkpoint cannot keep ({error}): it "
                    f"may hold numbers, strings, booleans, None, lists and mappings"
                ) from error
        return {"offered": self.offered, "next": self._next, "taken": taken, "sampler": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.offered = state["offered"]
        self._next = state["next"]
        self._taken_from = dict(state["taken"])
        self._sampler.load_state_dict(state["sampler"])

    def mark(self, position: int) -> list[int]:
        return self._stream.mark(min(self._taken_from.values(), default=self.offered))

    def go_on(self, mark: Sequence[int]) -> None:
        self._stream.go_on(mark)

"""Samplers choose prompts of the stream: a curriculum by the rewards of their groups.

    stream (a function of seed and position) ──▶ offered ──chance──▶ taken, at a position of the run
                                                    └──▶ passed over; offered again in the next pass

A sampler thins the prompt stream out: it gives the chance with which a prompt is taken when its
turn comes. So prompts keep the stream's order and identities, whatever a sampler does, and none is in
the run twice.

Pure: no I/O, no clock. Invariant: the choice is a function of the seed and of the groups that were
trained, in their order. A group that arrives late counts when it is trained, so that a
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

MAX_OFFERED = 1000  # for one position: then a prompt is taken at any chance, so that a run goes on
MEMORY = 0.7  # of a row's earlier samples, when it is sampled again: the policy has changed
FLOOR = 0.05  # of a chance: a prompt that is always or never solved is tried in one of 20 passes
POOL_MEMORY = 0.98  # of a pool's earlier groups

SAMPLERS = Registry("sampler", [__name__])


@SAMPLERS.register("uniform")
class PromptSampler:
    """The interface of a sampler (``data.sampler=file.py:Class``); this one takes every prompt.

    Args:
        cfg: the run's configuration.
    """

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg

    def chance(self, prompt: Prompt) -> float:
        """The chance with which the prompt is taken now, from 0 to 1."""
        return 1.0

    def observe(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """Note the rewards of a group that has been trained or rejected.

        Args:
            rewards: of its episodes, without those that failed.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """The state for checkpoints: numbers, strings, booleans, None, lists and mappings.

        Keys of mappings are text when they are loaded.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the ``state_dict`` of the checkpoint that the run resumes from."""


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
        # By row and by pool: samples and right ones, earlier ones discounted.
        self._rows: dict[str, list[float]] = {}
        self._pools: dict[str, list[float]] = {}

    def pool(self, prompt: Prompt) -> str:
        """The pool that a prompt belongs to."""
        key = self.cfg.data.sampler_pool_key
        if key:
            return str(prompt.extras.get(key, ""))
        return ""

    def pass_rate(self, prompt: Prompt) -> float:
        """The current estimate; 1/2 without any samples."""
        samples, right = self._pools.get(self.pool(prompt), (0.0, 0.0))
        pool_rate = (right + 1) / (samples + 2)  # as if one sample were right and one wrong
        samples, right = self._rows.get(str(prompt.id.row), (0.0, 0.0))
        return (right + pool_rate) / (samples + 1)

    def chance(self, prompt: Prompt) -> float:
        rate = self.pass_rate(prompt)
        return max(4 * rate * (1 - rate), FLOOR)

    def observe(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        right = sum(reward >= self.cfg.data.sampler_passing for reward in rewards)
        _add_samples(self._rows, str(prompt.id.row), MEMORY, len(rewards), right)
        _add_samples(self._pools, self.pool(prompt), POOL_MEMORY, len(rewards), right)

    def state_dict(self) -> Mapping[str, Any]:
        return {"rows": self._rows, "pools": self._pools}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rows = dict(state["rows"])
        self._pools = dict(state["pools"])


def _add_samples(
    table: dict[str, list[float]], name: str, memory: float, count: int, right: int
) -> None:
    earlier_count, earlier_right = table.get(name, (0.0, 0.0))
    table[name] = [memory * earlier_count + count, memory * earlier_right + right]


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
        # Position in the run -> position in the stream, until it is trained.
        self._stream_positions: dict[int, int] = {}

    def prompt(self, position: int) -> Prompt:
        while self._next <= position:
            self._stream_positions[self._next] = self._take()
            self._next += 1
        return self._stream.prompt(self._stream_positions[position])

    def _take(self) -> int:
        """Offer prompts until one is taken; returns its position in the stream."""
        for _ in range(MAX_OFFERED):
            position = self.offered
            self.offered += 1
            # A generator of its own for each position: the choice does not depend on the others.
            random = np.random.default_rng((self._seed, position, 1)).random()
            if random < self._chance(self._stream.prompt(position)):
                break
        return position

    def _chance(self, prompt: Prompt) -> float:
        """The sampler's chance. Raises ``UserError`` if a user's class returns no number."""
        value: Any = self._sampler.chance(prompt)
        try:
            chance = float(value)
        except (TypeError, ValueError):
            chance = nan
        if isnan(chance):  # no prompt would be taken by it
            name = type(self._sampler).__name__
            raise UserError(f"{name}.chance returned {value!r} for {prompt.id}: no number")
        return chance

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
        for run_position in list(self._stream_positions):
            if run_position < position:
                del self._stream_positions[run_position]
        if self.offered:
            return {"sampler/taken": self._next / self.offered}
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        positions = list(map(list, self._stream_positions.items()))
        state = dict(self._sampler.state_dict())
        # The library's sampler has plain state, which may be large: it is not tried.
        if type(self._sampler) is not PassRateSampler:
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"{type(self._sampler).__name__}.state_dict() returns what a checkpoint cannot keep ({error}): it "
                    f"may hold numbers, strings, booleans, None, lists and mappings"
                ) from error
        return {"offered": self.offered, "next": self._next, "taken": positions, "sampler": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.offered = state["offered"]
        self._next = state["next"]
        self._stream_positions = dict(state["taken"])
        self._sampler.load_state_dict(state["sampler"])

    def mark(self, position: int) -> list[int]:
        # Of the earliest prompt that may be needed again.
        return self._stream.mark(min(self._stream_positions.values(), default=self.offered))

    def seek(self, mark: Sequence[int]) -> None:
        self._stream.seek(mark)

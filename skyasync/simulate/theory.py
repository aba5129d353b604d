"""What a step should take: derived from when a batch's groups are complete, without running a plan.

A batch's n groups are complete at C_1 <= ... <= C_n after its start, where slots are filled in
order of arrival; the i-th of them then takes t_i to train. G = C_n is the generation of the batch
with its tail, T = t_1 + ... + t_n its training, S the weight sync. A step takes

    sync           G + T + S                                nothing overlaps
    one_step_off   max(G', T) + S                           G' of the next batch
    streamed       max over k of (C_k + t_k + ... + t_n) + S

The last is the recursion F_i = max(F_{i-1}, C_i) + t_i with F_0 = 0, of a queue with one server,
written out: k is the last group that the trainer has waited for. So it is max(G + t_n, C_1 + T) + S
at least and G + T + S at most. Expectations are means over drawn batches.

Not here: ``fully_async``, whose batches have no beginning, several updates or groups at a time, and
decode steps that take longer with more sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skyasync.simulate.run import train_s_per_token
from skyasync.simulate.settings import SimulationConfig, draw_lengths

Array = NDArray[np.float64]
BATCHES = 500  # drawn for an expectation, which is then good to about half a percent
_SEED = 1  # other batches than those that are simulated


@dataclass(frozen=True)
class DrawnBatches:
    """``complete_s`` and ``training_s`` are ``[batches, groups]``, in the order in which groups are
    complete."""

    complete_s: Array
    training_s: Array


def _streamed(batches: DrawnBatches) -> Array:
    remaining = np.cumsum(batches.training_s[:, ::-1], axis=1)[:, ::-1]
    longest: Array = (batches.complete_s + remaining).max(1)
    return longest


FORMULAS: dict[str, Callable[[DrawnBatches], Array]] = {
    "sync": lambda batches: batches.complete_s[:, -1] + batches.training_s.sum(1),
    "one_step_off": lambda batches: np.maximum(
        np.roll(batches.complete_s[:, -1], -1), batches.training_s.sum(1)
    ),
    "streamed": _streamed,
}


def expected_step_s(cfg: SimulationConfig, plan: str) -> float | None:
    """Mean seconds of a step; None where there is no formula."""
    trainer = cfg.trainer
    several = cfg.trainer.sync_interval > 1 or cfg.trainer.policy_mini_batch_size > 0
    several |= plan == "streamed" and trainer.stream_groups > 0
    if (
        plan not in FORMULAS
        or several
        or trainer.async_queue_size != 1
        or cfg.simulate.token_s_per_sequence
    ):
        return None
    return float(FORMULAS[plan](draw_batches(cfg)).mean()) + cfg.simulate.sync_s


def draw_batches(cfg: SimulationConfig, count: int = BATCHES) -> DrawnBatches:
    """Batches of lengths from the distribution that the simulation draws from."""
    settings = cfg.simulate
    samples = cfg.generator.n_samples_per_prompt
    shape = (count, cfg.trainer.train_batch_size * samples)
    lengths = np.random.default_rng(_SEED).choice(draw_lengths(settings, cfg.trainer.seed), shape)
    seconds = (lengths + settings.prefill * settings.prompt_length) * settings.token_s
    times = completion_times(seconds, cfg.generator.num_inference_engines, settings.slots)
    complete = times.reshape(count, -1, samples).max(2)
    training = lengths.reshape(count, -1, samples).sum(2) * train_s_per_token(cfg)
    order = complete.argsort(axis=1, kind="stable")
    return DrawnBatches(
        np.take_along_axis(complete, order, 1), np.take_along_axis(training, order, 1)
    )


def completion_times(seconds: Array, engines: int, slots: int) -> Array:
    """When each sequence ends, ``[batches, sequences]`` as given: engines in turn, each slot as it
    comes free."""
    times = np.empty_like(seconds)
    for engine in range(engines):
        mine = seconds[:, engine::engines]
        free = np.zeros((len(mine), slots))
        rows = np.arange(len(mine))
        for number in range(mine.shape[1]):
            slot = free.argmin(1)
            free[rows, slot] += mine[:, number]
            times[:, engine + number * engines] = free[rows, slot]
    return times

"""The time of a step, derived from the completion times of a batch's groups, without a plan.

A batch's n groups are complete at C_1 <= ... <= C_n after its start, if slots are filled in order
of arrival; the i-th of them then takes t_i to train. G = C_n is the generation of the batch with
its stragglers, T = t_1 + ... + t_n its training, S the weight sync. A step takes

    sync           G + T + S                                nothing overlaps
    one_step_off   max(G', T) + S                           G' of the next batch
    streamed       max over k of (C_k + t_k + ... + t_n) + S

The last is the recursion F_i = max(F_{i-1}, C_i) + t_i with F_0 = 0, of a queue with one server:
k is the last group that the trainer has waited for. So it is max(G + t_n, C_1 + T) + S at least and
G + T + S at most. Expectations are means over sampled batches.

There is no formula for ``fully_async``, whose batches have no beginning, for several updates or
groups at a time, and for decode steps that take longer with more sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skyasync.simulate.run import train_s_per_token
from skyasync.simulate.settings import SimulationConfig, draw_lengths

Array = NDArray[np.float64]
BATCHES = 500  # sampled for an expectation, which is then good to about half a percent
_SEED = 1  # other batches than those that are simulated


@dataclass(frozen=True)
class DrawnBatches:
    """Sampled batches, with the groups of each in the order in which they are complete.

    Attributes:
        complete_s: C_i, ``[batches, groups]``.
        training_s: t_i, ``[batches, groups]``.
    """

    complete_s: Array
    training_s: Array

    @property
    def generation_s(self) -> Array:
        """G, ``[batches]``."""
        return self.complete_s[:, -1]

    @property
    def total_training_s(self) -> Array:
        """T, ``[batches]``."""
        total_s: Array = self.training_s.sum(1)
        return total_s


def _sync(batches: DrawnBatches) -> Array:
    return batches.generation_s + batches.total_training_s


def _one_step_off(batches: DrawnBatches) -> Array:
    next_generation_s = np.roll(batches.generation_s, -1)
    return np.maximum(next_generation_s, batches.total_training_s)


def _streamed(batches: DrawnBatches) -> Array:
    # t_k + ... + t_n for every k: sums from the last group backwards.
    backwards = batches.training_s[:, ::-1]
    remaining = np.cumsum(backwards, axis=1)[:, ::-1]
    longest: Array = (batches.complete_s + remaining).max(1)
    return longest


#: Plan -> seconds of each batch's step without the weight sync, ``[batches]``.
FORMULAS: dict[str, Callable[[DrawnBatches], Array]] = {
    "sync": _sync,
    "one_step_off": _one_step_off,
    "streamed": _streamed,
}


def expected_step_s(cfg: SimulationConfig, plan: str) -> float | None:
    """Mean seconds of a step; None if there is no formula."""
    trainer = cfg.trainer
    several_updates = trainer.sync_interval > 1 or trainer.policy_mini_batch_size > 0
    several_groups = plan == "streamed" and trainer.stream_groups > 0
    if plan not in FORMULAS or several_updates or several_groups:
        return None
    if trainer.async_queue_size != 1 or cfg.simulate.token_s_per_sequence:
        return None
    step_s = FORMULAS[plan](draw_batches(cfg))
    return float(step_s.mean()) + cfg.simulate.sync_s


def draw_batches(cfg: SimulationConfig, count: int = BATCHES) -> DrawnBatches:
    """Sample batches of lengths from the distribution of the simulation."""
    settings = cfg.simulate
    samples = cfg.generator.n_samples_per_prompt
    shape = (count, cfg.trainer.train_batch_size * samples)
    rng = np.random.default_rng(_SEED)
    lengths = rng.choice(draw_lengths(settings, cfg.trainer.seed), shape)  # [batches, sequences]
    decode_steps = lengths + settings.prefill * settings.prompt_length
    times = completion_times(
        decode_steps * settings.token_s, cfg.generator.num_inference_engines, settings.slots
    )
    # [batches, groups, samples] -> [batches, groups]
    complete = times.reshape(count, -1, samples).max(2)
    training = lengths.reshape(count, -1, samples).sum(2) * train_s_per_token(cfg)
    order = complete.argsort(axis=1, kind="stable")
    return DrawnBatches(
        np.take_along_axis(complete, order, 1), np.take_along_axis(training, order, 1)
    )


def completion_times(seconds: Array, engines: int, slots: int) -> Array:
    """The times at which sequences end; engines get them in turn, and slots as they become free.

    Args:
        seconds: of each sequence, ``[batches, sequences]``.

    Returns:
        ``[batches, sequences]``, in the same order.
    """
    times = np.empty_like(seconds)
    for engine in range(engines):
        durations = seconds[:, engine::engines]
        batches = len(durations)
        free_at = np.zeros((batches, slots))
        rows = np.arange(batches)
        for number in range(durations.shape[1]):
            slot = free_at.argmin(1)  # [batches]
            free_at[rows, slot] += durations[:, number]
            times[:, engine + number * engines] = free_at[rows, slot]
    return times

"""Minutes to a target reward: the steps that the law of learning asks for, at the speed that a plan has in simulation.

Invariant: a plan's seconds per step and its staleness come from one simulation, with the costs given, of the split that
would run; the same laws, fitted on the same pilot runs, judge all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from skyasync.config.load import load_config, origins
from skyasync.config.values import written
from skyasync.errors import UserError
from skyasync.observability.jsonl import read_rows
from skyasync.observability.report.settings import read as read_settings
from skyasync.simulate.learning import LearningLaw
from skyasync.simulate.run import Outcome, simulate, train_s_per_token, work
from skyasync.simulate.settings import SimulationConfig, draw_lengths
from skyasync.simulate.theory import draw_batches
from skyasync.trainer.plans import PLANS

BATCHES = 100  # drawn to compare the costs with
INTERVAL = (0.05, 0.95)
STALENESS_TRIED = (1, 2, 3, 4, 6, 8, 12, 16)
ENOUGH = 0.97  # of the best throughput found: more staleness for less than this gain is a bad trade
STEPS_TRIED = 40
_OF_RUN = (
    "trainer.train_batch_size",
    "trainer.seed",
    "trainer.placement.policy_num_nodes",
    "trainer.placement.policy_num_gpus_per_node",
    "generator.n_samples_per_prompt",
    "generator.num_inference_engines",
    "generator.inference_engine_tensor_parallel_size",
    "generator.max_num_seqs",
)


class Compared:
    """What the compared plans are, taken together."""

    asynchronous = True
    reads = tuple(sorted({path for about in PLANS.builtins().values() for path in about.can["reads"]}))


@dataclass(frozen=True)
class Candidate:
    """A plan on a split of the devices; ``bound`` is ``trainer.max_staleness``, None if the plan does not read it."""

    plan: str
    bound: int | None
    engines: int
    trainers: int


@dataclass(frozen=True)
class Forecast:
    """``steps`` and ``minutes`` to the target; ``low`` to ``high`` minutes hold 90% of the resampled laws.

    ``high`` is infinite if the reward does not rise by more than 5% of them. ``fastest`` is the share of all laws by
    which the target is reached, and by no other candidate faster.
    """

    candidate: Candidate
    step_s: float
    staleness: float
    steps: float
    minutes: float
    low: float
    high: float
    fastest: float


def configuration_of(run: Path, given: Sequence[str]) -> SimulationConfig:
    """The run's batch, devices and costs; ``given`` settings override them.

    Raises:
        UserError: if the folder has no settings of a run, or as ``read_run_costs``.
    """
    values = read_settings(run / "config.yaml")
    if not values:
        raise UserError(f"{run} is not a run's folder: it has no config.yaml")
    argv = [f"{key}={written(values[key])}" for key in _OF_RUN if values.get(key) is not None]
    measured = load_config(argv, schema=SimulationConfig, plan=Compared)
    read_run_costs(measured, run)
    cfg = load_config([*argv, *given], schema=SimulationConfig, plan=Compared)
    for name, value in vars(measured.simulate).items():
        if f"simulate.{name}" not in origins(cfg):
            setattr(cfg.simulate, name, value)
    return cfg


def read_run_costs(cfg: SimulationConfig, run: Path) -> None:
    """Costs as ``read_costs`` has them, for lengths that vary and for engines that a batch fills more than once.

    Lengths are log-normal, with the least sigma at which the longest of a batch is the one measured. A decode step
    takes what makes the generation of such batches as long as it was.

    Raises:
        UserError: if the run is not one of the sync plan.
    """
    read_costs(cfg, run)
    settings = cfg.simulate
    rows = [row for row in read_rows(run / "metrics.jsonl") if row.get("response/length_mean") is not None]
    mean, longest = median(row["response/length_mean"] for row in rows), settings.length_mean
    generate_s = settings.token_s * longest
    settings.slots = min(settings.slots, cfg.generator.max_num_seqs)
    settings.lengths, settings.length_mean, settings.token_s = "lognormal", mean, 1.0
    settings.length_max = int(max(row["response/length_max"] for row in rows))
    low, high = 0.0, 3.0
    while high - low > 0.01:
        settings.length_sigma = (low + high) / 2
        low, high = (low, settings.length_sigma) if _longest(cfg) >= longest - 0.5 else (settings.length_sigma, high)
    settings.token_s = generate_s / float(draw_batches(cfg, BATCHES).complete_s[:, -1].mean())
    settings.train_s_per_token *= longest / float(draw_lengths(settings, cfg.trainer.seed).mean())


def _longest(cfg: SimulationConfig) -> float:
    """Of a batch that has a slot for each sequence, on average."""
    cfg = deepcopy(cfg)
    cfg.simulate.slots = cfg.trainer.train_batch_size * cfg.generator.n_samples_per_prompt
    return float(draw_batches(cfg, BATCHES).complete_s[:, -1].mean())


def candidates(cfg: SimulationConfig, bounds: Sequence[int]) -> list[Candidate]:
    """Plans x bounds x splits of the same devices: as configured, balanced, and one engine's devices moved either way.

    Bounds that ``trainer.sync_interval`` exceeds are left out.

    Raises:
        UserError: if it exceeds all of them.
    """
    engines = cfg.generator.num_inference_engines
    splits = {engines - 1, engines, engines + 1, best_split(cfg).generator.num_inference_engines}
    allowed = [bound for bound in bounds if bound >= cfg.trainer.sync_interval - 1]
    if not allowed:
        raise UserError(
            f"trainer.sync_interval={cfg.trainer.sync_interval} lets samples age by {cfg.trainer.sync_interval - 1}, "
            f"more than any of the staleness bounds {', '.join(map(str, bounds))} allows"
        )
    return [
        Candidate(plan, bound, split, _devices(cfg) - split * cfg.generator.devices_per_engine)
        for plan in cfg.simulate.plans
        for bound in (allowed if "trainer.max_staleness" in PLANS.find(plan).reads else (None,))
        for split in sorted(splits.intersection(_splits(cfg)))
    ]


def _devices(cfg: SimulationConfig) -> int:
    return cfg.generator.num_inference_engines * cfg.generator.devices_per_engine + cfg.trainer.placement.policy_ranks


def _splits(cfg: SimulationConfig) -> range:
    """Numbers of engines that leave the trainer a device."""
    return range(1, (_devices(cfg) - 1) // cfg.generator.devices_per_engine + 1)


def forecast(
    cfg: SimulationConfig, chosen: Iterable[Candidate], law: LearningLaw, laws: Sequence[LearningLaw], target: float
) -> list[Forecast]:
    """Of each candidate, the fastest first.

    Args:
        law: the best fit.
        laws: the resampled ones, for the interval.
    """
    rows = []
    for candidate in chosen:
        own = deepcopy(cfg)
        own.generator.num_inference_engines = candidate.engines
        own.simulate.train_s_per_token = cfg.simulate.train_s_per_token
        own.trainer.placement.policy_num_nodes, own.trainer.placement.policy_num_gpus_per_node = 1, candidate.trainers
        own.trainer.max_staleness = candidate.bound or 0
        own.trainer.max_training_steps = max(STEPS_TRIED, 5 * own.trainer.max_staleness)
        outcome = simulate(own, candidate.plan)
        staleness = outcome.staleness_mean
        minutes = np.array([one.steps_to(target, staleness) for one in laws]) * outcome.step_s / 60
        rows.append((candidate, outcome.step_s, staleness, law.steps_to(target, staleness), minutes))
    best = np.min([minutes for *_, minutes in rows], axis=0)
    forecasts = []
    for candidate, step_s, staleness, steps, minutes in rows:
        low, high = map(float, np.quantile(minutes, INTERVAL, method="nearest"))  # of infinite ones there is no mean
        fastest = float(((minutes <= best) & np.isfinite(best)).mean())
        forecasts.append(Forecast(candidate, step_s, staleness, steps, steps * step_s / 60, low, high, fastest))
    return sorted(forecasts, key=lambda row: row.minutes)


def choose(forecasts: Sequence[Forecast]) -> Forecast:
    """The least stale of those that are about as fast as the fastest."""
    fastest = min(row.minutes for row in forecasts)
    return min(
        (row for row in forecasts if ENOUGH * row.minutes <= fastest), key=lambda row: (row.staleness, row.minutes)
    )


@dataclass(frozen=True)
class Advice:
    engines: int
    trainers: int
    max_staleness: int
    outcome: Outcome


def advise(cfg: SimulationConfig) -> Advice:
    """The split of all devices that balances the work, and the least staleness that fills it.

    Advice comes from simulating, with the costs given, the plan that would run; nothing is extrapolated.
    """
    cfg = best_split(cfg)  # a copy
    cfg.trainer.max_training_steps = min(cfg.trainer.max_training_steps, STEPS_TRIED)
    cfg.generator.generate_batch_size, cfg.trainer.async_generation_ratio = 0, 0.0
    tried: list[tuple[int, Outcome]] = []
    least = cfg.trainer.sync_interval - 1  # as much as samples age between two weight syncs
    for staleness in [each for each in STALENESS_TRIED if each >= least] or [least]:
        cfg.trainer.max_staleness = staleness
        tried.append((staleness, simulate(cfg, "fully_async")))
        if tried[-1][1].step_s <= work(cfg).step_s / ENOUGH:
            break
    best = max(outcome.samples_per_s for _, outcome in tried)
    staleness, outcome = next(row for row in tried if row[1].samples_per_s >= ENOUGH * best)
    return Advice(cfg.generator.num_inference_engines, cfg.trainer.placement.policy_ranks, staleness, outcome)


def best_split(cfg: SimulationConfig) -> SimulationConfig:
    """The same devices and costs, divided so that the longer of generation and training is shortest."""
    cfg = deepcopy(cfg)
    placement, devices, splits = cfg.trainer.placement, _devices(cfg), _splits(cfg)
    cfg.simulate.train_s_per_token = train_s_per_token(cfg) * cfg.trainer.placement.policy_ranks
    placement.policy_num_nodes = 1

    def step_s(engines: int) -> float:
        cfg.generator.num_inference_engines = engines
        placement.policy_num_gpus_per_node = devices - engines * cfg.generator.devices_per_engine
        return work(cfg).step_s

    step_s(min(splits, key=step_s))
    return cfg


def read_costs(cfg: SimulationConfig, run: Path) -> None:
    """Put what a finished synchronous run measured into ``cfg``: lengths, decoding, training, weight sync.

    ``cfg`` has the run's batch and devices. The batch is taken to fit its engines' slots, so a decode step is a batch's
    generation time by its longest response.

    Raises:
        UserError: if there is no such file or its steps lack what is needed.
    """
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(f"costs are read from the metrics of a run: there is no {metrics}")
    rows = read_rows(metrics)
    needed = ("time/generate_s", "time/train_s", "time/sync_s", "response/length_mean", "response/length_max")
    rows = [row for row in rows if all(name in row for name in needed)][1:]
    if not rows:
        raise UserError(
            f"costs are read from the metrics of a run: {metrics} has no two steps with {', '.join(needed)}"
        )
    if any(row.get("staleness/max", 0) for row in rows):
        raise UserError(f"costs are read from a run of the sync plan, whose phases do not overlap: {run} is of another")
    settings, samples = cfg.simulate, cfg.trainer.train_batch_size * cfg.generator.n_samples_per_prompt
    settings.lengths, settings.length_max, settings.prefill = "constant", 0, 0.0
    settings.length_mean = median(row["response/length_max"] for row in rows)
    settings.slots = -(-samples // cfg.generator.num_inference_engines)
    settings.token_s = median(row["time/generate_s"] / row["response/length_max"] for row in rows)
    train_s = median(row["time/train_s"] for row in rows)
    settings.train_s_per_token = train_s * cfg.trainer.placement.policy_ranks / (samples * settings.length_mean)
    settings.sync_s = median(row["time/sync_s"] for row in rows)

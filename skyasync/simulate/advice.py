"""What the simulator would choose, and what it learns from a finished run.

Invariant: advice comes from simulating, with the costs given, the plan that would run; nothing is extrapolated.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from skyasync.errors import UserError
from skyasync.observability.jsonl import read_rows
from skyasync.simulate.run import Outcome, simulate, train_s_per_token, work
from skyasync.simulate.settings import SimulationConfig

STALENESS_TRIED = (1, 2, 3, 4, 6, 8, 12, 16)
ENOUGH = 0.97  # of the best throughput found: more staleness for less than this gain is a bad trade
STEPS_TRIED = 40


@dataclass(frozen=True)
class Advice:
    engines: int
    trainers: int
    max_staleness: int
    outcome: Outcome


def advise(cfg: SimulationConfig) -> Advice:
    """The split of all devices that balances the work, and the least staleness that fills it."""
    cfg = best_split(cfg)  # a copy
    cfg.trainer.max_training_steps = min(cfg.trainer.max_training_steps, STEPS_TRIED)
    cfg.generator.generate_batch_size, cfg.trainer.async_generation_ratio = 0, 0.0
    tried: list[tuple[int, Outcome]] = []
    for staleness in STALENESS_TRIED:
        cfg.trainer.max_staleness = staleness
        tried.append((staleness, simulate(cfg, "fully_async")))
        if tried[-1][1].step_s <= work(cfg).step_s / ENOUGH:
            break
    best = max(outcome.samples_per_s for _, outcome in tried)
    staleness, outcome = next(row for row in tried if row[1].samples_per_s >= ENOUGH * best)
    placement = cfg.trainer.placement
    trainers = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    return Advice(cfg.generator.num_inference_engines, trainers, staleness, outcome)


def best_split(cfg: SimulationConfig) -> SimulationConfig:
    """The same devices and costs, divided so that the longer of generation and training is shortest."""
    cfg = deepcopy(cfg)
    placement = cfg.trainer.placement
    trainers = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    devices = cfg.generator.num_inference_engines + trainers
    cfg.simulate.train_s_per_token = train_s_per_token(cfg) * trainers
    placement.policy_num_nodes = 1

    def step_s(engines: int) -> float:
        cfg.generator.num_inference_engines, placement.policy_num_gpus_per_node = engines, devices - engines
        return work(cfg).step_s

    step_s(min(range(1, devices), key=step_s))
    return cfg


def read_costs(cfg: SimulationConfig, metrics: Path) -> None:
    """Put what a finished synchronous run measured into ``cfg``: lengths, decoding, training, weight sync.

    The run's batch is taken to fit its engines' slots, so a decode step is a batch's generation time by its longest
    response.

    Raises:
        UserError: if there is no such file or its steps lack what is needed.
    """
    if not metrics.is_file():
        raise UserError(f"simulate.from_run: there is no {metrics}")
    rows = read_rows(metrics)
    needed = ("time/generate_s", "time/train_s", "time/sync_s", "response/length_mean", "response/length_max")
    rows = [row for row in rows if all(name in row for name in needed)][1:]
    if not rows:
        raise UserError(f"simulate.from_run: {metrics} has no two steps with {', '.join(needed)}")
    if any(row.get("staleness/max", 0) for row in rows):
        raise UserError("simulate.from_run: costs are read from a run of the sync plan, whose phases do not overlap")
    settings, samples = cfg.simulate, cfg.trainer.train_batch_size * cfg.generator.n_samples_per_prompt
    placement = cfg.trainer.placement
    trainers = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    settings.lengths, settings.length_max, settings.prefill = "constant", 0, 0.0
    settings.length_mean = median(row["response/length_max"] for row in rows)
    settings.slots = -(-samples // cfg.generator.num_inference_engines)
    settings.token_s = median(row["time/generate_s"] / row["response/length_max"] for row in rows)
    train_s = median(row["time/train_s"] for row in rows)
    settings.train_s_per_token = train_s * trainers / (samples * settings.length_mean)
    settings.sync_s = median(row["time/sync_s"] for row in rows)

"""A recommended split of the devices, and the smallest staleness bound that keeps them busy."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

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
    """The split of all devices that balances the work, and the least staleness that fills it.

    Advice comes from simulating, with the costs given, the plan that would run; nothing is
    extrapolated.
    """
    cfg = best_split(cfg)  # a copy
    cfg.trainer.max_training_steps = min(cfg.trainer.max_training_steps, STEPS_TRIED)
    cfg.generator.generate_batch_size = 0
    cfg.trainer.async_generation_ratio = 0.0
    tried: list[tuple[int, Outcome]] = []
    least = cfg.trainer.sync_interval - 1  # as much as samples age between two weight syncs
    for staleness in [each for each in STALENESS_TRIED if each >= least] or [least]:
        cfg.trainer.max_staleness = staleness
        tried.append((staleness, simulate(cfg, "fully_async")))
        if tried[-1][1].step_s <= work(cfg).step_s / ENOUGH:
            break
    best = max(outcome.samples_per_s for _, outcome in tried)
    staleness, outcome = next(row for row in tried if row[1].samples_per_s >= ENOUGH * best)
    return Advice(
        cfg.generator.num_inference_engines, cfg.trainer.placement.policy_ranks, staleness, outcome
    )


def best_split(cfg: SimulationConfig) -> SimulationConfig:
    """The same devices and costs, divided so that the longer of generation and training is
    shortest."""
    cfg = deepcopy(cfg)
    placement = cfg.trainer.placement
    devices = _devices(cfg)
    splits = _splits(cfg)
    cfg.simulate.train_s_per_token = train_s_per_token(cfg) * cfg.trainer.placement.policy_ranks
    placement.policy_num_nodes = 1

    def step_s(engines: int) -> float:
        cfg.generator.num_inference_engines = engines
        placement.policy_num_gpus_per_node = devices - engines * cfg.generator.devices_per_engine
        return work(cfg).step_s

    step_s(min(splits, key=step_s))
    return cfg


def _devices(cfg: SimulationConfig) -> int:
    return (
        cfg.generator.num_inference_engines * cfg.generator.devices_per_engine
        + cfg.trainer.placement.policy_ranks
    )


def _splits(cfg: SimulationConfig) -> range:
    """Numbers of engines that leave the trainer a device."""
    return range(1, (_devices(cfg) - 1) // cfg.generator.devices_per_engine + 1)

"""A recommended split of the devices, and the smallest staleness bound that keeps them busy."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

from skyasync.simulate.run import Outcome, simulate, train_s_per_token, work
from skyasync.simulate.settings import SimulationConfig

STALENESS_TRIED = (1, 2, 3, 4, 6, 8, 12, 16)
# Fraction of the best throughput: more staleness for less than the rest is a bad trade.
ENOUGH = 0.97
STEPS_TRIED = 40  # for a mean over the steps after the pipeline is full


@dataclass(frozen=True)
class Advice:
    """A split of the devices, and the bound with its simulated outcome."""

    engines: int
    trainers: int
    max_staleness: int
    outcome: Outcome


def advise(cfg: SimulationConfig) -> Advice:
    """The split of all devices that balances the work, and the lowest staleness that fills it.

    The plan is simulated with the costs of ``cfg``; nothing is extrapolated.
    """
    cfg = best_split(cfg)  # a copy
    cfg.trainer.max_training_steps = min(cfg.trainer.max_training_steps, STEPS_TRIED)
    cfg.generator.generate_batch_size = 0
    cfg.trainer.async_generation_ratio = 0.0
    outcomes = {}
    lowest = cfg.trainer.sync_interval - 1  # the age of samples between two weight syncs
    candidates = [staleness for staleness in STALENESS_TRIED if staleness >= lowest] or [lowest]
    for staleness in candidates:
        cfg.trainer.max_staleness = staleness
        outcomes[staleness] = simulate(cfg, "fully_async")
        if outcomes[staleness].step_s <= work(cfg).step_s / ENOUGH:  # near the limit of all plans
            break
    best = max(outcome.samples_per_s for outcome in outcomes.values())
    staleness = next(s for s, row in outcomes.items() if row.samples_per_s >= ENOUGH * best)
    return Advice(
        cfg.generator.num_inference_engines,
        cfg.trainer.placement.policy_ranks,
        staleness,
        outcomes[staleness],
    )


def best_split(cfg: SimulationConfig) -> SimulationConfig:
    """The same devices and costs, divided so that the longer of generation and training is minimal.

    Returns:
        A copy of ``cfg`` with another number of engines and trainer devices.
    """
    cfg = deepcopy(cfg)
    placement = cfg.trainer.placement
    devices = _devices(cfg)
    splits = _splits(cfg)
    # Device-seconds, which do not depend on the split.
    cfg.simulate.train_s_per_token = train_s_per_token(cfg) * placement.policy_ranks
    placement.policy_num_nodes = 1

    def step_s(engines: int) -> float:
        cfg.generator.num_inference_engines = engines
        placement.policy_num_gpus_per_node = devices - engines * cfg.generator.devices_per_engine
        return work(cfg).step_s

    best_engines = min(splits, key=step_s)
    step_s(best_engines)  # sets it
    return cfg


def _devices(cfg: SimulationConfig) -> int:
    generator = cfg.generator
    engine_devices = generator.num_inference_engines * generator.devices_per_engine
    return engine_devices + cfg.trainer.placement.policy_ranks


def _splits(cfg: SimulationConfig) -> range:
    """Numbers of engines that leave the trainer a device."""
    return range(1, (_devices(cfg) - 1) // cfg.generator.devices_per_engine + 1)

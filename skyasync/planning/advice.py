"""Which keys make a plan fit.

Invariant: an advice has been planned itself, and fits; the fewest keys win, and of those the least
change.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from skyasync.config.check import check_config
from skyasync.config.schema import Config
from skyasync.planning.memory import Lengths, RankUse
from skyasync.planning.plan import Measure, MemoryPlan, make_plan
from skyasync.workers.roles import Role

Values = list[Any]

TRIED = 5
"""Settings that are measured, each for some seconds."""


def advise(cfg: Config, plan: MemoryPlan, measure: Measure) -> dict[str, Any]:
    """The keys and values that make it fit; empty where none of those tried do."""
    trial = copy.deepcopy(cfg)
    rough = _roughly(cfg, plan, measure)
    tried = 0
    for changes in _combinations(_choices(cfg, plan)):
        before = {key: attrgetter(key)(trial) for key in changes}
        for key, value in changes.items():
            _set(trial, key, value)
        if make_plan(trial, plan.model, plan.machine, rough, plan.vllm).fits and not check_config(
            trial
        ):
            if tried == TRIED:
                return {}
            if make_plan(trial, plan.model, plan.machine, measure, plan.vllm).fits:
                return changes
            tried += 1
        for key, value in before.items():
            _set(trial, key, value)
    return {}


def _roughly(cfg: Config, plan: MemoryPlan, measure: Measure) -> Measure:
    """What is known of ``cfg``, scaled to the tokens and ranks of others; with checkpointing or
    without is measured."""

    def scaled(trial: Config, role: Role, ranks: int) -> RankUse:
        base = copy.deepcopy(cfg)
        base.trainer.policy.gradient_checkpointing = trial.trainer.policy.gradient_checkpointing
        before = plan.processes[role.name]
        use = measure(base, role, before)
        tokens = trial.trainer.micro_batch_tokens
        return use.scaled(min(1.0, tokens / use.tokens) if tokens else 1.0, ranks / before)

    return scaled


def _choices(cfg: Config, plan: MemoryPlan) -> dict[str, Values]:
    """What may be changed, cheapest first, and to what, in growing distance from what it is."""
    generator = cfg.generator
    placement = cfg.trainer.placement
    longest = Lengths.of(cfg).total
    tokens = plan.rank.tokens
    per_node = max(1, plan.machine.gpus // placement.policy_num_nodes)
    choices: dict[str, Values] = {
        "trainer.policy.gradient_checkpointing": ["true"]
        if not plan.rank.checkpointing or cfg.trainer.policy.gradient_checkpointing == "selective"
        else [],
        "trainer.micro_batch_tokens": [n for n in _halves(tokens, longest) if n < tokens],
        "generator.gpu_memory_utilization": [
            u for u in (0.85, 0.9, 0.95) if u > generator.gpu_memory_utilization
        ],
        "generator.inference_engine_tensor_parallel_size": [
            n
            for n in _doubles(generator.inference_engine_tensor_parallel_size, per_node)
            if not plan.model.heads % n
        ],
        "trainer.placement.policy_num_gpus_per_node": list(
            range(placement.policy_num_gpus_per_node + 1, per_node + 1)
        ),
        "generator.num_inference_engines": list(_halves(generator.num_inference_engines, 1)),
        "generator.kv_cache_gb": [generator.kv_cache_gb / 2, generator.kv_cache_gb / 4],
    }
    without = ("generator.kv_cache_gb",) if plan.machine.gpus else (
        "generator.gpu_memory_utilization", "generator.inference_engine_tensor_parallel_size",
        "trainer.placement.policy_num_gpus_per_node",
    )  # fmt: skip
    if plan.gpus_requested > plan.machine.gpus:
        choices["trainer.placement.policy_num_gpus_per_node"] += _halves(
            placement.policy_num_gpus_per_node, 1
        )
    ranks = choices["trainer.placement.policy_num_gpus_per_node"]
    sharing = cfg.trainer.parallel
    choices["trainer.placement.policy_num_gpus_per_node"] = [
        n
        for n in ranks
        if n * placement.policy_num_nodes % (sharing.context * sharing.tensor * sharing.pipeline)
        == 0
    ]
    return {key: values for key, values in choices.items() if values and key not in without}


def _combinations(choices: dict[str, Values]) -> Iterator[dict[str, Any]]:
    for count in range(1, min(4, len(choices)) + 1):
        for keys in itertools.combinations(choices, count):
            steps = itertools.product(*(range(len(choices[key])) for key in keys))
            for step in sorted(steps, key=sum):
                yield {key: choices[key][i] for key, i in zip(keys, step, strict=True)}


def _halves(start: int, least: int) -> Iterator[int]:
    while start // 2 >= least:
        start //= 2
        yield start


def _doubles(start: int, most: int) -> Iterator[int]:
    while start * 2 <= most:
        start *= 2
        yield start


def _set(cfg: Config, key: str, value: object) -> None:
    group, _, name = key.rpartition(".")
    setattr(attrgetter(group)(cfg), name, value)

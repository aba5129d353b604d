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
from skyasync.planning.memory import Lengths
from skyasync.planning.plan import Measure, MemoryPlan, make_plan

Choices = dict[str, list[Any]]

MOST_KEYS = 3
"""Of an advice. With more of them, more or larger devices are the better advice."""

MOST_PLANS = 1000
"""Plans that are tried: a few milliseconds each, as measurements are shared."""

RANKS = "trainer.placement.policy_num_gpus_per_node"


def advise(cfg: Config, plan: MemoryPlan, measure: Measure) -> dict[str, Any]:
    """The keys and values that make it fit; empty where none of those tried do."""
    combinations = _combinations(_choices(cfg, plan))
    for changes in itertools.islice(combinations, MOST_PLANS):
        trial = copy.deepcopy(cfg)
        for key, value in changes.items():
            group, _, name = key.rpartition(".")
            setattr(attrgetter(group)(trial), name, value)
        if check_config(trial):  # the run would not start
            continue
        if make_plan(trial, plan.model, plan.machine, measure).fits:
            return changes
    return {}


def _choices(cfg: Config, plan: MemoryPlan) -> Choices:
    """What may be changed, cheapest first, and to what, in growing distance from what it is."""
    generator = cfg.generator
    placement = cfg.trainer.placement
    parallel = cfg.trainer.parallel
    choices: Choices = {}
    checkpointing = cfg.trainer.policy.gradient_checkpointing
    if not plan.rank.checkpointing or checkpointing == "selective":
        choices["trainer.policy.gradient_checkpointing"] = ["true"]
    choices["trainer.micro_batch_tokens"] = _halves(plan.rank.tokens, Lengths.of(cfg).total)
    if plan.machine.gpus:
        utilization = generator.gpu_memory_utilization
        larger = [value for value in (0.85, 0.9, 0.95) if value > utilization]
        choices["generator.gpu_memory_utilization"] = larger
        per_node = max(1, plan.machine.gpus // placement.policy_num_nodes)
        tensor = generator.inference_engine_tensor_parallel_size
        sizes = []
        for size in (2 * tensor, 4 * tensor, 8 * tensor):
            if size <= per_node and plan.model.heads % size == 0:
                sizes.append(size)
        choices["generator.inference_engine_tensor_parallel_size"] = sizes
        ranks = placement.policy_num_gpus_per_node
        counts = list(range(ranks + 1, per_node + 1))
        if plan.gpus_requested > plan.machine.gpus:  # otherwise fewer ranks need more memory each
            counts += _halves(ranks, 1)
        divisor = parallel.context * parallel.tensor * parallel.pipeline
        nodes = placement.policy_num_nodes
        choices[RANKS] = [count for count in counts if count * nodes % divisor == 0]
    choices["generator.num_inference_engines"] = _halves(generator.num_inference_engines, 1)
    if not plan.machine.gpus:
        cache = generator.kv_cache_gb
        choices["generator.kv_cache_gb"] = [cache / 2, cache / 4]
    return {key: values for key, values in choices.items() if values}


def _combinations(choices: Choices) -> Iterator[dict[str, Any]]:
    for count in range(1, MOST_KEYS + 1):
        for keys in itertools.combinations(choices, count):
            # The least change first: the fewest steps away from the settings.
            steps = itertools.product(*(range(len(choices[key])) for key in keys))
            for step in sorted(steps, key=sum):
                yield {key: choices[key][i] for key, i in zip(keys, step, strict=True)}


def _halves(start: int, minimum: int) -> list[int]:
    values = []
    while start // 2 >= minimum:
        start //= 2
        values.append(start)
    return values

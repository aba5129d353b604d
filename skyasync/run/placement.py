"""Which process gets which devices.

Invariant: the bundles are computed before anything starts, so that a cluster too small is an error
that says what is missing, and a local cluster is started large enough. A bundle is one GPU (or one
CPU slot on a machine without GPUs) for each rank and engine; parts that are colocated share
bundles. What is reserved under a name is returned by ``release``, from any process, also if the
owner has failed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.inference.settings import colocated_rank
from skyasync.workers.roles import POLICY, ROLES, Role

if TYPE_CHECKING:
    from skyasync.workers.rank_actors import WorkerPlacement

ENGINES = "engines"
HYBRID_ENGINES = "hybrid engines"


@dataclass(frozen=True)
class Slots:
    """Bundle numbers by role, and of the "engines"; ``share`` is the part of a bundle's devices
    that an actor takes."""

    bundles: tuple[dict[str, float], ...]
    of: Mapping[str, tuple[int, ...]]
    share: Mapping[str, float]


def plan_slots(cfg: Config, *, gpus: bool, roles: Sequence[Role]) -> Slots:
    """The bundles that a configuration needs, and who goes where.

    Args:
        roles: those of the run, the policy first.
    """
    generator = cfg.generator
    colocated = cfg.trainer.placement.colocate_all
    hybrid = generator.hybrid_engines if generator.own_engines else 0
    engines = generator.own_engines - hybrid
    bundles: list[dict[str, float]] = []
    of: dict[str, tuple[int, ...]] = {}

    def add(name: str, count: int, devices: int) -> None:
        bundles.extend([{"CPU": 1.0, "GPU": float(devices)} if devices else {"CPU": 1.0}] * count)
        of[name] = tuple(range(len(bundles) - count, len(bundles)))

    for role in roles:
        if role.colocated_if(cfg):
            of[role.name] = of[POLICY]
        else:
            add(role.name, role.size(cfg), int(gpus and role.gpu))
    policy = len(of.get(POLICY, ()))  # an experiment may have no workers
    if colocated:
        of[ENGINES] = tuple(colocated_rank(engine, policy) for engine in range(engines))
    else:
        add(ENGINES, engines, generator.devices_per_engine if gpus else 0)
    if hybrid:
        of[HYBRID_ENGINES] = tuple(colocated_rank(engine, policy) for engine in range(hybrid))
    sharing = [role.name for role in roles if role.name == POLICY or role.colocated_if(cfg)]
    per_slot = len(sharing) + (
        -(-(engines if colocated else hybrid) // policy) if colocated or hybrid else 0
    )
    shared = {*sharing, HYBRID_ENGINES, *([ENGINES] if colocated else [])}
    # Ray counts in units of 0.0001 and rounds to the nearest: rounded up, there is no space for the
    # last actor.
    share = {name: 10_000 // per_slot / 10_000 if name in shared else 1.0 for name in of}
    return Slots(tuple(bundles), of, share)


@dataclass(frozen=True)
class Placement:
    """Slots that Ray has granted.

    Args:
        bundles: Ray's bundle of each slot; by default the slot's number.
    """

    slots: Slots
    group: Any
    bundles: Sequence[int] = ()

    def bundle(self, slot: int) -> int:
        if self.bundles:
            return self.bundles[slot]
        return slot

    def options(self, role: str, index: int) -> dict[str, Any]:
        """Ray's actor options for the ``index``-th actor of a role, or of the "engines"."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        slot = self.slots.by_role[role][index]
        share = self.slots.share[role]
        bundle = self.slots.bundles[slot]
        return {
            "num_cpus": bundle["CPU"] * share,
            "num_gpus": bundle.get("GPU", 0.0) * share,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=self.bundle(slot)
            ),
        }

    def engine_options(self, index: int) -> dict[str, Any]:
        """Ray's actor options for an engine by its number; hybrid engines come last."""
        first_engine = len(self.slots.by_role[ENGINES])
        if index < first_engine:
            return self.options(ENGINES, index)
        return self.options(HYBRID_ENGINES, index - first_engine)

    def ranks(self, role: str) -> WorkerPlacement | None:
        """Where the ranks of a model go; None for a role that nothing needs."""
        from skyasync.workers.rank_actors import WorkerPlacement

        if role not in self.slots.by_role:
            return None
        slots = self.slots.by_role[role]
        share = self.slots.share[role]
        bundle = self.slots.bundles[slots[0]]
        return WorkerPlacement(
            group=self.group,
            bundles=[self.bundle(slot) for slot in slots],
            num_cpus=bundle["CPU"] * share,
            num_gpus=bundle.get("GPU", 0.0) * share,
        )


def reserve(slots: Slots, timeout_s: float, name: str = "") -> Placement:
    """Ask Ray for the bundles; blocks, so call it off the event loop.

    Args:
        name: for ``release``. Ray itself frees the bundles at the end of the program, not of the
            run.

    Raises:
        UserError: saying what was asked for and what the cluster has, if it is not granted in time.
    """
    from ray.util.placement_group import (
        placement_group,
        placement_group_table,
        remove_placement_group,
    )

    group = placement_group([dict(b) for b in slots.bundles], strategy="PACK", name=name)
    if not group.wait(timeout_s):
        remove_placement_group(group)
        raise too_small(slots, f"within {timeout_s:g} s (trainer.placement.timeout_s)")
    return Placement(
        slots, group, by_node(slots.bundles, placement_group_table(group)["bundles_to_node_id"])
    )


def by_node(bundles: Sequence[Mapping[str, float]], nodes: Mapping[int, str]) -> list[int]:
    """Ray's bundle for each slot, an equal one: neighbours are on one node, and nodes with most of
    them come first.

    Ray packs bundles on few nodes, and numbers them in any order.
    """
    result = list(range(len(bundles)))
    for kind in {tuple(sorted(bundle.items())) for bundle in bundles}:
        slots = [
            slot for slot, bundle in enumerate(bundles) if tuple(sorted(bundle.items())) == kind
        ]
        count = Counter(nodes[slot] for slot in slots)
        ordered = sorted(slots, key=lambda slot: (-count[nodes[slot]], nodes[slot], slot))
        for slot, bundle in zip(slots, ordered, strict=True):
            result[slot] = bundle
    return result


def too_small(slots: Slots, when: str) -> UserError:
    needed, available = resources(slots)
    return UserError(
        f"Ray did not grant {needed} {when}; there are {available} in all: use fewer ranks "
        f"(trainer.placement.policy_num_gpus_per_node) or engines (generator.num_inference_engines), let them take "
        f"turns on the same devices (trainer.placement.colocate_all=true, plan sync or colocated_async), or hide the "
        f"GPUs (CUDA_VISIBLE_DEVICES=) to run on CPUs"
    )


def resources(slots: Slots) -> tuple[dict[str, float], dict[str, float]]:
    """The resources of all bundles, and those of the cluster if it were idle."""
    import ray

    names = ("CPU", "GPU")
    available = ray.cluster_resources()
    needed = {name: sum(bundle.get(name, 0.0) for bundle in slots.bundles) for name in names}
    return needed, {name: available.get(name, 0.0) for name in names}


def release(name: str) -> None:
    """Give back what was reserved under ``name``, if anything was; actors still in it are
    killed."""
    from ray.util.placement_group import get_placement_group, remove_placement_group

    with contextlib.suppress(ValueError):  # there is none
        remove_placement_group(get_placement_group(name))


def engine_start_limit(cfg: Config, processes: int, cores: int, *, gpus: bool) -> float:
    """Seconds in which an engine must have started.

    On a machine without GPUs the ranks and engines start at the same time on its cores, so that the
    limit of one process per core grows with their number. (``ray.address``: the cores of a cluster
    are not known.)
    """
    limit_s = cfg.generator.engine_start_timeout_s
    if gpus or cfg.ray.address:
        return limit_s
    return limit_s * max(1.0, processes / cores)


def share_threads(cfg: Config, cores: int, *, overlap: bool) -> tuple[int, int]:
    """CPU threads per policy rank and per engine.

    Phases that take turns may each use all cores. If they overlap, engines have their part of the
    cores, and the policy as many threads as there are cores: the system runs them where an engine
    is idle. The number never changes in a run, for sums of floating-point numbers depend on it.
    """
    ranks = ROLES[POLICY].size(cfg)
    engines = cfg.generator.own_engines
    policy = max(1, cores // ranks)
    engine = max(1, cores // max(1, engines + (ranks if overlap else 0)))
    return cfg.trainer.policy.threads or policy, cfg.generator.threads or engine

"""Placement of ranks and engines on the devices of a Ray cluster.

Invariant: the bundles are computed before anything starts. So a cluster that is too small is an
error that says what is missing, and a local cluster is started large enough. A bundle is one GPU
(or one CPU slot on a machine without GPUs) for each rank and engine; colocated ranks and engines
share bundles. Bundles that are reserved under a name are returned by ``release``, from any process,
also if the owner has failed.
"""

from __future__ import annotations

import contextlib
import math
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
    """The bundles of a run, and the actors in them.

    Args:
        bundles: resources of each bundle: ``CPU``, ``GPU``.
        by_role: for each role, and for the "engines", the bundle of each of its actors.
        share: for each of them the fraction of a bundle's resources that an actor takes.
    """

    bundles: tuple[dict[str, float], ...]
    by_role: Mapping[str, tuple[int, ...]]
    share: Mapping[str, float]


def plan_slots(cfg: Config, *, gpus: bool, roles: Sequence[Role]) -> Slots:
    """The bundles that a configuration needs, and the actors in them.

    Args:
        gpus: place ranks and engines on GPUs, not on CPU slots.
        roles: of the run, the policy first.
    """
    generator = cfg.generator
    colocated = cfg.trainer.placement.colocate_all
    hybrid_count = generator.hybrid_engines if generator.own_engines else 0
    engine_count = generator.own_engines - hybrid_count
    bundles: list[dict[str, float]] = []
    by_role: dict[str, tuple[int, ...]] = {}

    def add(name: str, count: int, devices: int) -> None:
        """Add bundles for actors that share them with no other role."""
        bundle = {"CPU": 1.0}
        if devices:
            bundle["GPU"] = float(devices)
        first_bundle = len(bundles)
        bundles.extend([bundle] * count)
        by_role[name] = tuple(range(first_bundle, len(bundles)))

    in_policy_bundles: list[str] = []
    for role in roles:
        if role.colocated_if(cfg):
            by_role[role.name] = by_role[POLICY]
        else:
            add(role.name, role.size(cfg), int(gpus and role.gpu))
        if role.name == POLICY or role.colocated_if(cfg):
            in_policy_bundles.append(role.name)
    ranks = len(by_role.get(POLICY, ()))  # an experiment may have no workers
    actors_per_bundle = len(in_policy_bundles)
    if colocated:
        by_role[ENGINES] = tuple(colocated_rank(engine, ranks) for engine in range(engine_count))
        in_policy_bundles.append(ENGINES)
    else:
        add(ENGINES, engine_count, generator.devices_per_engine if gpus else 0)
    if hybrid_count:
        by_role[HYBRID_ENGINES] = tuple(
            colocated_rank(engine, ranks) for engine in range(hybrid_count)
        )
        in_policy_bundles.append(HYBRID_ENGINES)
    if colocated or hybrid_count:
        # The largest number of engines in one of the policy's bundles.
        actors_per_bundle += math.ceil((engine_count if colocated else hybrid_count) / ranks)
    share = dict.fromkeys(by_role, 1.0)
    for name in in_policy_bundles:
        # Rounded down: Ray counts in units of 0.0001 and rounds to the nearest. If shares were
        # rounded up there would be no space for the last actor.
        share[name] = 10_000 // actors_per_bundle / 10_000
    return Slots(tuple(bundles), by_role, share)


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
        """The placement of a role's ranks; None for a role that the run does not have."""
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
    """Request the bundles from Ray; blocks, so call it off the event loop.

    Args:
        name: for ``release``. Ray itself frees the bundles at the end of the program, not of the
            run.

    Raises:
        UserError: if they are not granted in time, with the requested and the existing resources.
    """
    from ray.util.placement_group import (
        placement_group,
        placement_group_table,
        remove_placement_group,
    )

    bundles = [dict(bundle) for bundle in slots.bundles]
    group = placement_group(bundles, strategy="PACK", name=name)
    if not group.wait(timeout_s):
        remove_placement_group(group)  # else Ray would grant it later, to no one
        raise too_small(slots, f"within {timeout_s:g} s (trainer.placement.timeout_s)")
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return Placement(slots, group, by_node(slots.bundles, nodes))


def by_node(bundles: Sequence[Mapping[str, float]], nodes: Mapping[int, str]) -> list[int]:
    """Ray's bundle for each slot, with the same resources, in the order of nodes.

    Ray packs bundles on few nodes, and numbers them in any order. Here neighbours are on one node,
    and nodes with most bundles come first.
    """
    slots_by_resources: dict[tuple[tuple[str, float], ...], list[int]] = {}
    for slot, bundle in enumerate(bundles):
        resources_of_bundle = tuple(sorted(bundle.items()))
        slots_by_resources.setdefault(resources_of_bundle, []).append(slot)
    result = list(range(len(bundles)))
    for slots in slots_by_resources.values():
        count = Counter(nodes[slot] for slot in slots)
        ordered = sorted(slots, key=lambda slot: (-count[nodes[slot]], nodes[slot], slot))
        for slot, ray_bundle in zip(slots, ordered, strict=True):
            result[slot] = ray_bundle
    return result


def too_small(slots: Slots, when: str) -> UserError:
    """The error for a cluster without these resources."""
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

    cluster = ray.cluster_resources()
    needed = {"CPU": 0.0, "GPU": 0.0}
    for bundle in slots.bundles:
        for name, amount in bundle.items():
            needed[name] += amount
    return needed, {name: cluster.get(name, 0.0) for name in needed}


def release(name: str) -> None:
    """Return the bundles that were reserved under ``name``, if any; actors in them are killed."""
    from ray.util.placement_group import get_placement_group, remove_placement_group

    with contextlib.suppress(ValueError):  # there is none
        remove_placement_group(get_placement_group(name))


def engine_start_limit(cfg: Config, processes: int, cores: int, *, gpus: bool) -> float:
    """Seconds in which an engine must have started.

    The setting is the limit of one process per core. On a machine without GPUs the ranks and
    engines start at the same time on its cores, so the limit grows with their number.
    """
    limit_s = cfg.generator.engine_start_timeout_s
    if gpus or cfg.ray.address:  # the cores of a cluster are not known
        return limit_s
    return limit_s * max(1.0, processes / cores)


def share_threads(cfg: Config, cores: int, *, overlap: bool) -> tuple[int, int]:
    """CPU threads per policy rank and per engine.

    Phases that take turns may each use all cores. If they overlap, engines have their part of the
    cores, and the policy as many threads as there are cores: the system runs them where an engine
    is idle. The number never changes in a run, for sums of floating-point numbers depend on it.

    Args:
        cores: of this machine.
        overlap: policy and engines compute at the same time.
    """
    ranks = ROLES[POLICY].size(cfg)
    processes = cfg.generator.own_engines  # that the cores are divided among
    if overlap:
        processes += ranks
    per_rank = max(1, cores // ranks)
    per_engine = max(1, cores // max(1, processes))
    return cfg.trainer.policy.threads or per_rank, cfg.generator.threads or per_engine

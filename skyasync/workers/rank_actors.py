"""The processes of ranks: their placement, and the actor of a rank's worker.

Invariant: this module does not import torch. The controller starts the processes of all ranks
before it imports torch itself, so that they import their libraries at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyasync.registry import UserParts, add_user_parts, resolve_reference
from skyasync.utils.machine import ProcessIdentity
from skyasync.workers.roles import ROLES, Role

HEARTBEAT = "heartbeat"


@dataclass(frozen=True)
class WorkerPlacement:
    """The placement of the ranks of one model.

    Args:
        bundles: of the placement group, one for each rank.
        num_cpus, num_gpus: resources that a rank takes from its bundle; fractions let two models
            share a GPU.
        actors: the processes, in the order of the ranks, if they have been started.
    """

    group: PlacementGroup
    bundles: Sequence[int] = (0,)
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    actors: Sequence[Any] = ()


class _WorkerActor:
    """Forwards calls to a worker in this process.

    The worker's libraries are imported while the caller does other work.
    """

    def __init__(self, worker: str) -> None:
        if worker:  # its import imports torch
            resolve_reference(worker, kind="worker")

    def construct(self, role: str, components: UserParts, *args: object, **options: object) -> None:
        add_user_parts(components)
        self._worker = ROLES[role].worker_class()(*args, role=role, **options)

    def call(self, method: str, *args: object) -> object:
        return methodcaller(method, *args)(self._worker)

    @ray.method(concurrency_group=HEARTBEAT)
    def heartbeat(self) -> ProcessIdentity:
        """The identity of this process; another thread answers while a call is running."""
        return ProcessIdentity.mine()


def with_actors(role: Role, placement: WorkerPlacement) -> WorkerPlacement:
    """The placement with started processes, which import the libraries of the role's worker."""
    return replace(placement, actors=start_actors(role, placement))


def start_actors(role: Role, placement: WorkerPlacement) -> list[Any]:
    """Start an actor for each rank. Ray is up; nothing here waits for it."""
    # The name is shown in Ray's errors and process titles.
    if isinstance(role.worker, str):
        reference = role.worker
        name = role.worker.rpartition(":")[2]
    else:
        reference = ""
        name = role.worker.__name__
    # With concurrency groups Ray runs calls in threads: heartbeats in one, all others in another.
    remote: Any = ray.remote  # its types lack these options
    decorator = remote(max_restarts=0, concurrency_groups={HEARTBEAT: 1})
    actor_class = decorator(type(name, (_WorkerActor,), {}))
    actors = []
    for bundle in placement.bundles:
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=placement.group, placement_group_bundle_index=bundle
        )
        options = actor_class.options(
            num_cpus=placement.num_cpus,
            num_gpus=placement.num_gpus,
            scheduling_strategy=strategy,
        )
        actors.append(options.remote(reference))
    return actors

"""The processes of ranks: where they run, and the actor that holds a rank's worker.

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
    """Where the ranks of one model run.

    Args:
        bundles: of the placement group, one for each rank.
        num_cpus, num_gpus: what each rank takes from its bundle; fractions let two models share
            one.
        actors: the processes, in the order of the ranks, if they have been started.
    """

    group: PlacementGroup
    bundles: Sequence[int] = (0,)
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    actors: Sequence[Any] = ()


class _WorkerActor:
    """Forwards to the worker it holds, whose libraries are imported in this process while the
    caller does other things."""

    def __init__(self, worker: str) -> None:
        if worker:
            resolve_reference(worker, kind="worker")

    def construct(self, role: str, parts: UserParts, *args: object, **options: object) -> None:
        add_user_parts(parts)
        self._worker = ROLES[role].worker_class()(*args, role=role, **options)

    def call(self, method: str, *args: object) -> object:
        return methodcaller(method, *args)(self._worker)

    @ray.method(concurrency_group=HEARTBEAT)
    def heartbeat(self) -> ProcessIdentity:
        """Answered by a thread of its own while a call is running."""
        return ProcessIdentity.mine()


def with_actors(role: Role, placement: WorkerPlacement) -> WorkerPlacement:
    """The placement with started processes, which import what the role's worker needs."""
    return replace(placement, actors=start_actors(role, placement))


def start_actors(role: Role, placement: WorkerPlacement) -> list[Any]:
    """An actor for each rank. Ray is up; nothing here waits for it."""
    reference = role.worker if isinstance(role.worker, str) else ""
    # In Ray's errors and process titles.
    if isinstance(role.worker, str):
        name = role.worker.rpartition(":")[2]
    else:
        name = role.worker.__name__
    # Groups have Ray run all calls in threads: those of the first one, and each of the others, in
    # one.
    remote: Any = ray.remote  # whose types know nothing of these
    actor_class = remote(max_restarts=0, concurrency_groups={HEARTBEAT: 1})(
        type(name, (_WorkerActor,), {})
    )
    return [
        actor_class.options(
            num_cpus=placement.num_cpus,
            num_gpus=placement.num_gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=placement.group, placement_group_bundle_index=bundle
            ),
        ).remote(reference)
        for bundle in placement.bundles
    ]

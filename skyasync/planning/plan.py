"""Settings, a model's shape and a machine: which processes there are, what each device and the host must hold.

Invariant: pure; the same settings give the same plan on every machine. A place (a kind of device, or the host) is
shown at the moment when it holds most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from skyasync.cluster.placement import ENGINES, Slots, plan_slots
from skyasync.config.generation import BETWEEN_GPUS
from skyasync.config.resume import saves
from skyasync.config.sampling import backend
from skyasync.config.schema import Config
from skyasync.engines.settings import engine_config
from skyasync.heap import KEPT
from skyasync.planning.elsewhere import engines_in_memory, received
from skyasync.planning.engine_memory import GIB, EngineMemory, engine_memory
from skyasync.planning.machine import Machine
from skyasync.planning.place import Place, fullest
from skyasync.planning.ranks import Other, bytes_of, named, other_role, trained_rank
from skyasync.planning.shape import ModelShape
from skyasync.planning.training_memory import (
    Lines,
    Rank,
    gradients,
    held,
    kept,
    learnt,
    on_host,
    publishing,
    scoring,
    updating,
)
from skyasync.planning.work import batch_bytes
from skyasync.weight_sync.update import PART_BYTES
from skyasync.workers.roles import POLICY, ROLES, wanted_roles

CONTEXT = GIB
"""What CUDA, NCCL and cuBLAS take on a GPU for each process that computes there, roughly."""

PROCESS = {False: GIB // 2, True: 3 * GIB // 2}
"""Host memory of a process with torch, by whether it has CUDA's libraries."""


@dataclass(frozen=True)
class MemoryPlan:
    model: ModelShape
    machine: Machine
    processes: dict[str, int]
    slots: Slots
    places: tuple[Place, ...]
    rank: Rank
    engine: EngineMemory

    @property
    def gpus_asked(self) -> int:
        return int(sum(bundle.get("GPU", 0) for bundle in self.slots.bundles))

    @property
    def fits(self) -> bool:
        return self.gpus_asked <= self.machine.gpus and all(place.fits for place in self.places)


def make_plan(
    cfg: Config, shape: ModelShape, machine: Machine, *, shapes: Mapping[str, ModelShape] | None = None
) -> MemoryPlan:
    """What a run of ``cfg`` needs.

    Args:
        shape: the policy's.
        shapes: by role, those of models of their own; a role that names none has the policy's.
    """
    gpus, placement = machine.gpus > 0, cfg.trainer.placement
    slots = plan_slots(cfg, gpus=gpus, roles=wanted_roles(cfg))
    roles = {role: len(bundles) for role, bundles in slots.of.items()}
    rank, own = trained_rank(cfg, shape, ROLES[POLICY], gpus=gpus, ranks=roles[POLICY])
    per_device = -(-roles[ENGINES] // roles[POLICY]) if placement.colocate_all else 1
    others = tuple(
        other_role(cfg, (shapes or {}).get(role.name, shape), role, rank, gpus=gpus, ranks=roles[role.name])
        for role in wanted_roles(cfg)
        if role.name != POLICY and role.own_model(cfg) is not None
    )
    share = int(machine.gpu_memory * cfg.generator.gpu_memory_utilization / per_device) if gpus else 0
    settings = engine_config(cfg, gpus=gpus)
    engine = engine_memory(
        cfg, settings, shape, backend=backend(cfg), b=bytes_of(settings.dtype, gpus=gpus), share=share
    )
    parts = _Parts(cfg, shape, own, machine, rank, engine, roles, others, per_device)
    processes = {"controller": 1, **roles, "environments": cfg.environment.num_workers}
    return MemoryPlan(shape, machine, processes, slots, tuple(parts.places()), rank, engine)


@dataclass(frozen=True)
class _Parts:
    """Everything that shares the machine's places; ``own`` is a policy rank's part of its model."""

    cfg: Config
    shape: ModelShape
    own: ModelShape
    machine: Machine
    rank: Rank
    engine: EngineMemory
    roles: dict[str, int]
    others: tuple[Other, ...]
    engines_per_device: int

    def places(self) -> list[Place]:
        if not self.machine.gpus:
            return [self._host_without_gpus(), *self._elsewhere()]
        return [*self._gpus(), self._host_beside_gpus(), *self._elsewhere()]

    # ------------------------------------------------------------ devices

    def _gpus(self) -> list[Place]:
        placement, room = self.cfg.trainer.placement, self.machine.gpu_memory
        policy = {
            phase: lines | {"context": CONTEXT * (1 + len(self._beside_policy))}
            for phase, lines in self._training_phases().items()
        }
        if placement.colocate_all:
            return [fullest("policy and engines", self.roles[POLICY], room, self._taking_turns(policy))]
        places = [fullest("policy", self.roles[POLICY], room, policy)]
        for other in self.others:
            if not other.shared:
                lines = other.at_work | {"context": CONTEXT}
                places.append(Place(other.name, other.ranks, room, other.phase, lines))
        devices = self.roles[ENGINES] * self.cfg.generator.devices_per_engine
        share = int(room * self.cfg.generator.gpu_memory_utilization)
        engines = [Place("engines", devices, share, "generation", self.engine.lines)] if devices else []
        return [*places, *engines]

    def _taking_turns(self, policy: dict[str, Lines]) -> dict[str, Lines]:
        """The policy waits on the host while the engines have a cache; they wake with their weights for a hand-over."""
        engines, contexts = self.engines_per_device, CONTEXT * (2 + self.engines_per_device)
        asleep = {"sleeping engines": CONTEXT * engines}
        handing = publishing(self.own, self.rank)
        there: Lines = {what: handing[what] for what in ("weights", "gathered")}
        if self._way == "cuda_ipc":  # the policy stays for it; a part lies in a buffer, and copied in each engine
            part = max(PART_BYTES, self.shape.largest_tensor * self.rank.b)
            there = held(self.own, self.rank) | there | {"parts": (1 + engines) * part}
            for other in self._beside_policy:
                there |= other.held
        return {
            "generation": named(self.engine.lines, "engines", engines) | {"context": contexts},
            **{phase: lines | asleep for phase, lines in policy.items()},
            "hand-over": there | named({"weights": self.engine.weights}, "engines", engines) | {"context": contexts},
        }

    @property
    def _way(self) -> str:
        """Of the weights to the engines."""
        return engine_config(self.cfg, gpus=self.machine.gpus > 0).weight_sync_backend

    def _training_phases(self) -> dict[str, Lines]:
        """Of a policy's device: one model at a time works, the others wait."""
        idle: Lines = {}
        for other in self._beside_policy:
            idle |= other.held
        phases = {"update": updating(self.own, self.rank), "log-probabilities": scoring(self.own, self.rank)}
        phases = {phase: lines | idle for phase, lines in phases.items()}
        for other in self._beside_policy:
            phases[other.name] = (
                held(self.own, self.rank) | idle | named(other.at_work, other.name) | self._waiting(other)
            )
        return phases

    def _waiting(self, other: Other, ranks: int = 1) -> Lines:
        """The policy's gradients, while one that is trained behind it finds its own: both step after that."""
        if not (other.rank.trained and other.shared):
            return {}
        return {"policy: gradients": ranks * gradients(self.own, self.rank)}

    @property
    def _beside_policy(self) -> list[Other]:
        return [other for other in self.others if other.shared]

    # ------------------------------------------------------------ hosts

    def _host_beside_gpus(self) -> Place:
        """Of the first policy node, which hands over the weights."""
        always = self._beside_gpus()
        phases = {"training": always, "hand-over": always | self._hand_over()}
        count = 1 if self._received else self._nodes
        return fullest("host", count, self.machine.host_memory, self._with_checkpoint(phases, always, self._nodes))

    def _beside_gpus(self) -> Lines:
        """What a policy node has in its memory all the time."""
        nodes, ranks = self._nodes, self.roles[POLICY]
        here = ranks // nodes
        workers = here + sum(-(-other.ranks // nodes) for other in self.others)
        processes = self._processes(workers, -(-self.roles[ENGINES] // nodes))
        always = processes | {"batch": 2 * batch_bytes(self.cfg, self.shape)}
        if self.cfg.trainer.placement.colocate_all:
            always["offloaded policy"] = here * sum(kept(self.own, self.rank).values())
            waiting = self._beside_policy
            always |= {f"offloaded {o.name}": here * sum(kept(o.shape, o.rank).values()) for o in waiting}
        else:
            always |= named(on_host(self.own, self.rank), "policy", here)
            waiting = []
        for other in self.others:
            if other not in waiting:
                always |= named(on_host(other.shape, other.rank), other.name, other.ranks // nodes)
        return always

    def _elsewhere(self) -> list[Place]:
        """A host with engines to which weights are carried: the policy's others, or one that may have all engines."""
        if not self._received:
            return []
        if self._nodes > 1:
            there = self._beside_gpus()
        else:
            engines = self.roles[ENGINES]
            there = {"processes": self._engine_processes(engines)}
            if not self.machine.gpus:
                there |= named(engines_in_memory(self.cfg, self.engine), "engines", engines)
        there = there | self._received
        phases = {"hand-over": there}
        if self._nodes > 1:
            phases = self._with_checkpoint(phases, there, self._nodes)
        return [fullest("host elsewhere", max(1, self._nodes - 1), self.machine.host_memory, phases)]

    @property
    def _received(self) -> Lines:
        here = -(-self.roles[ENGINES] // self._nodes)
        return received(self.cfg, self.shape, self.rank, here, gpus=self.machine.gpus > 0)

    @property
    def _nodes(self) -> int:
        """Of the policy; without GPUs they are planned as one."""
        return self.cfg.trainer.placement.policy_num_nodes if self.machine.gpus else 1

    def _host_without_gpus(self) -> Place:
        ranks, engines = self.roles[POLICY], self.roles[ENGINES]
        workers = sum(self.roles.values()) - engines
        always = self._processes(workers, engines) | named(self.engine.lines, "engines", engines)
        always["batch"] = 2 * batch_bytes(self.cfg, self.shape)
        for other in self.others:
            always |= {what: other.ranks * size for what, size in other.held.items()}
        between = always | named(held(self.own, self.rank), "policy", ranks) | self._freed(ranks)
        phases = {
            "update": always | named(updating(self.own, self.rank), "policy", ranks),
            "log-probabilities": always | named(scoring(self.own, self.rank), "policy", ranks),
        }
        for other in self.others:
            at_work = named(other.at_work, other.name, other.ranks)
            if other.rank.trained and not other.shared:  # beside the policy, not behind it
                phases["update"] |= at_work
            phases[other.name] = between | at_work | self._waiting(other, ranks)
        phases["hand-over"] = between | self._hand_over()
        phases = self._with_checkpoint(phases, between, 1)
        return fullest("host", 1, self.machine.host_memory, phases)

    def _freed(self, ranks: int) -> Lines:
        """What ranks on CPUs keep of what an update has given back, for the next one."""
        transient = sum(updating(self.own, self.rank).values()) - sum(held(self.own, self.rank).values())
        return {"policy: freed": ranks * min(KEPT, transient)}

    def _processes(self, workers: int, engines: int) -> Lines:
        each = PROCESS[self.machine.gpus > 0] * (1 + workers)
        return {"processes": each + self._engine_processes(engines) + PROCESS[False] * self.cfg.environment.num_workers}

    def _engine_processes(self, engines: int) -> int:
        vllm = 2 if backend(self.cfg) == "vllm" else 1  # an actor, and the core's process
        return PROCESS[self.machine.gpus > 0] * vllm * engines

    def _hand_over(self) -> Lines:
        if self._way in BETWEEN_GPUS:
            return {}
        ranks = 1 if self.machine.gpus else self.roles[POLICY]
        return {
            "gathered weights": publishing(self.shape, self.rank)["gathered"] * ranks,
            "weights in shared memory": self.shape.parameters * self.rank.b,
        }

    def _with_checkpoint(self, phases: dict[str, Lines], between: Lines, nodes: int) -> dict[str, Lines]:
        """Phases of one of so many hosts on which checkpoints are put together, role after role, ``between`` steps, or
        of all roles at once beside every phase."""
        if not self._saves:
            return phases
        copies = [self.roles[POLICY] // nodes * sum(learnt(self.own, self.rank).values())]
        copies += [-(-other.ranks // nodes) * other.learnt for other in self.others]
        if self.cfg.trainer.ckpt_async:
            phases = {phase: lines | {"checkpoint": sum(copies)} for phase, lines in phases.items()}
            return phases | {"checkpoint": between | {"checkpoint": sum(copies)}}
        return phases | {"checkpoint": between | {"checkpoint": max(copies)}}

    @property
    def _saves(self) -> bool:
        return saves(self.cfg.trainer)

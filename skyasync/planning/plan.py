"""Settings, a model's shape and a machine: which processes there are, what each device and the host
must hold.

Invariant: the same settings give the same plan for the same machine. A place (a kind of device, or
the host) is shown at the moment when it holds most.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from skyasync.config.resume import saves
from skyasync.config.schema import Config
from skyasync.config.schema.generator import BETWEEN_GPUS
from skyasync.config.schema.sampling import backend
from skyasync.errors import UserError
from skyasync.heap import RETAINED
from skyasync.inference.interface import ENGINES as BACKENDS
from skyasync.inference.settings import (
    adapter_rank,
    computes_on_mapped_weights,
    crosses_nodes,
    engine_config,
    maps_weights,
)
from skyasync.planning.memory import (
    GIB,
    GRADIENTS,
    OPTIMIZER_STATE,
    EngineMemory,
    Lines,
    RankUse,
    batch_bytes,
    engine_memory,
    with_fragmentation,
)
from skyasync.planning.shape import ModelShape
from skyasync.planning.vllm_report import NO_REPORT, VLLMReport
from skyasync.run.placement import ENGINES, HYBRID_ENGINES, Slots, plan_slots
from skyasync.utils.machine import Machine
from skyasync.weight_sync.update import PART_BYTES
from skyasync.workers.roles import POLICY, ROLES, Role, roles_with_ranks

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(i?)B?)?", re.IGNORECASE)


def parse_size(text: str, flag: str) -> int:
    """Bytes of ``80GiB``, ``512G``, ``24000MB``.

    Raises:
        UserError: naming ``flag``.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match or not float(match[1]):
        raise UserError(
            f"{flag} {text}: not a size: write for example {flag} 80GiB, or 80GB for powers of ten"
        )
    unit = (match[2] or "").upper()
    if not match[3]:
        scale = _UNITS[unit]
    else:
        scale = 1024 ** (" KMGT".index(unit) if unit else 0)
    return int(float(match[1]) * scale)


@dataclass(frozen=True)
class MemoryUse:
    """``count`` devices alike, or the host: ``lines`` are the bytes of one at its fullest, in the
    phase ``when``.

    Args:
        phases: bytes of one in each phase, where there are several.
    """

    name: str
    count: int
    capacity: int
    when: str
    lines: Lines
    phases: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.lines.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity


def fullest(name: str, count: int, capacity: int, phases: Mapping[str, Lines]) -> MemoryUse:
    totals = {phase: sum(lines.values()) for phase, lines in phases.items()}
    when = max(totals, key=lambda phase: totals[phase])
    return MemoryUse(
        name,
        count,
        capacity,
        when,
        {what: size for what, size in phases[when].items() if size},
        totals,
    )


Measure = Callable[[Config, Role, int], RankUse]
"""What a rank of a role needs that has so many ranks."""


@dataclass(frozen=True)
class OtherRole:
    """A role's model next to the policy."""

    role: Role
    use: RankUse
    ranks: int
    shared: bool  # on the policy's devices

    @property
    def resident(self) -> Lines:
        return named(self.use.resident, self.role.name)

    @property
    def at_work(self) -> Lines:
        return with_fragmentation(self.use.updating if self.role.trains else self.use.scoring)


def bytes_of(dtype: str, *, gpus: bool) -> int:
    return {"float32": 4, "bfloat16": 2}.get(dtype, 2 if gpus else 4)


def named(lines: Lines, who: str, count: int = 1) -> Lines:
    return {f"{who}: {what}": count * size for what, size in lines.items()}


def _on_host(use: RankUse, who: str, count: int) -> Lines:
    return named({f"{what} on the host": size for what, size in use.host.items()}, who, count)


def received(
    cfg: Config, shape: ModelShape, adapters: int, b: int, engines: int, *, gpus: bool
) -> Lines:
    """Of the engines there; nothing if there is no such host, or weights go from GPU to GPU.

    Args:
        shape: the whole policy's.
        adapters: bytes of them all.
        b: bytes of a number of the policy.
        engines: on such a host.
    """
    if gpus and cfg.trainer.placement.policy_num_nodes > 1:  # engines on other nodes of the policy
        carried = cfg.generator.own_engines > 0 and not cfg.generator.weight_sync_dir
    else:  # engines apart from the policy, on any node of a cluster
        carried = crosses_nodes(cfg) and not (gpus and cfg.trainer.placement.colocate_all)
    if engine_config(cfg, gpus=gpus).weight_sync_backend in BETWEEN_GPUS or not carried:
        return {}
    if adapter_rank(cfg):
        return {"received weights": engines * adapters}
    if computes_on_mapped_weights(cfg):
        copies = 2
    else:
        copies = cfg.generator.inference_engine_tensor_parallel_size
    return {"received weights": engines * copies * shape.parameters * b}


def engines_in_memory(cfg: Config, engine: EngineMemory) -> Lines:
    """Of one engine without GPUs, besides the weights that it receives, on which it may compute."""
    own_dtype = cfg.generator.dtype not in ("auto", cfg.trainer.policy.model.dtype)
    copies = own_dtype or not computes_on_mapped_weights(cfg)
    return {what: size for what, size in engine.lines.items() if copies or what != "weights"}


_BUFFERS = "weights in shared memory"

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
    devices: tuple[MemoryUse, ...]
    rank: RankUse
    engine: EngineMemory
    vllm: VLLMReport = NO_REPORT

    @property
    def gpus_requested(self) -> int:
        return int(sum(bundle.get("GPU", 0) for bundle in self.slots.bundles))

    @property
    def fits(self) -> bool:
        return self.gpus_requested <= self.machine.gpus and all(
            place.fits for place in self.devices
        )


def make_plan(
    cfg: Config, shape: ModelShape, machine: Machine, measure: Measure, vllm: VLLMReport = NO_REPORT
) -> MemoryPlan:
    """What a run of ``cfg`` needs; ``shape`` is the policy's."""
    gpus = machine.gpus > 0
    placement = cfg.trainer.placement
    slots = plan_slots(cfg, gpus=gpus, roles=roles_with_ranks(cfg))
    roles = {role: len(bundles) for role, bundles in slots.by_role.items()}
    roles[ENGINES] += roles.pop(HYBRID_ENGINES, 0)
    if placement.colocate_all:
        per_device = -(-roles[ENGINES] // roles[POLICY])
    else:
        per_device = 1
    others = tuple(
        OtherRole(
            role, measure(cfg, role, roles[role.name]), roles[role.name], role.colocated_if(cfg)
        )
        for role in roles_with_ranks(cfg)
        if role.name != POLICY and role.own_model(cfg) is not None
    )
    if gpus:
        share = int(machine.gpu_memory * cfg.generator.gpu_memory_utilization / per_device)
    else:
        share = 0
    settings = engine_config(cfg, gpus=gpus)
    fills = bool(BACKENDS.about(backend(cfg)).can["fills_memory"])
    engine = engine_memory(
        cfg, settings, shape, vllm, fills=fills, b=bytes_of(settings.dtype, gpus=gpus), share=share
    )
    rank = measure(cfg, ROLES[POLICY], roles[POLICY])
    parts = _Planner(cfg, shape, machine, rank, engine, roles, others, per_device)
    processes = {"controller": 1, **roles, "environments": cfg.environment.num_workers}
    return MemoryPlan(shape, machine, processes, slots, tuple(parts.devices()), rank, engine, vllm)


@dataclass(frozen=True)
class _Planner:
    """Everything that shares the machine's places; ``rank`` is what a policy's rank needs."""

    cfg: Config
    shape: ModelShape
    machine: Machine
    rank: RankUse
    engine: EngineMemory
    roles: dict[str, int]
    others: tuple[OtherRole, ...]
    engines_per_device: int

    def devices(self) -> list[MemoryUse]:
        if not self.machine.gpus:
            return [self._host_without_gpus(), *self._remote_hosts()]
        return [*self._gpus(), self._host_with_gpus(), *self._remote_hosts()]

    @property
    def _number(self) -> int:
        """Bytes of one as the policy computes."""
        return bytes_of(self.cfg.trainer.policy.model.dtype, gpus=self.machine.gpus > 0)

    # ------------------------------------------------------------ devices

    def _gpus(self) -> list[MemoryUse]:
        placement = self.cfg.trainer.placement
        capacity = self.machine.gpu_memory
        policy = {
            phase: lines | {"context": CONTEXT * (1 + len(self._colocated_roles))}
            for phase, lines in self._training_phases().items()
        }
        if placement.colocate_all:
            return [
                fullest(
                    "policy and engines", self.roles[POLICY], capacity, self._taking_turns(policy)
                )
            ]
        if self.cfg.generator.own_engines:
            hybrid = self.cfg.generator.hybrid_engines
        else:
            hybrid = 0
        devices = [fullest("policy", self.roles[POLICY], capacity, policy)]
        if hybrid:
            devices = [
                fullest(
                    "policy, hybrid engines",
                    self.roles[POLICY],
                    capacity,
                    self._taking_turns(policy),
                )
            ]
        for other in self.others:
            if not other.shared:
                lines = other.at_work | {"context": CONTEXT}
                if other.role.trains:
                    phase = "update"
                else:
                    phase = "log-probabilities"
                devices.append(MemoryUse(other.role.name, other.ranks, capacity, phase, lines))
        engine_devices = (self.roles[ENGINES] - hybrid) * self.cfg.generator.devices_per_engine
        if engine_devices:
            share = int(capacity * self.cfg.generator.gpu_memory_utilization)
            devices.append(
                MemoryUse("engines", engine_devices, share, "generation", self.engine.lines)
            )
        return devices

    def _taking_turns(self, policy: dict[str, Lines]) -> dict[str, Lines]:
        """The policy waits on the host while the engines have a cache; engines wake without one for
        a weight sync."""
        engines = self.engines_per_device
        contexts = CONTEXT * (2 + self.engines_per_device)
        asleep = {"sleeping engines": CONTEXT * engines}
        there = {
            what: size for what, size in self.rank.publishing.items() if what != OPTIMIZER_STATE
        }
        # the policy stays for it; a part lies in a buffer, and copied in each engine
        if self._way == "cuda_ipc":
            part = max(PART_BYTES, self.shape.largest_tensor * self._number)
            there = self.rank.publishing | {"parts": (1 + engines) * part}
            for other in self._colocated_roles:
                there |= other.resident
        return {
            "generation": named(self.engine.lines, "engines", engines) | {"context": contexts},
            **{phase: lines | asleep for phase, lines in policy.items()},
            "weight sync": there
            | named({"weights": self.engine.weights}, "engines", engines)
            | {"context": contexts},
        }

    @property
    def _way(self) -> str:
        """Of the weights to the engines."""
        return engine_config(self.cfg, gpus=self.machine.gpus > 0).weight_sync_backend

    def _training_phases(self) -> dict[str, Lines]:
        """Of a policy's device: one model at a time works, the others wait."""
        idle: Lines = {}
        for other in self._colocated_roles:
            idle |= other.resident
        phases = {
            "update": with_fragmentation(self.rank.updating),
            "optimizer step": with_fragmentation(self.rank.stepping),
            "log-probabilities": with_fragmentation(self.rank.scoring),
            "weight sync": self.rank.publishing,
        }
        phases = {phase: lines | idle for phase, lines in phases.items()}
        for other in self._colocated_roles:
            phases[other.role.name] = (
                self.rank.resident
                | idle
                | named(other.at_work, other.role.name)
                | self._waiting(other)
            )
        return phases

    def _waiting(self, other: OtherRole, ranks: int = 1) -> Lines:
        """The policy's gradients, while one that is trained behind it finds its own: both step
        after that."""
        if not (other.role.trains and other.shared):
            return {}
        return {f"policy: {GRADIENTS}": ranks * self.rank.gradients}

    @property
    def _colocated_roles(self) -> list[OtherRole]:
        return [other for other in self.others if other.shared]

    # ------------------------------------------------------------ hosts

    def _host_with_gpus(self) -> MemoryUse:
        """Of the first policy node, which sends the weights."""
        always = self._always_on_host() | self._buffers
        phases = {"training": always, "weight sync": always | self._weight_sync()}
        count = 1 if self._received else self._nodes
        return fullest(
            "host",
            count,
            self.machine.host_memory,
            self._with_checkpoint(phases, always, self._nodes),
        )

    def _always_on_host(self) -> Lines:
        """What a policy node has in its memory all the time."""
        nodes = self._nodes
        ranks = self.roles[POLICY]
        here = ranks // nodes
        workers = here + sum(-(-other.ranks // nodes) for other in self.others)
        processes = self._processes(workers, -(-self.roles[ENGINES] // nodes))
        always = processes | {"batch": 2 * batch_bytes(self.cfg, self.shape)}
        if self.cfg.trainer.placement.colocate_all or self.cfg.generator.hybrid_engines:
            waiting = self._colocated_roles
            always["offloaded policy"] = here * self.rank.everywhere
            always |= {
                f"offloaded {other.role.name}": here * other.use.everywhere for other in waiting
            }
        else:
            always |= _on_host(self.rank, "policy", here)
            waiting = []
        for other in self.others:
            if other not in waiting:
                always |= _on_host(other.use, other.role.name, other.ranks // nodes)
        return always

    def _remote_hosts(self) -> list[MemoryUse]:
        """A host with engines to which weights are carried: the policy's others, or one that may
        have all engines."""
        if not self._received:
            return []
        if self._nodes > 1:
            there = self._always_on_host()
        else:
            engines = self.roles[ENGINES]
            there = {"processes": self._engine_processes(engines)}
            if not self.machine.gpus:
                there |= named(engines_in_memory(self.cfg, self.engine), "engines", engines)
        there = there | self._received
        phases = {"weight sync": there}
        if self._nodes > 1:
            phases = self._with_checkpoint(phases, there, self._nodes)
        return [
            fullest(
                "host of remote engines", max(1, self._nodes - 1), self.machine.host_memory, phases
            )
        ]

    @property
    def _received(self) -> Lines:
        here = -(-self.roles[ENGINES] // self._nodes)
        # in float32
        adapters = self.rank.gradients * (self.cfg.trainer.policy.fsdp_size or self.roles[POLICY])
        return received(
            self.cfg, self.shape, adapters, self._number, here, gpus=self.machine.gpus > 0
        )

    @property
    def _nodes(self) -> int:
        """Of the policy; without GPUs they are planned as one."""
        if self.machine.gpus:
            return self.cfg.trainer.placement.policy_num_nodes
        return 1

    def _host_without_gpus(self) -> MemoryUse:
        ranks = self.roles[POLICY]
        engines = self.roles[ENGINES]
        workers = sum(self.roles.values()) - engines
        always = self._processes(workers, engines) | self._buffers
        always |= named(engines_in_memory(self.cfg, self.engine), "engines", engines)
        always["batch"] = 2 * batch_bytes(self.cfg, self.shape)
        for other in self.others:
            always |= {what: other.ranks * size for what, size in other.resident.items()}
        between = always | named(self.rank.resident, "policy", ranks) | self._freed(ranks)
        phases = {
            "update": always | named(with_fragmentation(self.rank.updating), "policy", ranks),
            "log-probabilities": always
            | named(with_fragmentation(self.rank.scoring), "policy", ranks),
        }
        for other in self.others:
            at_work = named(other.at_work, other.role.name, other.ranks)
            if other.role.trains and not other.shared:  # at the same time as the policy
                phases["update"] |= at_work
            phases[other.role.name] = between | at_work | self._waiting(other, ranks)
        phases["weight sync"] = between | self._weight_sync()
        phases = self._with_checkpoint(phases, between, 1)
        return fullest("host", 1, self.machine.host_memory, phases)

    def _freed(self, ranks: int) -> Lines:
        """What ranks on CPUs keep of what an update has given back, for the next one."""
        transient = sum(self.rank.updating.values()) - sum(self.rank.resident.values())
        return {"policy: freed": ranks * min(RETAINED, transient)}

    def _processes(self, workers: int, engines: int) -> Lines:
        each = PROCESS[self.machine.gpus > 0] * (1 + workers)
        return {
            "processes": each
            + self._engine_processes(engines)
            + PROCESS[False] * self.cfg.environment.num_workers
        }

    def _engine_processes(self, engines: int) -> int:
        each: int = BACKENDS.about(backend(self.cfg)).can["processes"]
        return PROCESS[self.machine.gpus > 0] * each * engines

    def _weight_sync(self) -> Lines:
        if self._way in BETWEEN_GPUS:
            return {}
        ranks = 1 if self.machine.gpus else self.roles[POLICY]
        return {
            "gathered weights": ranks
            * (sum(self.rank.publishing.values()) - sum(self.rank.resident.values())),
            _BUFFERS: self.shape.parameters * self._number,
        } | self._buffers

    @property
    def _buffers(self) -> Lines:
        """Of the host that sends the weights: what engines map stays from one weight sync to the
        next."""
        if self._way in BETWEEN_GPUS or not maps_weights(self.cfg):
            return {}
        # engines compute on one while the other is written
        if computes_on_mapped_weights(self.cfg):
            copies = 2
        else:
            copies = 1
        return {_BUFFERS: copies * self.shape.parameters * self._number}

    def _with_checkpoint(
        self, phases: dict[str, Lines], between: Lines, nodes: int
    ) -> dict[str, Lines]:
        """Phases of one of so many hosts on which checkpoints are put together, role after role,
        ``between`` steps, or of all roles at once during every phase."""
        if not saves(self.cfg.trainer):
            return phases
        copies = [self.roles[POLICY] // nodes * self.rank.learnt]
        copies += [-(-other.ranks // nodes) * other.use.learnt for other in self.others]
        if self.cfg.trainer.ckpt_async:
            phases = {phase: lines | {"checkpoint": sum(copies)} for phase, lines in phases.items()}
            return phases | {"checkpoint": between | {"checkpoint": sum(copies)}}
        return phases | {"checkpoint": between | {"checkpoint": max(copies)}}

"""Settings, a model's shape and a machine: which processes there are, what each device and the host must hold.

Invariant: the same settings give the same plan for the same machine. A place (a kind of device, or the host) is shown
at the moment when it holds most.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skyasync.config.resume import saves
from skyasync.config.schema import Config
from skyasync.config.schema.sampling import backend
from skyasync.config.schema.weight_sync import BETWEEN_GPUS
from skyasync.errors import UserError
from skyasync.heap import RETAINED
from skyasync.inference.settings import adapter_rank, computes_on_mapped_weights, crosses_nodes, engine_config
from skyasync.models import MeshShape
from skyasync.planning.memory import (
    FLOAT32,
    GIB,
    EngineMemory,
    Lines,
    RankMemory,
    batch_bytes,
    engine_memory,
    expert_bytes,
    gradients,
    largest_micro_batch,
    learnt,
    on_host,
    persistent,
    publishing,
    resident,
    scoring,
    updating,
)
from skyasync.planning.shape import ModelShape, adapter_parameters, between_halves, divided, filters
from skyasync.run.placement import ENGINES, Slots, plan_slots
from skyasync.weight_sync.update import PART_BYTES
from skyasync.workers.roles import CRITIC_ROLE, POLICY, ROLES, VOCABULARY, Role, roles_with_ranks

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(i?)B?)?", re.IGNORECASE)
_NO_LIMIT = 1 << 60
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Machine:
    """Bytes of one GPU and of one host's memory; ``gpus`` in all, 0 for a machine without."""

    gpus: int
    gpu_memory: int
    host_memory: int


def this_machine() -> Machine:
    """What is here, without torch: NVIDIA's own tool, the kernel, and the container's limit."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    sizes = [] if visible == "" else _gpu_sizes()
    count = len(sizes) if visible is None else min(len(sizes), len(visible.split(",")))
    return Machine(count, min(sizes, default=0), _host_memory())


def parse_size(text: str, flag: str) -> int:
    """Bytes of ``80GiB``, ``512G``, ``24000MB``.

    Raises:
        UserError: naming ``flag``.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match or not float(match[1]):
        raise UserError(f"{flag} {text}: not a size: write for example {flag} 80GiB, or 80GB for powers of ten")
    unit = (match[2] or "").upper()
    scale = _UNITS[unit] if not match[3] else 1024 ** (" KMGT".index(unit) if unit else 0)
    return int(float(match[1]) * scale)


def _gpu_sizes() -> list[int]:
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) << 20 for line in answer.split() if line.isdigit()]


def _host_memory() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in map(Path, _CGROUP_LIMITS):
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            total = min(total, int(text), _NO_LIMIT)
    return total


@dataclass(frozen=True)
class MemoryUse:
    """``count`` devices alike, or the host: ``lines`` are the bytes of one at its fullest, in the phase ``when``."""

    name: str
    count: int
    capacity: int
    when: str
    lines: Lines

    @property
    def total(self) -> int:
        return sum(self.lines.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity


def fullest(name: str, count: int, capacity: int, phases: Mapping[str, Lines]) -> MemoryUse:
    when = max(phases, key=lambda phase: sum(phases[phase].values()))
    return MemoryUse(name, count, capacity, when, {what: size for what, size in phases[when].items() if size})


BITS = {"nf4": 4 + 32 / 64, "int8": 8.0}
"""Of a number that is held as a code, with its share of a scale; of a row of int8 that is next to nothing."""


@dataclass(frozen=True)
class OtherRole:
    """A role's model next to the policy; ``shape`` is a rank's part of it."""

    name: str
    shape: ModelShape
    rank: RankMemory
    shared: bool  # on the policy's devices
    ranks: int

    @property
    def resident(self) -> Lines:
        return named(resident(self.shape, self.rank), self.name)

    @property
    def learnt(self) -> int:
        """Bytes that its checkpoint needs of a rank; nothing is saved of what is not trained."""
        return sum(learnt(self.shape, self.rank).values()) if self.rank.trained else 0

    @property
    def phase(self) -> str:
        return "update" if self.rank.trained else "log-probabilities"

    @property
    def at_work(self) -> Lines:
        return (updating if self.rank.trained else scoring)(self.shape, self.rank)


def other_role(cfg: Config, shape: ModelShape, role: Role, policy: RankMemory, *, gpus: bool, ranks: int) -> OtherRole:
    shape = shape if role.head == VOCABULARY else shape.with_value_head
    if role.trains:
        rank, own = trained_rank(cfg, shape, role, gpus=gpus, ranks=ranks)
    else:
        b, mesh_shape = bytes_of(role.model(cfg).dtype, gpus=gpus), role.mesh_shape(cfg, ranks)
        rank = RankMemory(
            _sharing(cfg, role, mesh_shape), b, policy.work, trained=False, vocabulary=role.head == VOCABULARY,
            shaped=policy.shaped, split=mesh_shape.tensor > 1, offloads=_offloads(cfg, role, gpus=gpus),
        )  # fmt: skip
        own = divided(shape, mesh_shape.tensor, gathers=filters(cfg))
    return OtherRole(role.name, own, rank, role.colocated_if(cfg), ranks)


def trained_rank(
    cfg: Config, shape: ModelShape, role: Role, *, gpus: bool, ranks: int
) -> tuple[RankMemory, ModelShape]:
    trainer, sampling = cfg.trainer, cfg.generator.sampling_params
    mesh_shape = role.mesh_shape(cfg, ranks)
    work, count = largest_micro_batch(
        cfg,
        shape,
        gpus=gpus,
        ranks=mesh_shape.data,
        context=mesh_shape.context,
        rows_limit=trainer.micro_train_batch_size_per_gpu,
    )
    lora = getattr(role.settings(cfg), "lora", None)
    optimizer = role.settings(cfg).optimizer_config
    setting = str(role.settings(cfg).gradient_checkpointing).lower()
    sharing = _sharing(cfg, role, mesh_shape)
    rank = RankMemory(
        ranks=sharing,
        replicas=mesh_shape.data * mesh_shape.context // sharing,
        routed=expert_bytes(cfg, shape) if role.name == POLICY else 0,
        split=mesh_shape.tensor > 1,
        b=bytes_of(role.model(cfg).dtype, gpus=gpus),
        work=work,
        micro_batches=count,
        adapters=adapter_parameters(shape, lora) if lora and lora.rank else 0,
        between=between_halves(shape, lora) if lora and lora.rank else 0,
        checkpointing=gpus if setting == "auto" else setting != "false",
        selective=setting == "selective",
        reduced_once=getattr(role.settings(cfg), "reduce_gradients", "") == "update",
        vocabulary=role.head == VOCABULARY,
        entropy=trainer.algorithm.use_entropy_loss,
        shaped=sampling.temperature not in (0.0, 1.0),
        muon=optimizer.name == "muon",
        master=2 if optimizer.bf16_stochastic_round else FLOAT32,
        eight_bits=optimizer.name == "adamw_8bit",
        offloads=_offloads(cfg, role, gpus=gpus),
        bits=BITS.get(lora.base_dtype, 0.0) if lora and lora.rank else 0.0,
        critic=role.name == POLICY and ROLES[CRITIC_ROLE].hosted_by_policy(cfg),
    )
    return rank, divided(shape, mesh_shape.tensor, gathers=filters(cfg))


def _sharing(cfg: Config, role: Role, mesh_shape: MeshShape) -> int:
    """Ranks over which its weights are sharded."""
    return getattr(role.settings(cfg), "fsdp_size", 0) or mesh_shape.data * mesh_shape.context


def _offloads(cfg: Config, role: Role, *, gpus: bool) -> str:
    """What its devices keep on the host; without GPUs they are one."""
    return getattr(role.settings(cfg), "cpu_offload", "none") if gpus else "none"


def bytes_of(dtype: str, *, gpus: bool) -> int:
    return {"float32": 4, "bfloat16": 2}.get(dtype, 2 if gpus else 4)


def named(lines: Lines, who: str, count: int = 1) -> Lines:
    return {f"{who}: {what}": count * size for what, size in lines.items()}


def received(cfg: Config, shape: ModelShape, rank: RankMemory, engines: int, *, gpus: bool) -> Lines:
    """Of the engines there; nothing if there is no such host, or weights go from GPU to GPU.

    Args:
        shape: the whole policy's.
        engines: on such a host.
    """
    way = engine_config(cfg, gpus=gpus).weight_sync_backend
    if way in BETWEEN_GPUS or not _carried(cfg, gpus=gpus):
        return {}
    if adapter_rank(cfg):
        return {"received weights": engines * rank.adapters * FLOAT32}
    copies = 2 if computes_on_mapped_weights(cfg) else cfg.generator.inference_engine_tensor_parallel_size
    return {"received weights": engines * copies * shape.parameters * rank.b}


def _carried(cfg: Config, *, gpus: bool) -> bool:
    """Whether there may be such a host: other nodes of the policy, or, of engines apart from it, any of a cluster."""
    if gpus and cfg.trainer.placement.policy_num_nodes > 1:
        return cfg.generator.own_engines > 0 and not cfg.generator.weight_sync_dir
    return crosses_nodes(cfg) and not (gpus and cfg.trainer.placement.colocate_all)


def engines_in_memory(cfg: Config, engine: EngineMemory) -> Lines:
    """Of one engine without GPUs, besides the weights that it receives, on which it may compute."""
    own_dtype = cfg.generator.dtype not in ("auto", cfg.trainer.policy.model.dtype)
    copies = own_dtype or not computes_on_mapped_weights(cfg)
    return {what: size for what, size in engine.lines.items() if copies or what != "weights"}


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
    rank: RankMemory
    engine: EngineMemory

    @property
    def gpus_requested(self) -> int:
        return int(sum(bundle.get("GPU", 0) for bundle in self.slots.bundles))

    @property
    def fits(self) -> bool:
        return self.gpus_requested <= self.machine.gpus and all(place.fits for place in self.devices)


def make_plan(
    cfg: Config, shape: ModelShape, machine: Machine, *, shapes: Mapping[str, ModelShape] | None = None
) -> MemoryPlan:
    """What a run of ``cfg`` needs.

    Args:
        shape: the policy's.
        shapes: by role, those of models of their own; a role that names none has the policy's.
    """
    gpus, placement = machine.gpus > 0, cfg.trainer.placement
    slots = plan_slots(cfg, gpus=gpus, roles=roles_with_ranks(cfg))
    roles = {role: len(bundles) for role, bundles in slots.of.items()}
    rank, own = trained_rank(cfg, shape, ROLES[POLICY], gpus=gpus, ranks=roles[POLICY])
    per_device = -(-roles[ENGINES] // roles[POLICY]) if placement.colocate_all else 1
    others = tuple(
        other_role(cfg, (shapes or {}).get(role.name, shape), role, rank, gpus=gpus, ranks=roles[role.name])
        for role in roles_with_ranks(cfg)
        if role.name != POLICY and role.own_model(cfg) is not None
    )
    share = int(machine.gpu_memory * cfg.generator.gpu_memory_utilization / per_device) if gpus else 0
    settings = engine_config(cfg, gpus=gpus)
    engine = engine_memory(
        cfg, settings, shape, backend=backend(cfg), b=bytes_of(settings.dtype, gpus=gpus), share=share
    )
    parts = _Planner(cfg, shape, own, machine, rank, engine, roles, others, per_device)
    processes = {"controller": 1, **roles, "environments": cfg.environment.num_workers}
    return MemoryPlan(shape, machine, processes, slots, tuple(parts.devices()), rank, engine)


@dataclass(frozen=True)
class _Planner:
    """Everything that shares the machine's places; ``own`` is a policy rank's part of its model."""

    cfg: Config
    shape: ModelShape
    own: ModelShape
    machine: Machine
    rank: RankMemory
    engine: EngineMemory
    roles: dict[str, int]
    others: tuple[OtherRole, ...]
    engines_per_device: int

    def devices(self) -> list[MemoryUse]:
        if not self.machine.gpus:
            return [self._host_without_gpus(), *self._remote_hosts()]
        return [*self._gpus(), self._host_with_gpus(), *self._remote_hosts()]

    # ------------------------------------------------------------ devices

    def _gpus(self) -> list[MemoryUse]:
        placement, capacity = self.cfg.trainer.placement, self.machine.gpu_memory
        policy = {
            phase: lines | {"context": CONTEXT * (1 + len(self._colocated_roles))}
            for phase, lines in self._training_phases().items()
        }
        if placement.colocate_all:
            return [fullest("policy and engines", self.roles[POLICY], capacity, self._taking_turns(policy))]
        devices = [fullest("policy", self.roles[POLICY], capacity, policy)]
        for other in self.others:
            if not other.shared:
                lines = other.at_work | {"context": CONTEXT}
                devices.append(MemoryUse(other.name, other.ranks, capacity, other.phase, lines))
        if engine_devices := self.roles[ENGINES] * self.cfg.generator.devices_per_engine:
            share = int(capacity * self.cfg.generator.gpu_memory_utilization)
            devices.append(MemoryUse("engines", engine_devices, share, "generation", self.engine.lines))
        return devices

    def _taking_turns(self, policy: dict[str, Lines]) -> dict[str, Lines]:
        """The policy waits on the host while the engines have a cache; engines wake without one for a weight sync."""
        engines, contexts = self.engines_per_device, CONTEXT * (2 + self.engines_per_device)
        asleep = {"sleeping engines": CONTEXT * engines}
        handing = publishing(self.own, self.rank)
        there: Lines = {what: handing[what] for what in ("weights", "gathered")}
        if self._way == "cuda_ipc":  # the policy stays for it; a part lies in a buffer, and copied in each engine
            part = max(PART_BYTES, self.shape.largest_tensor * self.rank.b)
            there = resident(self.own, self.rank) | there | {"parts": (1 + engines) * part}
            for other in self._colocated_roles:
                there |= other.resident
        return {
            "generation": named(self.engine.lines, "engines", engines) | {"context": contexts},
            **{phase: lines | asleep for phase, lines in policy.items()},
            "weight sync": there | named({"weights": self.engine.weights}, "engines", engines) | {"context": contexts},
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
        phases = {"update": updating(self.own, self.rank), "log-probabilities": scoring(self.own, self.rank)}
        phases = {phase: lines | idle for phase, lines in phases.items()}
        for other in self._colocated_roles:
            phases[other.name] = (
                resident(self.own, self.rank) | idle | named(other.at_work, other.name) | self._waiting(other)
            )
        return phases

    def _waiting(self, other: OtherRole, ranks: int = 1) -> Lines:
        """The policy's gradients, while one that is trained behind it finds its own: both step after that."""
        if not (other.rank.trained and other.shared):
            return {}
        return {"policy: gradients": ranks * gradients(self.own, self.rank)}

    @property
    def _colocated_roles(self) -> list[OtherRole]:
        return [other for other in self.others if other.shared]

    # ------------------------------------------------------------ hosts

    def _host_with_gpus(self) -> MemoryUse:
        """Of the first policy node, which sends the weights."""
        always = self._always_on_host()
        phases = {"training": always, "weight sync": always | self._weight_sync()}
        count = 1 if self._received else self._nodes
        return fullest("host", count, self.machine.host_memory, self._with_checkpoint(phases, always, self._nodes))

    def _always_on_host(self) -> Lines:
        """What a policy node has in its memory all the time."""
        nodes, ranks = self._nodes, self.roles[POLICY]
        here = ranks // nodes
        workers = here + sum(-(-other.ranks // nodes) for other in self.others)
        processes = self._processes(workers, -(-self.roles[ENGINES] // nodes))
        always = processes | {"batch": 2 * batch_bytes(self.cfg, self.shape)}
        if self.cfg.trainer.placement.colocate_all:
            always["offloaded policy"] = here * sum(persistent(self.own, self.rank).values())
            waiting = self._colocated_roles
            always |= {f"offloaded {o.name}": here * sum(persistent(o.shape, o.rank).values()) for o in waiting}
        else:
            always |= named(on_host(self.own, self.rank), "policy", here)
            waiting = []
        for other in self.others:
            if other not in waiting:
                always |= named(on_host(other.shape, other.rank), other.name, other.ranks // nodes)
        return always

    def _remote_hosts(self) -> list[MemoryUse]:
        """A host with engines to which weights are carried: the policy's others, or one that may have all engines."""
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
        return [fullest("host of remote engines", max(1, self._nodes - 1), self.machine.host_memory, phases)]

    @property
    def _received(self) -> Lines:
        here = -(-self.roles[ENGINES] // self._nodes)
        return received(self.cfg, self.shape, self.rank, here, gpus=self.machine.gpus > 0)

    @property
    def _nodes(self) -> int:
        """Of the policy; without GPUs they are planned as one."""
        return self.cfg.trainer.placement.policy_num_nodes if self.machine.gpus else 1

    def _host_without_gpus(self) -> MemoryUse:
        ranks, engines = self.roles[POLICY], self.roles[ENGINES]
        workers = sum(self.roles.values()) - engines
        always = self._processes(workers, engines) | named(self.engine.lines, "engines", engines)
        always["batch"] = 2 * batch_bytes(self.cfg, self.shape)
        for other in self.others:
            always |= {what: other.ranks * size for what, size in other.resident.items()}
        between = always | named(resident(self.own, self.rank), "policy", ranks) | self._freed(ranks)
        phases = {
            "update": always | named(updating(self.own, self.rank), "policy", ranks),
            "log-probabilities": always | named(scoring(self.own, self.rank), "policy", ranks),
        }
        for other in self.others:
            at_work = named(other.at_work, other.name, other.ranks)
            if other.rank.trained and not other.shared:  # at the same time as the policy
                phases["update"] |= at_work
            phases[other.name] = between | at_work | self._waiting(other, ranks)
        phases["weight sync"] = between | self._weight_sync()
        phases = self._with_checkpoint(phases, between, 1)
        return fullest("host", 1, self.machine.host_memory, phases)

    def _freed(self, ranks: int) -> Lines:
        """What ranks on CPUs keep of what an update has given back, for the next one."""
        transient = sum(updating(self.own, self.rank).values()) - sum(resident(self.own, self.rank).values())
        return {"policy: freed": ranks * min(RETAINED, transient)}

    def _processes(self, workers: int, engines: int) -> Lines:
        each = PROCESS[self.machine.gpus > 0] * (1 + workers)
        return {"processes": each + self._engine_processes(engines) + PROCESS[False] * self.cfg.environment.num_workers}

    def _engine_processes(self, engines: int) -> int:
        vllm = 2 if backend(self.cfg) == "vllm" else 1  # an actor, and the core's process
        return PROCESS[self.machine.gpus > 0] * vllm * engines

    def _weight_sync(self) -> Lines:
        if self._way in BETWEEN_GPUS:
            return {}
        ranks = 1 if self.machine.gpus else self.roles[POLICY]
        return {
            "gathered weights": publishing(self.shape, self.rank)["gathered"] * ranks,
            "weights in shared memory": self.shape.parameters * self.rank.b,
        }

    def _with_checkpoint(self, phases: dict[str, Lines], between: Lines, nodes: int) -> dict[str, Lines]:
        """Phases of one of so many hosts on which checkpoints are put together, role after role, ``between`` steps, or
        of all roles at once during every phase."""
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

"""Which processes a run has, and what each device and the first host must hold.

Invariant: the same settings give the same plan for the same machine. A place (a kind of device, or
the host) is shown at the moment when it holds most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from skyasync.config.resume import saves
from skyasync.config.schema import Config
from skyasync.config.schema.generator import BETWEEN_GPUS
from skyasync.config.schema.sampling import backend
from skyasync.heap import RETAINED
from skyasync.inference.interface import ENGINES as BACKENDS
from skyasync.inference.settings import computes_on_mapped_weights, engine_config, maps_weights
from skyasync.models.rank_memory import GRADIENTS, OPTIMIZER_STATE, Lines, RankUse
from skyasync.planning.memory import (
    GIB,
    EngineMemory,
    batch_bytes,
    engine_memory,
    with_fragmentation,
)
from skyasync.planning.shape import ModelShape
from skyasync.run.placement import ENGINES, HYBRID_ENGINES, Slots, plan_slots
from skyasync.utils.machine import Machine
from skyasync.weight_sync.update import PART_BYTES
from skyasync.workers.roles import POLICY, ROLES, Role, roles_with_ranks

BUFFERS = "weights in shared memory"

CONTEXT = GIB
"""What CUDA, NCCL and cuBLAS take on a GPU for each process that computes there, roughly."""

PROCESS = {False: GIB // 2, True: 3 * GIB // 2}
"""Host memory of a process with torch, by whether it has CUDA's libraries."""

Phases = dict[str, Lines]

Measure = Callable[[Config, Role, int], RankUse]
"""What a rank needs of a role that has so many ranks."""


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


def fullest(name: str, count: int, capacity: int, phases: Phases) -> MemoryUse:
    totals = {phase: sum(lines.values()) for phase, lines in phases.items()}
    when = max(totals, key=lambda phase: totals[phase])
    lines = {line: size for line, size in phases[when].items() if size}
    return MemoryUse(name, count, capacity, when, lines, totals)


@dataclass(frozen=True)
class RoleModel:
    """The model of a role next to the policy.

    Args:
        shared: it is on the policy's devices.
    """

    role: Role
    use: RankUse
    ranks: int
    shared: bool

    @property
    def resident(self) -> Lines:
        return named(self.use.resident, self.role.name)

    @property
    def at_work(self) -> Lines:
        return with_fragmentation(self.use.updating if self.role.trains else self.use.scoring)


def bytes_of(dtype: str, *, gpus: bool) -> int:
    return {"float32": 4, "bfloat16": 2}.get(dtype, 2 if gpus else 4)


def named(lines: Lines, owner: str, count: int = 1) -> Lines:
    return {f"{owner}: {line}": count * size for line, size in lines.items()}


@dataclass(frozen=True)
class MemoryPlan:
    """The processes and places of a run; ``rank`` is what a rank of the policy needs."""

    model: ModelShape
    machine: Machine
    processes: dict[str, int]
    slots: Slots
    devices: tuple[MemoryUse, ...]
    rank: RankUse
    engine: EngineMemory

    @property
    def gpus_requested(self) -> int:
        return int(sum(bundle.get("GPU", 0) for bundle in self.slots.bundles))

    @property
    def fits(self) -> bool:
        enough = self.gpus_requested <= self.machine.gpus
        return enough and all(place.fits for place in self.devices)


def make_plan(cfg: Config, shape: ModelShape, machine: Machine, measure: Measure) -> MemoryPlan:
    """What a run of ``cfg`` needs; ``shape`` is the policy's."""
    gpus = machine.gpus > 0
    roles = roles_with_ranks(cfg)
    slots = plan_slots(cfg, gpus=gpus, roles=roles)
    counts = {name: len(bundles) for name, bundles in slots.by_role.items()}
    counts[ENGINES] += counts.pop(HYBRID_ENGINES, 0)  # they are in no bundles of their own
    engines_per_device = 1
    if cfg.trainer.placement.colocate_all:
        engines_per_device = -(-counts[ENGINES] // counts[POLICY])
    role_models = []
    for role in roles:
        if role.name != POLICY and role.own_model(cfg) is not None:
            ranks = counts[role.name]
            role_models.append(
                RoleModel(role, measure(cfg, role, ranks), ranks, role.colocated_if(cfg))
            )
    utilization = cfg.generator.gpu_memory_utilization if gpus else 0.0
    settings = engine_config(cfg, gpus=gpus)
    engine = engine_memory(
        cfg,
        settings,
        shape,
        fills=bool(BACKENDS.about(backend(cfg)).can["fills_memory"]),
        element_bytes=bytes_of(settings.dtype, gpus=gpus),
        device_bytes=int(machine.gpu_memory * utilization / engines_per_device),
    )
    rank = measure(cfg, ROLES[POLICY], counts[POLICY])
    way = settings.weight_sync_backend
    planner = _Planner(
        cfg, shape, machine, rank, engine, counts, role_models, engines_per_device, way
    )
    processes = {"controller": 1, **counts, "environments": cfg.environment.num_workers}
    return MemoryPlan(shape, machine, processes, slots, tuple(planner.devices()), rank, engine)


@dataclass(frozen=True)
class _Planner:
    """Everything that shares the machine's places.

    Args:
        rank: what a policy's rank needs.
        counts: ranks and engines.
        way: of the weights to the engines.
    """

    cfg: Config
    shape: ModelShape
    machine: Machine
    rank: RankUse
    engine: EngineMemory
    counts: dict[str, int]
    role_models: list[RoleModel]
    engines_per_device: int
    way: str

    def devices(self) -> list[MemoryUse]:
        if self.machine.gpus:
            return [*self._gpus(), self._host_with_gpus()]
        return [self._host_without_gpus()]

    @property
    def _weight_bytes(self) -> int:
        """Of the policy's weights as they are sent."""
        dtype = self.cfg.trainer.policy.model.dtype
        return self.shape.parameters * bytes_of(dtype, gpus=self.machine.gpus > 0)

    @property
    def _colocated_models(self) -> list[RoleModel]:
        return [model for model in self.role_models if model.shared]

    # ------------------------------------------------------------ GPUs

    def _gpus(self) -> list[MemoryUse]:
        generator = self.cfg.generator
        capacity = self.machine.gpu_memory
        ranks = self.counts[POLICY]
        context = CONTEXT * (1 + len(self._colocated_models))
        phases = _with_line(self._training_phases(), "context", context)
        if self.cfg.trainer.placement.colocate_all:
            phases = self._taking_turns(phases)
            return [fullest("policy and engines", ranks, capacity, phases)]
        hybrid = generator.hybrid_engines if generator.own_engines else 0
        name = "policy"
        if hybrid:
            name = "policy, hybrid engines"
            phases = self._taking_turns(phases)
        devices = [fullest(name, ranks, capacity, phases)]
        for model in self.role_models:
            if not model.shared:
                lines = model.at_work | {"context": CONTEXT}
                phase = "update" if model.role.trains else "log-probabilities"
                devices.append(MemoryUse(model.role.name, model.ranks, capacity, phase, lines))
        count = (self.counts[ENGINES] - hybrid) * generator.devices_per_engine
        if count:
            # vLLM leaves the rest of a GPU to others.
            limit = int(capacity * generator.gpu_memory_utilization)
            devices.append(MemoryUse("engines", count, limit, "generation", self.engine.lines))
        return devices

    def _training_phases(self) -> Phases:
        """Of a policy's device: one model at a time works, the others wait."""
        waiting: Lines = {}
        for model in self._colocated_models:
            waiting |= model.resident
        phases = {
            "update": with_fragmentation(self.rank.updating) | waiting,
            "optimizer step": with_fragmentation(self.rank.stepping) | waiting,
            "log-probabilities": with_fragmentation(self.rank.scoring) | waiting,
            "weight sync": self.rank.publishing | waiting,
        }
        for model in self._colocated_models:
            lines = self.rank.resident | waiting | named(model.at_work, model.role.name)
            phases[model.role.name] = lines | self._waiting_gradients(model)
        return phases

    def _taking_turns(self, training: Phases) -> Phases:
        """The policy waits on the host while the engines have a cache; engines wake without one for
        a weight sync."""
        engines = self.engines_per_device
        context = {"context": CONTEXT * (2 + engines)}
        sync = dict(self.rank.publishing)
        sync.pop(OPTIMIZER_STATE, None)  # weights alone come back to the device
        if self.way == "cuda_ipc":
            # The policy stays; a part lies in a buffer and is copied in each engine.
            largest = self._weight_bytes // self.shape.parameters * self.shape.largest_tensor
            part_bytes = max(PART_BYTES, largest)
            sync = self.rank.publishing | {"parts": (1 + engines) * part_bytes}
            for model in self._colocated_models:
                sync |= model.resident
        sync |= named({"weights": self.engine.weights}, "engines", engines)
        phases = {"generation": named(self.engine.lines, "engines", engines) | context}
        phases |= _with_line(training, "sleeping engines", CONTEXT * engines)
        phases["weight sync"] = sync | context
        return phases

    def _waiting_gradients(self, model: RoleModel, ranks: int = 1) -> Lines:
        """The policy's gradients, while a role on its devices is trained: both step after that."""
        if not (model.role.trains and model.shared):
            return {}
        return {f"policy: {GRADIENTS}": ranks * self.rank.gradients}

    # ------------------------------------------------------------ hosts

    def _host_with_gpus(self) -> MemoryUse:
        """The first policy node, which sends the weights."""
        nodes = self.cfg.trainer.placement.policy_num_nodes
        ranks = self.counts[POLICY] // nodes
        workers = ranks + sum(-(-model.ranks // nodes) for model in self.role_models)
        lines = self._processes(workers, -(-self.counts[ENGINES] // nodes)) | self._buffers()
        lines["batch"] = 2 * batch_bytes(self.cfg)
        offloaded: list[RoleModel] = []
        if self.cfg.trainer.placement.colocate_all or self.cfg.generator.hybrid_engines:
            offloaded = self._colocated_models
            lines["offloaded policy"] = ranks * self.rank.resident_bytes
        else:
            lines |= _on_host(self.rank, "policy", ranks)
        for model in self.role_models:
            if model in offloaded:
                lines[f"offloaded {model.role.name}"] = ranks * model.use.resident_bytes
            else:
                lines |= _on_host(model.use, model.role.name, model.ranks // nodes)
        phases = {"training": lines, "weight sync": lines | self._weight_sync()}
        phases = self._with_checkpoint(phases, lines, nodes)
        return fullest("host", nodes, self.machine.host_memory, phases)

    def _host_without_gpus(self) -> MemoryUse:
        ranks = self.counts[POLICY]
        engines = self.counts[ENGINES]
        workers = sum(self.counts.values()) - engines
        lines = self._processes(workers, engines) | self._buffers()
        engine = dict(self.engine.lines)
        dtype = self.cfg.generator.dtype
        same_dtype = dtype in ("auto", self.cfg.trainer.policy.model.dtype)
        if same_dtype and computes_on_mapped_weights(self.cfg):
            del engine["weights"]  # it computes on the shared memory
        lines |= named(engine, "engines", engines)
        lines["batch"] = 2 * batch_bytes(self.cfg)
        for model in self.role_models:
            lines |= named(model.use.resident, model.role.name, model.ranks)
        # Ranks keep what an update has freed for the next one.
        transient = sum(self.rank.updating.values()) - sum(self.rank.resident.values())
        freed = {"policy: freed": ranks * min(RETAINED, transient)}
        between_steps = lines | named(self.rank.resident, "policy", ranks) | freed
        scoring = named(with_fragmentation(self.rank.scoring), "policy", ranks)
        phases = {
            "update": lines | named(with_fragmentation(self.rank.updating), "policy", ranks),
            "log-probabilities": lines | scoring,
        }
        for model in self.role_models:
            at_work = named(model.at_work, model.role.name, model.ranks)
            if model.role.trains and not model.shared:  # at the same time as the policy
                phases["update"] |= at_work
            waiting = self._waiting_gradients(model, ranks)
            phases[model.role.name] = between_steps | at_work | waiting
        phases["weight sync"] = between_steps | self._weight_sync()
        phases = self._with_checkpoint(phases, between_steps, 1)
        return fullest("host", 1, self.machine.host_memory, phases)

    def _processes(self, workers: int, engines: int) -> Lines:
        gpus = self.machine.gpus > 0
        processes_per_engine = BACKENDS.about(backend(self.cfg)).can["processes"]
        with_torch = 1 + workers + processes_per_engine * engines
        environments = PROCESS[False] * self.cfg.environment.num_workers
        return {"processes": PROCESS[gpus] * with_torch + environments}

    def _weight_sync(self) -> Lines:
        if self.way in BETWEEN_GPUS:
            return {}
        # Without GPUs every rank gathers in host memory; with them rank 0 alone copies to it.
        ranks = 1 if self.machine.gpus else self.counts[POLICY]
        gathered = sum(self.rank.publishing.values()) - sum(self.rank.resident.values())
        lines = {"gathered weights": ranks * gathered, BUFFERS: self._weight_bytes}
        return lines | self._buffers()

    def _buffers(self) -> Lines:
        """What engines map stays from one weight sync to the next."""
        if self.way in BETWEEN_GPUS or not maps_weights(self.cfg):
            return {}
        # Engines compute on one buffer while the model is written.
        copies = 2 if computes_on_mapped_weights(self.cfg) else 1
        return {BUFFERS: copies * self._weight_bytes}

    def _with_checkpoint(self, phases: Phases, between_steps: Lines, nodes: int) -> Phases:
        """Checkpoints are put together role after role between steps, or, if they are
        asynchronous, of all roles at once during every phase."""
        if not saves(self.cfg.trainer):
            return phases
        copies = [self.counts[POLICY] // nodes * self.rank.learnt]
        copies += [-(-model.ranks // nodes) * model.use.learnt for model in self.role_models]
        if not self.cfg.trainer.ckpt_async:
            return phases | {"checkpoint": between_steps | {"checkpoint": max(copies)}}
        return _with_line(phases | {"checkpoint": between_steps}, "checkpoint", sum(copies))


def _with_line(phases: Phases, line: str, size: int) -> Phases:
    return {phase: lines | {line: size} for phase, lines in phases.items()}


def _on_host(use: RankUse, owner: str, count: int) -> Lines:
    return named({f"{line} on the host": size for line, size in use.host.items()}, owner, count)

"""Settings, a model's shape and a machine: which processes there are, what each device and the host must hold.

Invariant: pure; the same settings give the same plan on every machine. A place (a kind of device, or the host) is
shown at the moment when it holds most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from skyasync.cluster.placement import ENGINES, Slots, plan_slots
from skyasync.config.resume import saves
from skyasync.config.sampling import backend
from skyasync.config.schema import Config
from skyasync.engines.settings import engine_config
from skyasync.planning.activations import FLOAT32
from skyasync.planning.adapters import adapter_parameters, between_halves
from skyasync.planning.axes import divided, filters
from skyasync.planning.engine_memory import GIB, EngineMemory, engine_memory
from skyasync.planning.machine import Machine
from skyasync.planning.shape import ModelShape
from skyasync.planning.training_memory import Lines, Rank, held, learnt, publishing, scoring, updating
from skyasync.planning.work import batch_bytes, expert_bytes, largest_micro_batch
from skyasync.workers.axes import Axes
from skyasync.workers.roles import CRITIC_ROLE, POLICY, ROLES, VOCABULARY, Role, wanted_roles

CONTEXT = GIB
"""What CUDA, NCCL and cuBLAS take on a GPU for each process that computes there, roughly."""

PROCESS = {False: GIB // 2, True: 3 * GIB // 2}
"""Host memory of a process with torch, by whether it has CUDA's libraries."""


BITS = {"nf4": 4 + 32 / 64, "int8": 8.0}
"""Of a number that is held as a code, with its share of a scale; of a row of int8 that is next to nothing."""


@dataclass(frozen=True)
class Place:
    """``count`` devices alike, or the host: ``lines`` are the bytes of one at its fullest, in the phase ``when``."""

    name: str
    count: int
    room: int
    when: str
    lines: Lines

    @property
    def total(self) -> int:
        return sum(self.lines.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.room


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
    rank, own = _rank(cfg, shape, ROLES[POLICY], gpus=gpus, ranks=roles[POLICY])
    per_device = -(-roles[ENGINES] // roles[POLICY]) if placement.colocate_all else 1
    others = tuple(
        _other(cfg, (shapes or {}).get(role.name, shape), role, rank, gpus=gpus, ranks=roles[role.name])
        for role in wanted_roles(cfg)
        if role.name != POLICY and role.own_model(cfg) is not None
    )
    share = int(machine.gpu_memory * cfg.generator.gpu_memory_utilization / per_device) if gpus else 0
    settings = engine_config(cfg, gpus=gpus)
    engine = engine_memory(cfg, settings, shape, backend=backend(cfg), b=_bytes(settings.dtype, gpus=gpus), share=share)
    parts = _Parts(cfg, shape, own, machine, rank, engine, roles, others, per_device)
    processes = {"controller": 1, **roles, "environments": cfg.environment.num_workers}
    return MemoryPlan(shape, machine, processes, slots, tuple(parts.places()), rank, engine)


@dataclass(frozen=True)
class _Other:
    """A role's model beside the policy; ``shape`` is a rank's part of it."""

    name: str
    shape: ModelShape
    rank: Rank
    shared: bool  # on the policy's devices
    ranks: int

    @property
    def held(self) -> Lines:
        return _named(held(self.shape, self.rank), self.name)

    @property
    def phase(self) -> str:
        return "update" if self.rank.trained else "log-probabilities"

    @property
    def at_work(self) -> Lines:
        return (updating if self.rank.trained else scoring)(self.shape, self.rank)


def _other(cfg: Config, shape: ModelShape, role: Role, policy: Rank, *, gpus: bool, ranks: int) -> _Other:
    shape = shape if role.head == VOCABULARY else shape.with_value_head
    if role.trains:
        rank, own = _rank(cfg, shape, role, gpus=gpus, ranks=ranks)
    else:
        b, axes = _bytes(role.model(cfg).dtype, gpus=gpus), role.axes(cfg, ranks)
        rank = Rank(
            _sharing(cfg, role, axes), b, policy.work, trained=False, vocabulary=role.head == VOCABULARY,
            shaped=policy.shaped, split=axes.tensor > 1,
        )  # fmt: skip
        own = divided(shape, axes.tensor, gathers=filters(cfg))
    return _Other(role.name, own, rank, role.shares(cfg), ranks)


def _rank(cfg: Config, shape: ModelShape, role: Role, *, gpus: bool, ranks: int) -> tuple[Rank, ModelShape]:
    trainer, sampling = cfg.trainer, cfg.generator.sampling_params
    axes = role.axes(cfg, ranks)
    work, count = largest_micro_batch(
        cfg, shape, gpus=gpus, ranks=axes.data, context=axes.context, rows_limit=trainer.micro_train_batch_size_per_gpu
    )
    lora = getattr(role.settings(cfg), "lora", None)
    optimizer = role.settings(cfg).optimizer_config
    asked = str(role.settings(cfg).gradient_checkpointing).lower()
    sharing = _sharing(cfg, role, axes)
    rank = Rank(
        ranks=sharing,
        replicas=axes.data * axes.context // sharing,
        routed=expert_bytes(cfg, shape) if role.name == POLICY else 0,
        split=axes.tensor > 1,
        b=_bytes(role.model(cfg).dtype, gpus=gpus),
        work=work,
        micro_batches=count,
        adapters=adapter_parameters(shape, lora) if lora and lora.rank else 0,
        between=between_halves(shape, lora) if lora and lora.rank else 0,
        checkpointing=gpus if asked == "auto" else asked != "false",
        selective=asked == "selective",
        reduced_once=getattr(role.settings(cfg), "reduce_gradients", "") == "update",
        vocabulary=role.head == VOCABULARY,
        entropy=trainer.algorithm.use_entropy_loss,
        shaped=sampling.temperature not in (0.0, 1.0),
        muon=optimizer.name == "muon",
        master=2 if optimizer.bf16_stochastic_round else FLOAT32,
        eight_bits=optimizer.name == "adamw_8bit",
        bits=BITS.get(lora.base_dtype, 0.0) if lora and lora.rank else 0.0,
        critic=role.name == POLICY and ROLES[CRITIC_ROLE].is_the_policys(cfg),
    )
    return rank, divided(shape, axes.tensor, gathers=filters(cfg))


def _sharing(cfg: Config, role: Role, axes: Axes) -> int:
    """Ranks over which its weights are sharded."""
    return getattr(role.settings(cfg), "fsdp_size", 0) or axes.data * axes.context


def _bytes(dtype: str, *, gpus: bool) -> int:
    return {"float32": 4, "bfloat16": 2}.get(dtype, 2 if gpus else 4)


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
    others: tuple[_Other, ...]
    engines_per_device: int

    def places(self) -> list[Place]:
        if not self.machine.gpus:
            return [self._host_without_gpus()]
        return [*self._gpus(), self._host_beside_gpus()]

    # ------------------------------------------------------------ devices

    def _gpus(self) -> list[Place]:
        placement, room = self.cfg.trainer.placement, self.machine.gpu_memory
        policy = {
            phase: lines | {"context": CONTEXT * (1 + len(self._beside_policy))}
            for phase, lines in self._training_phases().items()
        }
        if placement.colocate_all:
            return [_fullest("policy and engines", self.roles[POLICY], room, self._taking_turns(policy))]
        places = [_fullest("policy", self.roles[POLICY], room, policy)]
        for other in self.others:
            if not other.shared:
                lines = other.at_work | {"context": CONTEXT}
                places.append(Place(other.name, other.ranks, room, other.phase, lines))
        devices = self.roles[ENGINES] * self.cfg.generator.devices_per_engine
        share = int(room * self.cfg.generator.gpu_memory_utilization)
        engines = [Place("engines", devices, share, "generation", self.engine.lines)] if devices else []
        return [*places, *engines]

    def _taking_turns(self, policy: dict[str, Lines]) -> dict[str, Lines]:
        """The policy waits on the host while the engines are awake; they wake with their weights for a hand-over."""
        engines, contexts = self.engines_per_device, CONTEXT * (2 + self.engines_per_device)
        asleep = {"sleeping engines": CONTEXT * engines}
        handing = publishing(self.own, self.rank, first=False)
        return {
            "generation": _named(self.engine.lines, "engines", engines) | {"context": contexts},
            **{phase: lines | asleep for phase, lines in policy.items()},
            "hand-over": {"weights": handing["weights"], "gathered": handing["gathered"]}
            | _named({"weights": self.engine.weights}, "engines", engines)
            | {"context": contexts},
        }

    def _training_phases(self) -> dict[str, Lines]:
        """Of a policy's device: one model at a time works, the others wait."""
        idle: Lines = {}
        for other in self._beside_policy:
            idle |= other.held
        phases = {"update": updating(self.own, self.rank), "log-probabilities": scoring(self.own, self.rank)}
        phases = {phase: lines | idle for phase, lines in phases.items()}
        for other in self._beside_policy:
            phases[other.name] = held(self.own, self.rank) | idle | _named(other.at_work, other.name)
        return phases

    @property
    def _beside_policy(self) -> list[_Other]:
        return [other for other in self.others if other.shared]

    # ------------------------------------------------------------ hosts

    def _host_beside_gpus(self) -> Place:
        """Of the first policy node, which hands over the weights."""
        nodes, ranks = self.cfg.trainer.placement.policy_num_nodes, self.roles[POLICY]
        here = ranks // nodes
        processes = self._processes(here * (1 + len(self._beside_policy)), -(-self.roles[ENGINES] // nodes))
        always = processes | {"batch": 2 * batch_bytes(self.cfg, self.shape)}
        if self.cfg.trainer.placement.colocate_all:
            always["offloaded policy"] = here * sum(held(self.own, self.rank).values())
        phases = {"training": always, "hand-over": always | self._hand_over()}
        phases = self._with_checkpoint(phases, always, here * sum(learnt(self.own, self.rank).values()))
        return _fullest("host", nodes, self.machine.host_memory, phases)

    def _host_without_gpus(self) -> Place:
        ranks, engines = self.roles[POLICY], self.roles[ENGINES]
        workers = sum(self.roles.values()) - engines
        always = self._processes(workers, engines) | _named(self.engine.lines, "engines", engines)
        always["batch"] = 2 * batch_bytes(self.cfg, self.shape)
        for other in self.others:
            always |= {what: other.ranks * size for what, size in other.held.items()}
        idle = held(self.own, self.rank)
        phases = {
            phase: always | _named(lines, "policy", ranks)
            for phase, lines in {
                "update": updating(self.own, self.rank),
                "log-probabilities": scoring(self.own, self.rank),
            }.items()
        }
        phases["hand-over"] = always | _named(idle, "policy", ranks) | self._hand_over()
        between = always | _named(idle, "policy", ranks)
        phases = self._with_checkpoint(phases, between, ranks * sum(learnt(self.own, self.rank).values()))
        return _fullest("host", 1, self.machine.host_memory, phases)

    def _processes(self, workers: int, engines: int) -> Lines:
        each = PROCESS[self.machine.gpus > 0]
        vllm = 2 if backend(self.cfg) == "vllm" else 1  # an actor, and the core's process
        return {"processes": each * (1 + workers + vllm * engines) + PROCESS[False] * self.cfg.environment.num_workers}

    def _hand_over(self) -> Lines:
        if engine_config(self.cfg, gpus=self.machine.gpus > 0).weight_sync_backend == "nccl":
            return {}
        whole = publishing(self.shape, self.rank, first=True)
        on_host = whole["whole weights"] or (self.shape.parameters * self.rank.b if self.machine.gpus else 0)
        gathered = 0 if self.machine.gpus else whole["gathered"] * self.roles[POLICY]
        return {
            "gathered weights": on_host + gathered,
            "weights in shared memory": self.shape.parameters * self.rank.b,
        }

    def _with_checkpoint(self, phases: dict[str, Lines], between: Lines, copies: int) -> dict[str, Lines]:
        """Phases of a host on which checkpoints are put together ``between`` steps, or beside every phase."""
        if not self._saves:
            return phases
        if self.cfg.trainer.ckpt_async:
            phases = {phase: lines | {"checkpoint": copies} for phase, lines in phases.items()}
        return phases | {"checkpoint": between | {"checkpoint": copies}}

    @property
    def _saves(self) -> bool:
        return saves(self.cfg.trainer)


def _named(lines: Lines, who: str, count: int = 1) -> Lines:
    return {f"{who}: {what}": count * size for what, size in lines.items()}


def _fullest(name: str, count: int, room: int, phases: dict[str, Lines]) -> Place:
    when = max(phases, key=lambda phase: sum(phases[phase].values()))
    return Place(name, count, room, when, {what: size for what, size in phases[when].items() if size})

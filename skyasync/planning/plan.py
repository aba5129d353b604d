"""Settings, a model's shape and a machine: which processes there are, what each device and the host must hold.

Invariant: pure; the same settings give the same plan on every machine. A place (a kind of device, or the host) is
shown at the moment when it holds most.
"""

from __future__ import annotations

from dataclasses import dataclass

from skyasync.cluster.placement import Slots, plan_slots
from skyasync.config.sampling import backend
from skyasync.config.schema import Config
from skyasync.engines.settings import engine_config
from skyasync.planning.engine_memory import GIB, EngineMemory, engine_memory
from skyasync.planning.machine import Machine
from skyasync.planning.shape import ModelShape
from skyasync.planning.training_memory import Lines, Rank, held, publishing, scoring, updating
from skyasync.planning.work import batch_bytes, largest_micro_batch

CONTEXT = GIB
"""What CUDA, NCCL and cuBLAS take on a GPU for each process that computes there, roughly."""

PROCESS = {False: GIB // 2, True: 3 * GIB // 2}
"""Host memory of a process with torch, by whether it has CUDA's libraries."""


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


def make_plan(cfg: Config, shape: ModelShape, machine: Machine, *, reference: ModelShape | None = None) -> MemoryPlan:
    """What a run of ``cfg`` needs.

    Args:
        reference: the reference model's shape, where something asks for one.
    """
    gpus, placement = machine.gpus > 0, cfg.trainer.placement
    slots = plan_slots(cfg, gpus=gpus, with_reference=reference is not None)
    roles = {"policy": len(slots.policy), "reference": len(slots.reference), "engines": len(slots.engines)}
    rank = _rank(cfg, shape, gpus=gpus, ranks=roles["policy"])
    per_device = -(-roles["engines"] // roles["policy"]) if placement.colocate_all else 1
    share = int(machine.gpu_memory * cfg.generator.gpu_memory_utilization / per_device) if gpus else 0
    settings = engine_config(cfg, gpus=gpus)
    engine = engine_memory(cfg, settings, shape, backend=backend(cfg), b=_bytes(settings.dtype, gpus=gpus), share=share)
    parts = _Parts(cfg, shape, machine, rank, engine, roles, reference, per_device)
    return MemoryPlan(
        shape, machine, {"controller": 1, **{role: n for role, n in roles.items() if n}, "environments":
        cfg.environment.num_workers}, slots, tuple(parts.places()), rank, engine,
    )  # fmt: skip


def _rank(cfg: Config, shape: ModelShape, *, gpus: bool, ranks: int) -> Rank:
    trainer, sampling = cfg.trainer, cfg.generator.sampling_params
    work, count = largest_micro_batch(
        cfg, shape, gpus=gpus, ranks=ranks, rows_limit=trainer.micro_train_batch_size_per_gpu
    )
    asked = str(trainer.policy.gradient_checkpointing).lower()
    return Rank(
        ranks=ranks,
        b=_bytes(trainer.policy.model.dtype, gpus=gpus),
        work=work,
        micro_batches=count,
        checkpointing=gpus if asked not in ("true", "false") else asked == "true",  # auto: on a GPU
        entropy=trainer.algorithm.use_entropy_loss,
        shaped=sampling.temperature not in (0.0, 1.0),
    )


def _bytes(dtype: str, *, gpus: bool) -> int:
    return {"float32": 4, "bfloat16": 2}.get(dtype, 2 if gpus else 4)


@dataclass(frozen=True)
class _Parts:
    """Everything that shares the machine's places."""

    cfg: Config
    shape: ModelShape
    machine: Machine
    rank: Rank
    engine: EngineMemory
    roles: dict[str, int]
    reference: ModelShape | None
    engines_per_device: int

    def places(self) -> list[Place]:
        if not self.machine.gpus:
            return [self._host_without_gpus()]
        return [*self._gpus(), self._host_beside_gpus()]

    # ------------------------------------------------------------ devices

    def _gpus(self) -> list[Place]:
        placement, room = self.cfg.trainer.placement, self.machine.gpu_memory
        policy = {
            phase: lines | {"context": CONTEXT * (2 if self._shared_reference else 1)}
            for phase, lines in self._training_phases(shared=self._shared_reference).items()
        }
        if placement.colocate_all:
            return [_fullest("policy and engines", self.roles["policy"], room, self._taking_turns(policy))]
        places = [_fullest("policy", self.roles["policy"], room, policy)]
        if self.reference is not None and not self._shared_reference:
            lines = scoring(self.reference, self._reference_rank()) | {"context": CONTEXT}
            places.append(Place("reference", self.roles["reference"], room, "log-probabilities", lines))
        devices = self.roles["engines"] * self.cfg.generator.inference_engine_tensor_parallel_size
        share = int(room * self.cfg.generator.gpu_memory_utilization)
        return [*places, Place("engines", devices, share, "generation", self.engine.lines)]

    def _taking_turns(self, policy: dict[str, Lines]) -> dict[str, Lines]:
        """The policy waits on the host while the engines are awake; they wake with their weights for a hand-over."""
        engines, contexts = self.engines_per_device, CONTEXT * (2 + self.engines_per_device)
        asleep = {"sleeping engines": CONTEXT * engines}
        handing = publishing(self.shape, self.rank, first=False)
        return {
            "generation": _named(self.engine.lines, "engines", engines) | {"context": contexts},
            **{phase: lines | asleep for phase, lines in policy.items()},
            "hand-over": {"weights": handing["weights"], "gathered": handing["gathered"]}
            | _named({"weights": self.engine.weights}, "engines", engines)
            | {"context": contexts},
        }

    def _training_phases(self, *, shared: bool) -> dict[str, Lines]:
        phases = {"update": updating(self.shape, self.rank), "log-probabilities": scoring(self.shape, self.rank)}
        if self.reference is None or not shared:
            return phases
        beside = _named(held(self.reference, self._reference_rank()), "reference")
        phases = {phase: lines | beside for phase, lines in phases.items()}
        return phases | {
            "reference": held(self.shape, self.rank)
            | _named(scoring(self.reference, self._reference_rank()), "reference")
        }

    @property
    def _shared_reference(self) -> bool:
        return self.reference is not None and self.cfg.trainer.placement.colocate_policy_ref

    def _reference_rank(self) -> Rank:
        dtype = (self.cfg.trainer.ref.model if self.cfg.trainer.ref.model.path else self.cfg.trainer.policy.model).dtype
        b = _bytes(dtype, gpus=self.machine.gpus > 0)
        return Rank(self.roles["reference"], b, self.rank.work, trained=False, shaped=self.rank.shaped)

    # ------------------------------------------------------------ hosts

    def _host_beside_gpus(self) -> Place:
        """Of the first policy node, which hands over the weights."""
        nodes, ranks = self.cfg.trainer.placement.policy_num_nodes, self.roles["policy"]
        here = ranks // nodes
        always = self._processes(here, -(-self.roles["engines"] // nodes)) | {"batch": 2 * batch_bytes(self.cfg)}
        if self.cfg.trainer.placement.colocate_all:
            always["offloaded policy"] = here * sum(held(self.shape, self.rank).values())
        phases = {"training": always, "hand-over": always | self._hand_over()}
        if self._saves:
            copies = here * sum(held(self.shape, self.rank).values())
            phases["checkpoint"] = always | {"checkpoint": copies}
        return _fullest("host", nodes, self.machine.host_memory, phases)

    def _host_without_gpus(self) -> Place:
        ranks, engines = self.roles["policy"], self.roles["engines"]
        always = self._processes(ranks, engines) | _named(self.engine.lines, "engines", engines)
        always["batch"] = 2 * batch_bytes(self.cfg)
        if self.reference is not None:
            always |= _named(held(self.reference, self._reference_rank()), "reference", self.roles["reference"])
        idle = held(self.shape, self.rank)
        phases = {
            phase: always | _named(lines, "policy", ranks)
            for phase, lines in {
                "update": updating(self.shape, self.rank),
                "log-probabilities": scoring(self.shape, self.rank),
            }.items()
        }
        phases["hand-over"] = always | _named(idle, "policy", ranks) | self._hand_over()
        if self._saves:
            phases["checkpoint"] = always | _named(idle, "policy", ranks) | {"checkpoint": ranks * sum(idle.values())}
        return _fullest("host", 1, self.machine.host_memory, phases)

    def _processes(self, ranks: int, engines: int) -> Lines:
        each = PROCESS[self.machine.gpus > 0]
        policy_like = ranks * (2 if self._shared_reference else 1)
        vllm = 2 if backend(self.cfg) == "vllm" else 1  # an actor, and the core's process
        return {
            "processes": each * (1 + policy_like + vllm * engines) + PROCESS[False] * self.cfg.environment.num_workers
        }

    def _hand_over(self) -> Lines:
        if engine_config(self.cfg, gpus=self.machine.gpus > 0).weight_sync_backend == "nccl":
            return {}
        whole = publishing(self.shape, self.rank, first=True)
        on_host = whole["whole weights"] or (self.shape.parameters * self.rank.b if self.machine.gpus else 0)
        gathered = 0 if self.machine.gpus else whole["gathered"] * self.rank.ranks
        return {
            "gathered weights": on_host + gathered,
            "weights in shared memory": self.shape.parameters * self.rank.b,
        }

    @property
    def _saves(self) -> bool:
        return bool(self.cfg.trainer.ckpt_interval or self.cfg.trainer.ckpt_on_exit)


def _named(lines: Lines, who: str, count: int = 1) -> Lines:
    return {f"{who}: {what}": count * size for what, size in lines.items()}


def _fullest(name: str, count: int, room: int, phases: dict[str, Lines]) -> Place:
    when = max(phases, key=lambda phase: sum(phases[phase].values()))
    return Place(name, count, room, when, {what: size for what, size in phases[when].items() if size})

"""What one rank needs, measured: the role's own worker and backend compute on tensors without memory.

    config.json ─▶ model of a few layers ─▶ worker in a group of the run's size ─▶ torch's memory tracker ─▶ a line ─▶
    all layers

Nothing here follows what the workers do by a formula. Tensors are torch's fake ones (shapes, no memory), the process
group sends nothing, and layers are alike: two depths of the model give each number of the whole by a straight line.
Invariant: no weights are read, nothing is sent, and the process has no process group afterwards.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry, register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from skyasync.algorithms.objective import Objective
from skyasync.config.schema import Config
from skyasync.config.schema.reward_models import reward_models
from skyasync.models import MICRO_BATCH_TOKENS, VOCABULARY
from skyasync.models.backend import LOGPROBS, TOP_K, VALUES, OutputRequest
from skyasync.models.batch import B, UpdateBatch
from skyasync.models.fsdp.backend import FSDPBackend
from skyasync.models.fsdp.layers import decoder_layers
from skyasync.models.fsdp.loading import WrapAndShard
from skyasync.models.fsdp.optimizers import TrainedPart
from skyasync.models.fsdp.sharding import Mesh, local
from skyasync.models.heads import Head
from skyasync.models.packing import Layout, MicroBatch
from skyasync.models.parallel.context import Context
from skyasync.models.token_model import TokenModel
from skyasync.planning.memory import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    TEMPORARY,
    WEIGHTS,
    Lengths,
    Lines,
    RankUse,
    rows_of_a_rank,
)
from skyasync.planning.shape import config_of, read_shape, with_layers
from skyasync.workers.model_worker import ModelWorker
from skyasync.workers.roles import REWARD_ROLE, TEACHER_ROLE, Role

CATEGORIES = {
    "SHARDED_PARAM": WEIGHTS, "PARAM": WEIGHTS, "BUFFER": WEIGHTS, "UNSHARDED_PARAM": GATHERED,
    "ALL_GATHER": GATHERED, "REDUCE_SCATTER": GATHERED, "SHARDED_GRAD": GRADIENTS, "UNSHARDED_GRAD": GRADIENTS,
    "GRAD": GRADIENTS, "ACT": ACTIVATIONS, "INP": ACTIVATIONS, "TEMP": TEMPORARY, "OTH": TEMPORARY, "OPT": OPTIMIZER,
}  # fmt: skip
"""Our words for those of torch's trackers."""

_aten: Any = torch.ops.aten


class _MeasuredContext(Context):
    def slice(self, layout: Layout) -> Layout:
        with _disable_current_modes():  # how much it selects depends on the numbers
            return super().slice(layout)


class MeasuredBackend(FSDPBackend):
    """The backend without files, other ranks and numbers.

    Attributes:
        counted: micro-batches that the batch has; the first two are computed.
        tokens: in the first, which is the largest.
        between: called before the first micro-batch and after each.
    """

    counted, tokens = 0, 0
    between: Callable[[], None] = staticmethod(lambda: None)

    def _form_group(self, store: dist.Store) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=self.ranks.rank, world_size=self.ranks.world_size)

    def _make_mesh(self) -> Mesh:
        with _disable_current_modes():
            return super()._make_mesh()

    def _read(self, head: Head, dtype: torch.dtype, device: torch.device, prepare: WrapAndShard) -> TokenModel:
        with _disable_current_modes():
            with torch.device("meta"):
                empty = head.empty(self.spec.path, dtype)
            empty.tie_weights()
            wrapper = prepare(empty)
        if self.adapters:
            self.adapters.detach_adapters()  # they get their memory later, and are then attached again
        wrapper.to_empty(device=device)
        if self.mesh is None:
            wrapper.model.tie_weights()
            wrapper.to = lambda device: wrapper  # type: ignore[method-assign]  # fake parameters cannot be replaced
        return wrapper

    def _build(self) -> TokenModel:
        wrapper = super()._build()
        if wrapper.context:
            wrapper.context = _MeasuredContext(**vars(wrapper.context))
        return wrapper

    def _micro_batches(self, batch: B, max_rows: int) -> Iterator[MicroBatch[B]]:
        fake = detect_fake_mode()
        assert fake is not None
        with _disable_current_modes():
            found = list(super()._micro_batches(batch, max_rows))
        self.counted, self.tokens = len(found), found[0].layout.tokens.numel()
        for micro in found[:2]:
            layout = micro.layout if self.model.context else _each(micro.layout, fake.from_tensor)
            yield MicroBatch(micro.rows, micro.batch.each(fake.from_tensor), layout)
            self.between()

    def _examine(self, name: str, part: TrainedPart, scale: float) -> list[str]:
        part.measure(scale, self.mesh)
        self._metrics[name] = {}
        return []


def _each(layout: Layout, function: Callable[[Tensor], Tensor]) -> Layout:
    return replace(layout, **{n: function(v) for n, v in vars(layout).items() if isinstance(v, Tensor)})


class _Operations(TorchDispatchMode):
    """Counts floating-point operations, and bytes of collectives by kind; a number that is asked for is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if DTensor in types:
            return NotImplemented
        if func is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 0.0 if args[0].is_floating_point() else 0
        if func is _aten._grouped_mm.default and args[0].dtype == torch.float32:  # fake ones are of bfloat16 alone
            first, second = args[:2]
            sizes = (
                (len(first), second.shape[-1]) if second.dim() == 3 else (len(args[2]), len(first), second.shape[-1])
            )
            result = first.new_empty(sizes)
        else:
            result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [t for t in torch.utils._pytree.tree_leaves((args, result)) if isinstance(t, Tensor)]
            kind = next((name for mark, name in COLLECTIVES.items() if mark in func.__name__), "")
            if kind:
                self.counts[kind] += max((t.nbytes for t in tensors), default=0)
        elif formula := flop_registry.get(func._overloadpacket):
            self.counts[FLOPS] += formula(*args, **(kwargs or {}), out_val=result)
        return result


FLOPS = "flops"
COLLECTIVES = {
    "allgather": "all-gather", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce", "all_reduce": "all-reduce", "alltoall": "all-to-all", "all_to_all": "all-to-all",
    "broadcast": "broadcast",
}  # fmt: skip


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:  # noqa: ANN401
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:  # noqa: ANN401
    return int(sdpa_backward_flop_count(grad, query, key, value))


def _grouped(first: Any, second: Any, *_: Any, **__: Any) -> int:  # noqa: ANN401
    return 2 * int(first[-2] * first[-1] * second[-1])


for _packet, _formula in (
    (_aten._scaled_dot_product_flash_attention_for_cpu, _attention),
    (_aten._scaled_dot_product_flash_attention_for_cpu_backward, _attention_backward),
    (_aten._grouped_mm, _grouped),
):
    if _packet not in flop_registry:
        register_flop_formula(_packet)(_formula)


Sections = dict[str, dict[str, float]]


class _Tracker(MemTracker):
    """Of a model that is not sharded; torch's own cannot take frozen parameters."""

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> tuple[int, int]:
        trained = all(parameter.requires_grad for parameter in module.parameters())
        return super()._track_module_params_and_buffers(module, install_grad_hooks and trained)


class _Measurement:
    """One worker at work under torch's tracker."""

    def __init__(self, worker: ModelWorker, role: Role) -> None:
        self.worker, self.role, self.mode = worker, role, FakeTensorMode(allow_non_fake_inputs=True)
        self.sections: Sections = {}
        self.counter = _Operations()

    def run(self, batch: UpdateBatch) -> None:
        with self.mode, self.counter:
            self.worker.setup()
        (backend,) = self.worker.backends
        assert isinstance(backend, MeasuredBackend)
        self.backend = backend
        model = backend.model
        if self.role.trains:
            with self.mode, self.counter:
                self._make_optimizer_state()
        optimizer = backend.optimizer if self.role.trains else None
        if backend.mesh:
            self.tracker: MemTracker = FSDPMemTracker(model, optimizer)
        else:
            self.tracker = _Tracker()
            self.tracker.track_external(model, *([optimizer] if optimizer else []))
        backend.between = self.tracker.reset_mod_stats
        with self.mode, self.tracker, self.counter:
            self._cut("held")
            backend.forward(batch, self._request())
            self._cut("score")
            self.tracker.reset_mod_stats()
            deque(backend.weights(), maxlen=0)  # each is freed before the next
            self._cut("weight sync")
            synced = self.sections["weight sync"]
            synced[GATHERED] = synced.pop(ACTIVATIONS) + synced[GATHERED]
        if self.role.trains:
            self._update(batch)
        trained = [p for p in model.parameters() if p.requires_grad and self.role.trains]
        self.sections["sizes"] = {
            "trained": sum(local(p).nbytes for p in trained),
            "gradients": sum(local(p).numel() for p in trained) * 4,
        }

    def _request(self) -> OutputRequest:
        top_k = self.worker.cfg.trainer.teacher.top_k if self.role.name == TEACHER_ROLE else 0
        if top_k:
            return OutputRequest.of(TOP_K, top_k=top_k)
        return OutputRequest.of(LOGPROBS if self.role.head == VOCABULARY else VALUES)

    def _make_optimizer_state(self) -> None:
        """The first update is not the fullest: it begins without a state."""
        for part in self.backend.trained.values():
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            part.optimizer.step()
            part.optimizer.zero_grad()

    def _update(self, batch: UpdateBatch) -> None:
        """In windows between which the fullest moment cannot move when layers are added: up to the head's backward
        pass, that of the upper and of the lower half of the layers, and the optimizer step."""
        backend, self.counter = self.backend, _Operations()
        counter = self.counter
        counts: list[Counter[str]] = []

        def micro_batch_ended() -> None:
            self.tracker.reset_mod_stats()
            if torch.is_grad_enabled() and counter.counts.total():
                self._cut("lower layers")
                counts.append(counter.counts.copy())

        layers = decoder_layers(backend.model)
        marks = {len(layers) - 1: "forward and head", (len(layers) - 1) // 2: "upper layers"}
        hooks = [layers[i].register_forward_hook(self._at_gradient(name)) for i, name in marks.items()]
        backend.between = micro_batch_ended
        with self.mode, self.tracker, counter:
            self.tracker.reset_mod_stats()
            self.worker.forward_backward(batch)
            self._cut("lower layers")
            end = counter.counts.copy()
            backend.optimizer_step(dict.fromkeys(backend.trained, 0.0))
            self._cut("optimizer step")
        for hook in hooks:
            hook.remove()
        first = counts[0] if backend.counted > 1 else end
        for kind in counter.counts:
            last = end[kind] - (first[kind] if backend.counted > 1 else 0)
            self.sections[f"count {kind}"] = {
                "first": first[kind], "last": last, "step": counter.counts[kind] - end[kind]
            }  # fmt: skip

    def _at_gradient(self, name: str) -> Callable[..., None]:
        """A forward hook: the window ends when the gradient of the layer's output is there."""

        def hook(module: nn.Module, inputs: object, output: Any) -> None:  # noqa: ANN401
            tensor = output if isinstance(output, Tensor) else output[0]
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._cut(name))

        return hook

    def _cut(self, window: str) -> None:
        """The fullest moment since the last call belongs to this window."""
        (peak,) = self.tracker.get_tracker_snapshot("peak").values()
        lines: Counter[str] = Counter()
        for kind, size in peak.items():
            if kind != "Total":
                lines[CATEGORIES[kind.name]] += size
        if lines.total() > sum(self.sections.get(window, {}).values()):
            self.sections[window] = dict(lines)
        self.tracker._peak_mem_snap = self.tracker.get_tracker_snapshot()
        self.tracker._peak_mem = {device: snap["Total"] for device, snap in self.tracker._peak_mem_snap.items()}


@contextmanager
def _fake_ranks() -> Iterator[None]:
    """No process group and no seed stay; DTensor finds shapes with whole tensors, which the tracker must not count."""
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def aside(self: Any, schema: Any) -> Any:  # noqa: ANN401
        with _disable_current_modes():
            return propagate(self, schema)

    with mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", aside), torch.random.fork_rng([]):
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def measure(cfg: Config, role: Role, ranks: int, *, gpus: bool) -> RankUse:
    """What rank 0 of so many needs.

    Raises:
        UserError, ValueError: as the worker does, for what cannot be divided, for instance.
    """
    if role.name == REWARD_ROLE:  # its models lie side by side, and work one after the other
        uses = [
            _measure(_with_one(cfg, model), role, ranks, gpus=gpus)
            for model in reward_models(cfg.trainer.reward).values()
        ]
        largest = max(uses, key=lambda use: sum(use.scoring.values()) - sum(use.held.values()))
        held = Counter[str]()
        for use in uses:
            held.update(use.held)
        return replace(largest, held=dict(held), scoring=largest.scoring | dict(held))
    return _measure(cfg, role, ranks, gpus=gpus)


def _with_one(cfg: Config, model: Any) -> Config:  # noqa: ANN401
    cfg = copy.deepcopy(cfg)
    cfg.trainer.reward.models = {}
    cfg.trainer.reward.model.path, cfg.trainer.reward.model.dtype = model.path, model.dtype
    return cfg


_MEASURED: dict[tuple[object, ...], RankUse] = {}


def _measure(cfg: Config, role: Role, ranks: int, *, gpus: bool) -> RankUse:
    shape = read_shape(role.model(cfg).path, f"{role.section}.model.path", role.head, role.config_kwargs(cfg))
    trainer, generator, mesh = cfg.trainer, cfg.generator, role.mesh_shape(cfg, ranks)
    cap = trainer.micro_batch_tokens or MICRO_BATCH_TOKENS["cuda" if gpus else "cpu"]
    key = (role.name, ranks, gpus, shape, repr(trainer), repr(generator.sampling_params), str(Lengths.of(cfg)))
    if key in _MEASURED:
        return _MEASURED[key]
    # Of this rank's rows as many as fill two micro-batches, whatever they share.
    lengths, rows = Lengths.of(cfg), rows_of_a_rank(cfg, mesh.data)
    some = min(rows, math.ceil(3 * cap * mesh.context / lengths.response) + 2 * lengths.samples)
    found: list[tuple[int, Sections]] = []
    for depth in shape.depths:
        with TemporaryDirectory() as folder, _fake_ranks():
            with_layers(config_of(shape.path, role.head, role.config_kwargs(cfg)), depth).save_pretrained(folder)
            worker = role.worker_class()(_settings(cfg, role, folder, gpus=gpus), 0, ranks, "cpu", role=role.name)
            worker._store = FakeStore()
            measurement = _Measurement(worker, role)
            measurement.run(_longest(cfg, lengths, some, (depth, shape.experts_per_token)))
            found.append((depth, measurement.sections))
    backend = measurement.backend
    sections = found[-1][1] if len(found) == 1 else _line(*found, shape.layers)
    count = math.ceil(backend.counted * rows / some)
    _MEASURED[key] = use = _use(
        sections, backend.tokens, count, checkpointing=bool(role.trains and backend.recomputes())
    )
    return use


def _settings(cfg: Config, role: Role, folder: str, *, gpus: bool) -> Config:
    """The same on CPUs, with what depends on the kind of device as it is there."""
    cfg = copy.deepcopy(cfg)
    cfg.trainer.strategy = f"{MeasuredBackend.__module__}:{MeasuredBackend.__name__}"
    cfg.trainer.micro_batch_tokens = cfg.trainer.micro_batch_tokens or MICRO_BATCH_TOKENS["cuda" if gpus else "cpu"]
    model, section = role.model(cfg), role.settings(cfg)
    model.path = folder
    if model.dtype == "auto":
        model.dtype = "bfloat16" if gpus else "float32"
    if getattr(section, "gradient_checkpointing", "") == "auto":
        section.gradient_checkpointing = gpus
    for name, value in (("cpu_offload", "none"), ("torch_compile", False)):  # moved away by arithmetic; not counted
        if hasattr(section, name):
            setattr(section, name, value)
    return cfg


def _longest(cfg: Config, lengths: Lengths, rows: int, experts: tuple[int, int]) -> UpdateBatch:
    """Rows whose prompts and responses are as long as they may be.

    Args:
        experts: layers and experts per token, if they are replayed.
    """
    shape, algorithm = (rows, lengths.total), cfg.trainer.algorithm
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    loss_mask[:, lengths.prompt :] = True
    numbers = torch.zeros(shape)
    top_k = 2 * cfg.trainer.teacher.top_k if cfg.trainer.teacher.model.path else 0
    return UpdateBatch(
        tokens=torch.zeros(shape, dtype=torch.int64),
        attention_mask=torch.ones(shape, dtype=torch.bool),
        loss_mask=loss_mask,
        group_ids=torch.arange(rows) // lengths.samples,
        routed_experts=torch.zeros(*shape, *experts, dtype=torch.uint8)
        if cfg.trainer.policy.router_replay != "none"
        else None,
        behaviour_logprobs=numbers,
        versions=torch.zeros(shape, dtype=torch.int32),
        truncated=torch.zeros(rows, dtype=torch.bool),
        rewards=numbers,
        advantages=numbers,
        values=numbers,
        returns=numbers,
        proximal_logprobs=numbers,
        reference_logprobs=numbers if algorithm.use_kl_loss else None,
        teacher_logprobs=numbers if cfg.trainer.teacher.model.path else None,
        teacher_top_k=torch.zeros(*shape, top_k) if top_k else None,
        loss_weights=numbers,
        selection=loss_mask if Objective(algorithm).prepares else None,
    )


def _line(first: tuple[int, Sections], second: tuple[int, Sections], layers: int) -> Sections:
    (few, of_few), (more, of_more) = first, second
    return {
        section: {
            name: max(0.0, value + (value - of_few.get(section, {}).get(name, 0)) * (layers - more) / (more - few))
            for name, value in values.items()
        }
        for section, values in of_more.items()
    }


WINDOWS = "forward and head", "upper layers", "lower layers", "optimizer step"


def _use(sections: Sections, tokens: int, micro_batches: int, *, checkpointing: bool) -> RankUse:
    def lines(section: str) -> Lines:
        return {name: int(size) for name, size in sections.get(section, {}).items() if size >= 1}

    held, update = lines("held"), max(map(lines, WINDOWS), key=lambda window: sum(window.values()))
    counts = {
        name.removeprefix("count "): int(found["first"] * (micro_batches - 1) + found["last"] + found["step"])
        for name, found in sections.items()
        if name.startswith("count ")
    }
    sizes = sections["sizes"]
    return RankUse(
        held=held,
        scoring=lines("score"),
        updating=update,
        stepping=lines(WINDOWS[-1]),
        publishing=lines("weight sync"),
        gradients=int(sizes["gradients"]),
        trained=int(sizes["trained"]),
        learnt=int(sizes["trained"]) + held.get(OPTIMIZER, 0),
        tokens=tokens,
        micro_batches=micro_batches,
        flops=counts.pop(FLOPS, 0),
        sent=counts,
        checkpointing=checkpointing,
    )

"""What one rank needs, measured: the role's own worker and backend compute on tensors without
memory.

    config.json ─▶ model of a few layers ─▶ worker in a group of the run's size ─▶ storages are
    counted ─▶ a line ─▶ all layers

No formula follows what workers do. Tensors are torch's fake ones (shapes, no memory), and the
process group sends nothing. Layers are alike, so two depths of the model give each number of the
whole by a straight line. Invariant: no weights are read, nothing is sent, and the process has no
process group afterwards.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    flop_registry,
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)
from transformers import PreTrainedModel, masking_utils
from transformers.distributed.tensor_parallel import EpDispatchExpertsParallel

from skyasync.algorithms.objective import Objective
from skyasync.config.schema import Config, ParallelConfig
from skyasync.config.schema.models import PolicyConfig, RefConfig, TrainedModelConfig, reward_models
from skyasync.errors import UserError
from skyasync.inference.backends.vllm.setup import engine_arguments
from skyasync.inference.settings import engine_config
from skyasync.models import MICRO_BATCH_TOKENS, VOCABULARY
from skyasync.models.backend import LOGPROBS, TOP_K, VALUES, OutputRequest
from skyasync.models.batch import B, UpdateBatch
from skyasync.models.config import config_value
from skyasync.models.fsdp.backend import FSDPBackend
from skyasync.models.fsdp.loading import WrapAndShard, decoder_layers
from skyasync.models.fsdp.sharding import Mesh, PipelineGroups, local
from skyasync.models.heads import Head
from skyasync.models.images import FAMILIES
from skyasync.models.packing import Layout, MicroBatch
from skyasync.models.parallel.context import Context
from skyasync.models.parallel.pipeline import layers_of_stages
from skyasync.models.token_model import TokenModel
from skyasync.models.vision import GRID, Vision
from skyasync.planning.memory import (
    ACTIVATIONS,
    ADAPTERS,
    FLOAT32,
    GATHERED,
    GRADIENTS,
    LINES,
    LOGITS,
    OPTIMIZER_STATE,
    WEIGHTS,
    EngineMemory,
    Lengths,
    Lines,
    RankUse,
    fullest_of,
    rows_of_a_rank,
)
from skyasync.planning.shape import ModelShape, config_of, read_shape, with_layers
from skyasync.weight_sync.tensors import to_message
from skyasync.workers.model_worker import ModelWorker
from skyasync.workers.roles import POLICY, REWARD_ROLE, ROLES, TEACHER_ROLE, Role

T = TypeVar("T")

_aten: Any = torch.ops.aten
FLOPS = "flops"
IMAGE_TOKENS = 1024  # of an image, at most, if images may have any size
COLLECTIVES = "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "send"


class Meter(TorchDispatchMode):
    """Counts bytes of live storages, floating-point operations, and bytes of collectives.

    Attributes:
        live: bytes by line.
        peak: of the fullest moment since ``restart``.
        counts: operations, and bytes by collective.
        vocabulary: sizes of the last dimension by which logits are known.
        computes: operations without a fake tensor have results, such as those on images' sizes and
            positions.
        recomputes: so have those on such results, in a backward pass that computes layers again.
    """

    computes = recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.vocabulary: set[int] = set()
        self._storages: dict[int, tuple[weakref.ref[Any], list[Any]]] = {}
        self._total = self._most = 0
        self._resize = torch.UntypedStorage.resize_

    def restart(self) -> None:
        self.peak, self._most = self.live.copy(), self._total

    def watch(self, tensor: Tensor | None, line: str, *, move: bool = True) -> None:
        """Count the tensor's storage in this line; one that is counted already only if it may
        ``move``."""
        if tensor is None:
            return
        storage = local(tensor).untyped_storage()
        key = storage._cdata
        if key in self._storages:
            entry = self._storages[key][1]
            if move and entry[1] != line:
                self.live[entry[1]] -= entry[0]
                self.live[line] += entry[0]
                entry[1] = line
            return
        entry = [0, line]
        self._storages[key] = weakref.ref(storage, partial(self._freed, key)), entry
        self._change(entry, storage.nbytes())

    def _change(self, entry: list[Any], size: int) -> None:
        self.live[entry[1]] += size - entry[0]
        self._total += size - entry[0]
        entry[0] = size
        if self._total > self._most:
            self.peak, self._most = self.live.copy(), self._total

    def _freed(self, key: int, _: object) -> None:
        self._change(self._storages.pop(key)[1], 0)

    @contextmanager
    def counting(self, mode: FakeTensorMode) -> Iterator[None]:
        """FSDP frees and takes memory by resizing storages, which no dispatch sees."""

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            self._resize(storage, size)
            known = self._storages.get(storage._cdata)
            if known:
                if not known[1][0]:
                    known[1][1] = GATHERED
                self._change(known[1], storage.nbytes())

        with mode, self, mock.patch.object(torch.UntypedStorage, "resize_", resize):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if DTensor in types:
            return NotImplemented
        if func is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            # a number that is needed: there is none
            if args[0].is_floating_point():
                return 0.0
            return 0
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = self.computes or (self.recomputes and given)
        if known and not any(isinstance(tensor, FakeTensor) for tensor in given):
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        # fake ones are of bfloat16 alone
        if func is _aten._grouped_mm.default and args[0].dtype == torch.float32:
            first, second, offsets = args[:3]
            if second.dim() == 3:
                sizes = [len(first)]
            else:
                sizes = [len(offsets), len(first)]
            result = first.new_empty(*sizes, second.shape[-1])
        else:
            result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "fsdp"):
            self._collective(func.__name__, args, result)
        elif formula := flop_registry.get(func._overloadpacket):
            self.counts[FLOPS] += formula(*args, **(kwargs or {}), out_val=result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, FakeTensor):
                logits = tensor.dim() > 1 and tensor.shape[-1] in self.vocabulary
                self.watch(tensor, LOGITS if logits else ACTIVATIONS, move=False)
        return result

    def _collective(self, name: str, args: object, result: object) -> None:
        tensors = [t for t in tree_leaves((args, result)) if isinstance(t, FakeTensor)]
        kind = next(
            (kind for kind in COLLECTIVES if kind.replace("-", "") in name.replace("_", "")), ""
        )
        if kind and "copy" not in name:
            self.counts[kind] += max((t.nbytes for t in tensors), default=0)
        states = kind in ("send", "all-to-all") or name.startswith("recv")
        for tensor in tensors if not states else ():
            known = self._storages.get(tensor.untyped_storage()._cdata)
            if known is None or known[1][1] == ACTIVATIONS:
                self.watch(tensor, GATHERED)


FORMULAS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q, k, v
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
        sdpa_backward_flop_count(grad, q, k, v)
    ),
    _aten._grouped_mm: lambda first, second, *_, **__: 2 * first[-2] * first[-1] * second[-1],
}
for _packet, _formula in FORMULAS.items():
    if _packet not in flop_registry:
        register_flop_formula(_packet)(_formula)


def _balanced(
    style: object,
    states: Tensor,
    top_k_index: Tensor,
    local_experts: int,
    group: dist.ProcessGroup,
    size: int,
) -> tuple[Tensor, Tensor, Tensor, list[int], list[int]]:
    """Tokens go to all ranks in equal numbers: there are no numbers that say where.

    In the place of ``EpDispatchExpertsParallel._dispatch_tokens``.
    """
    del style, local_experts
    order = torch.argsort(top_k_index.reshape(-1))
    sent = states[order // top_k_index.size(-1)]
    sizes = [len(sent) // size + (rank < len(sent) % size) for rank in range(size)]
    received = all_to_all_single(sent, sizes, sizes, group)
    return received, order.new_zeros(len(received)), order, sizes, sizes


class _MeasuredGroups(PipelineGroups):
    def from_last(self, value: T) -> T:
        return value


class _MeasuredContext(Context):
    def slice(self, layout: Layout) -> Layout:
        with _disable_current_modes():  # how much it selects depends on the numbers
            return super().slice(layout)


class _MeasuredVision(Vision):
    """The tower computes images that take all tokens but those of responses."""

    def __init__(self, config: Any, backend: MeasuredBackend) -> None:  # noqa: ANN401
        super().__init__(config)
        self._config = config
        self._backend = backend

    def inputs(self, layout: Layout, model: PreTrainedModel) -> dict[str, Tensor]:
        self._backend.meter.computes = True
        try:
            return super().inputs(layout, model)
        finally:
            self._backend.meter.computes = False
            self._backend.meter.recomputes = True

    def stand_in(self, layout: Layout) -> dict[str, Tensor]:
        vision = self._config.vision_config
        tokens = max(1, layout.tokens.numel() - len(layout.targets))
        merge = config_value(vision, "spatial_merge_size")
        if merge:  # patches of images of any size
            side = max(1, math.isqrt(min(tokens, IMAGE_TOKENS)))
            grid = torch.tensor([[1, merge * side, merge * side]]).repeat(-(-tokens // side**2), 1)
            values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            return {
                "pixel_values": torch.ones(1, 1).expand(int(grid.prod(1).sum()), values),
                GRID: grid,
            }
        size = vision.image_size
        each = (size // vision.patch_size // config_value(self._config, "scale_factor", 1)) ** 2
        lead = [1] * FAMILIES[self._config.model_type].joined + [-(-tokens // each)]
        return {"pixel_values": torch.ones(1).expand(*lead, vision.num_channels, size, size)}


class MeasuredBackend(FSDPBackend):
    """The backend without files, other ranks and numbers.

    Attributes:
        meter: counts what it does.
        rows: of the first micro-batch, which is the largest.
        tokens: of a rank in it.
        computed: micro-batches of a batch that are computed.
    """

    meter: Meter
    rows = 0
    tokens = 0
    computed = 1

    def _form_group(self, store: dist.Store) -> None:
        dist.init_process_group(
            "fake", store=FakeStore(), rank=self.ranks.rank, world_size=self.ranks.world_size
        )

    def _make_mesh(self) -> Mesh:
        with _disable_current_modes():
            mesh = super()._make_mesh()
        if mesh.pipeline:
            return replace(mesh, pipeline=_MeasuredGroups(**vars(mesh.pipeline)))
        return mesh

    def _read(
        self, head: Head, dtype: torch.dtype, device: torch.device, prepare: WrapAndShard
    ) -> TokenModel:
        with _disable_current_modes():
            empty = head.empty(self.spec.path, dtype)
            empty.tie_weights()
            wrapper = prepare(empty)
        if self.adapters:
            # they get their memory later, and are then attached again
            self.adapters.detach_adapters()
        wrapper.to_empty(device=device)
        if self.mesh is None:
            wrapper.model.tie_weights()
            wrapper.to = lambda device: wrapper  # type: ignore[method-assign,assignment]  # fake ones stay
        return wrapper

    def _build(self) -> TokenModel:
        wrapper = super()._build()
        if wrapper.vision:
            wrapper.vision = _MeasuredVision(wrapper.model.config, self)
            tower: Any
            for tower in wrapper.modules():
                # windows of attention take no less memory, and are many
                if "fullatt_block_indexes" in vars(tower):
                    tower.fullatt_block_indexes = range(wrapper.model.config.vision_config.depth)
        if wrapper.context:
            wrapper.context = _MeasuredContext(**vars(wrapper.context))
        return wrapper

    def _micro_batches(self, batch: B, max_rows: int) -> Iterator[MicroBatch[B]]:
        fake = detect_fake_mode()
        assert fake is not None
        with _disable_current_modes():
            micro_batches = list(islice(super()._micro_batches(batch, max_rows), self.computed))
        self.rows = len(micro_batches[0].rows)
        self.tokens = -(-micro_batches[0].layout.tokens.numel() // self.spec.mesh_shape.context)

        def without_numbers(tensor: Tensor) -> Tensor:
            made = fake.from_tensor(tensor)
            self.meter.watch(made, ACTIVATIONS)
            return made

        for micro in micro_batches:
            if self.model.context:
                layout = micro.layout
            else:
                layout = micro.layout.each(without_numbers)
            yield MicroBatch(micro.rows, micro.batch.each(without_numbers), layout)

    def _examine(self, name: str, part: Any, scale: float) -> list[str]:  # noqa: ANN401
        part.measure(scale, self.mesh)
        self._metrics[name] = {}
        return []


class MeasuredGPUBackend(MeasuredBackend):
    """Its fake tensors are on a CPU, and it does as on a GPU."""

    on_cpu = False


WINDOWS = "forward and head", "upper layers", "lower layers", "optimizer step"
"""Of an update: in each of them the fullest moment stays where it is when layers are added."""

Sections = dict[str, dict[str, float]]


class _Measurement:
    """One worker at work under a meter."""

    def __init__(self, worker: ModelWorker, role: Role) -> None:
        self.worker = worker
        self.role = role
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.meter = Meter()
        self.sections: Sections = {}
        self.backend: MeasuredBackend

    def run(self, batch: UpdateBatch, rows: int) -> None:
        """Every phase; ``batch`` stands for so many rows."""
        with self.mode, self.meter:
            self.worker.setup()
        (backend,), meter = self.worker.backends, self.meter
        assert isinstance(backend, MeasuredBackend)
        self.backend = backend
        backend.meter = meter
        model = backend.model
        size = backend.model.model.config.get_text_config().vocab_size
        meter.vocabulary = {size, -(-size // backend.spec.mesh_shape.tensor)}
        for tensor in (*model.parameters(), *model.buffers()):
            meter.watch(tensor, ADAPTERS if backend.adapters and tensor.requires_grad else WEIGHTS)
        if self.role.trains:
            with meter.counting(self.mode):
                self._make_optimizer_state()
        with meter.counting(self.mode):
            meter.restart()
            self._end("resident")
            backend.forward(batch, self._request())
            self._end("score")
            deque(backend.weights(), maxlen=0)  # each is freed before the next
            self._end("weight sync")
        synced = self.sections["weight sync"]
        synced[GATHERED] = synced.get(GATHERED, 0) + synced.pop(ACTIVATIONS, 0)
        self.micro_batches = math.ceil(rows / backend.rows)
        if self.role.trains:
            self._update(batch)
        trained = [local(p) for p in model.parameters() if p.requires_grad and self.role.trains]
        self.sections["sizes"] = {
            "trained": sum(p.nbytes for p in trained),
            "gradients": sum(p.numel() for p in trained) * FLOAT32,
        }

    def _request(self) -> OutputRequest:
        if self.role.name == TEACHER_ROLE:
            top_k = self.worker.cfg.trainer.teacher.top_k
        else:
            top_k = 0
        if top_k:
            return OutputRequest.of(TOP_K, top_k=top_k)
        return OutputRequest.of(LOGPROBS if self.role.head == VOCABULARY else VALUES)

    def _parameters(self) -> Iterator[nn.Parameter]:
        for part in self.backend.trained.values():
            for group in part.optimizer.param_groups:
                yield from group["params"]

    def _make_gradients(self) -> None:
        for parameter in self._parameters():
            parameter.grad = torch.zeros_like(parameter)
            self.meter.watch(parameter.grad, GRADIENTS)

    def _make_optimizer_state(self) -> None:
        """The first update is not the fullest: it begins without a state."""
        self._make_gradients()
        for part in self.backend.trained.values():
            part.optimizer.step()
            part.optimizer.zero_grad()
            for state in part.optimizer.state.values():
                for tensor in tree_leaves(dict(state)):
                    if isinstance(tensor, Tensor):
                        self.meter.watch(tensor, OPTIMIZER_STATE)

    def _update(self, batch: UpdateBatch) -> None:
        """Of the last micro-batch, which finds the gradients of those before it."""
        backend = self.backend
        meter = self.meter
        # these gradients are whole: made by the one before
        once = backend.spec.reduce_gradients == "update"
        # that a stage keeps meanwhile, and one after them
        if backend.stage:
            others = backend.stage.warmup + 1
        else:
            others = 0
        backend.computed = min(self.micro_batches, others + (2 if once else 1))
        layers = decoder_layers(backend.model)
        window_of = {len(layers) - 1: WINDOWS[0], (len(layers) - 1) // 2: WINDOWS[1]}
        hooks = [
            layers[i].register_forward_hook(self._at_gradient(name))
            for i, name in window_of.items()
        ]
        if backend.mesh is None:
            hooks += [
                parameter.register_post_accumulate_grad_hook(
                    lambda p: meter.watch(p.grad, GRADIENTS)
                )
                for parameter in self._parameters()
                if parameter.requires_grad
            ]
        with meter.counting(self.mode):
            if self.micro_batches > 1 and not once:
                self._make_gradients()
            meter.counts.clear()
            meter.restart()
            self.worker.forward_backward(batch)
            self._end(WINDOWS[2])
            update = {kind: count / backend.computed for kind, count in meter.counts.items()}
            meter.counts.clear()
            for parameter in self._parameters():
                meter.watch(parameter.grad, GRADIENTS)
            meter.restart()
            backend.optimizer_step(dict.fromkeys(backend.trained, 0.0))
            self._end(WINDOWS[3])
        for hook in hooks:
            hook.remove()
        self.sections["micro-batch"] = update
        self.sections["step"] = dict(meter.counts)

    def _at_gradient(self, name: str) -> Callable[..., None]:
        """A forward hook: the window ends when the gradient of the layer's output is there."""

        def hook(module: nn.Module, inputs: object, output: Any) -> None:  # noqa: ANN401
            tensor = output if isinstance(output, Tensor) else output[0]
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._end(name))

        return hook

    def _end(self, window: str) -> None:
        """The fullest moment since the last call belongs to this window."""
        if self.meter.peak.total() > sum(self.sections.get(window, {}).values()):
            self.sections[window] = dict(self.meter.peak)
        self.meter.restart()


@contextmanager
def _fake_ranks() -> Iterator[None]:
    """No process group and no seed stay; DTensor finds shapes with whole tensors, which the meter
    must not count."""
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def aside(self: Any, schema: Any) -> Any:  # noqa: ANN401
        with _disable_current_modes():
            return propagate(self, schema)

    with (
        mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", aside),
        mock.patch.object(EpDispatchExpertsParallel, "_dispatch_tokens", _balanced),
        # Without numbers it finds rows that follow each other, and makes masks that no rank has.
        mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda positions: None),
        torch.random.fork_rng([]),
    ):
        try:
            yield
        finally:
            _clear_sharding_prop_cache()  # it has meshes of other ranks' groups
            if dist.is_initialized():
                dist.destroy_process_group()


def measure(cfg: Config, role: Role, ranks: int, *, gpus: bool) -> RankUse:
    """What rank 0 of so many needs; of a pipeline, in each phase, what its first or its last stage
    needs.

    Raises:
        UserError: as the worker does, for what cannot be divided, for instance, and where its code
            fails.
    """
    if role.name == REWARD_ROLE:  # its models lie side by side, and work one after the other
        uses = []
        for model in reward_models(cfg.trainer.reward).values():
            alone = copy.deepcopy(cfg)
            alone.trainer.reward.models = {}
            alone.trainer.reward.model.path = model.path
            alone.trainer.reward.model.dtype = model.dtype
            uses.append(_measure(alone, role, ranks, gpus=gpus))
        largest = max(uses, key=lambda use: sum(use.scoring.values()) - sum(use.resident.values()))
        resident = Counter[str]()
        for use in uses:
            resident.update(use.resident)
        return replace(largest, resident=dict(resident), scoring=largest.scoring | dict(resident))
    return _measure(cfg, role, ranks, gpus=gpus)


_MEASURED: dict[tuple[object, ...], RankUse] = {}


def _measure(cfg: Config, role: Role, ranks: int, *, gpus: bool) -> RankUse:
    shape = read_shape(
        role.model(cfg).path, f"{role.section}.model.path", role.head, role.config_kwargs(cfg)
    )
    trainer = cfg.trainer
    generator = cfg.generator
    mesh = role.mesh_shape(cfg, ranks)
    key = (
        role.name,
        ranks,
        gpus,
        shape,
        repr(trainer),
        repr(generator.sampling_params),
        str(Lengths.of(cfg)),
    )
    if key not in _MEASURED:
        stages = sorted({0, mesh.pipeline - 1})
        uses = [_measure_stage(cfg, role, ranks, stage, shape, gpus=gpus) for stage in stages]
        settings = role.settings(cfg)
        if gpus and isinstance(settings, TrainedModelConfig | RefConfig):
            offload = settings.cpu_offload
        else:
            offload = "none"
        _MEASURED[key] = fullest_of(uses).offloaded(offload)
    return _MEASURED[key]


def _measure_stage(
    cfg: Config, role: Role, ranks: int, stage: int, shape: ModelShape, *, gpus: bool
) -> RankUse:
    trainer = cfg.trainer
    mesh = role.mesh_shape(cfg, ranks)
    lengths = Lengths.of(cfg)
    cap = trainer.micro_batch_tokens or MICRO_BATCH_TOKENS["cuda" if gpus else "cpu"]
    # Of this rank's rows as many as fill the micro-batches that are computed, whatever they share.
    rows = rows_of_a_rank(cfg, mesh.data)
    some = min(
        rows,
        math.ceil((2 + mesh.pipeline) * cap * mesh.context / lengths.response)
        + 2 * lengths.samples,
    )
    depths = [depth * mesh.pipeline for depth in shape.depths]
    if depths[-1] > shape.layers:
        depths = [shape.layers]
    sections: list[tuple[int, Sections]] = []
    for depth in depths:
        with TemporaryDirectory() as folder, _fake_ranks():
            with_layers(
                config_of(shape.path, role.head, role.config_kwargs(cfg)), depth
            ).save_pretrained(folder)
            rank = stage * ranks // mesh.pipeline
            worker = role.worker_class()(
                _settings(cfg, role, folder, gpus=gpus), rank, ranks, "cpu", role=role.name
            )
            worker._store = FakeStore()
            measurement = _Measurement(worker, role)
            batch = _longest(cfg, lengths, some, (depth, shape.experts_per_token))
            try:
                measurement.run(batch, rows)
            except UserError:
                raise
            except (
                Exception
            ) as error:  # of transformers' or the worker's code: a run would end with it, too
                first = str(error).strip().partition("\n")[0]
                raise UserError(
                    f"{role.section}.model.path={shape.name}: the {role.name} worker fails with a model of this "
                    f"config.json, without weights: {type(error).__name__}: {first}"
                ) from error
            sections.append((layers_of_stages(depth, mesh.pipeline)[stage], measurement.sections))
    layers = layers_of_stages(shape.layers, mesh.pipeline)[stage]
    return _use(
        _line(sections[0], sections[-1], layers) if len(sections) > 1 else sections[0][1],
        measurement,
    )


def vllm_request(
    cfg: Config, engine: EngineMemory, shape: ModelShape, *, gpus: bool
) -> dict[str, Any]:
    """Arguments of an engine, and names and shapes that a weight sync sends, of a worker with all
    layers, alone."""
    role = ROLES[POLICY]
    alone = copy.deepcopy(cfg)
    config = engine_config(cfg, gpus=gpus)
    alone.trainer.parallel = ParallelConfig()
    alone.trainer.policy.fsdp_size = 0
    with TemporaryDirectory() as folder, _fake_ranks(), FakeTensorMode(allow_non_fake_inputs=True):
        config_of(shape.path, role.head, role.config_kwargs(cfg)).save_pretrained(folder)
        worker: Any = role.worker_class()(
            _settings(alone, role, folder, gpus=gpus), 0, 1, "cpu", role=role.name
        )
        worker._store = FakeStore()
        worker.setup()
        specs = to_message(worker._engine_weights().specs)
    config = replace(config, model_path=shape.path, extra=config.extra | {"adapter_rank": 0})
    cache = {"cache": 0 if gpus else engine.cache, "share": engine.weights + engine.cache}
    return {"arguments": engine_arguments(config, cpu=not gpus), "specs": specs, **cache}


def _settings(cfg: Config, role: Role, folder: str, *, gpus: bool) -> Config:
    """The same on CPUs, with what depends on the kind of device as it is there."""
    cfg = copy.deepcopy(cfg)
    backend = MeasuredGPUBackend if gpus else MeasuredBackend
    cfg.trainer.strategy = f"{backend.__module__}:{backend.__name__}"
    cfg.trainer.micro_batch_tokens = (
        cfg.trainer.micro_batch_tokens or MICRO_BATCH_TOKENS["cuda" if gpus else "cpu"]
    )
    model = role.model(cfg)
    section = role.settings(cfg)
    model.path = folder
    if model.dtype == "auto":
        model.dtype = "bfloat16" if gpus else "float32"
    if isinstance(section, TrainedModelConfig) and section.gradient_checkpointing == "auto":
        section.gradient_checkpointing = gpus
    if isinstance(section, TrainedModelConfig | RefConfig):
        section.cpu_offload = "none"  # what is moved away is subtracted later
    if isinstance(section, PolicyConfig):
        section.torch_compile = False  # not counted
    return cfg


def _longest(cfg: Config, lengths: Lengths, rows: int, experts: tuple[int, int]) -> UpdateBatch:
    """Rows whose prompts and responses are as long as they may be; samples of a prompt share
    nothing else.

    Args:
        experts: layers and experts per token, if they are replayed.
    """
    shape = (rows, lengths.total)
    teacher = cfg.trainer.teacher
    numbers = torch.zeros(shape)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    loss_mask[:, lengths.prompt :] = True
    tokens = torch.where(loss_mask, torch.arange(rows)[:, None] % lengths.samples, 0)
    names = (
        "behaviour_logprobs",
        "rewards",
        "advantages",
        "values",
        "returns",
        "proximal_logprobs",
        "loss_weights",
    )
    of_tokens: dict[str, Any] = dict.fromkeys(names, numbers)
    replayed = cfg.trainer.policy.router_replay != "none"
    return UpdateBatch(
        tokens=tokens,
        attention_mask=torch.ones_like(loss_mask),
        loss_mask=loss_mask,
        group_ids=torch.arange(rows) // lengths.samples,
        routed_experts=torch.zeros(*shape, *experts, dtype=torch.uint8) if replayed else None,
        versions=numbers.int(),
        truncated=torch.zeros(rows, dtype=torch.bool),
        reference_logprobs=numbers if cfg.trainer.algorithm.use_kl_loss else None,
        teacher_logprobs=numbers if teacher.model.path else None,
        teacher_top_k=torch.zeros(*shape, 2 * teacher.top_k)
        if teacher.top_k and teacher.model.path
        else None,
        selection=loss_mask if Objective(cfg.trainer.algorithm).prepares else None,
        **of_tokens,
    )


def _line(first: tuple[int, Sections], second: tuple[int, Sections], layers: int) -> Sections:
    (few, of_few), (more, of_more) = first, second
    return {
        section: {
            name: max(
                0.0,
                value
                + (value - of_few.get(section, {}).get(name, 0)) * (layers - more) / (more - few),
            )
            for name, value in values.items()
        }
        for section, values in of_more.items()
    }


def _use(sections: Sections, measurement: _Measurement) -> RankUse:
    def lines(section: str) -> Lines:
        sizes = sections.get(section, {})
        return {name: int(sizes[name]) for name in LINES if sizes.get(name, 0) >= 1}

    backend = measurement.backend
    count = measurement.micro_batches
    resident = lines("resident")
    update = max(map(lines, WINDOWS), key=lambda window: sum(window.values()))
    each = sections.get("micro-batch", {})
    step = sections.get("step", {})
    sizes = sections["sizes"]
    counts = {
        kind: int(count * each.get(kind, 0) + step.get(kind, 0))
        for kind in each.keys() | step.keys()
    }
    return RankUse(
        resident=resident,
        scoring=lines("score"),
        updating=update,
        stepping=lines(WINDOWS[-1]),
        publishing=lines("weight sync"),
        gradients=int(sizes["gradients"]),
        learnt=int(sizes["trained"]) + resident.get(OPTIMIZER_STATE, 0),
        tokens=backend.tokens,
        micro_batches=count,
        flops=counts.pop(FLOPS, 0),
        sent=dict(sorted(counts.items())),
        checkpointing=bool(measurement.role.trains and backend.recomputes()),
    )

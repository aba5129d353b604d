"""What a rank of :class:`FSDPBackend` needs, without weights, GPUs and other ranks.

    model of few layers on the meta device ─▶ a meter counts one micro-batch ─▶ a straight line to
    all layers ─▶ formulas: shards, gathers, reductions, optimizer state, collectives

Layers are alike, so memory and operations are linear in the number of layers, and two depths give
the line. What FSDP2 gathers and reduces follows from the sizes of the layers. Invariant: no weights
are read, nothing is sent and no process group is formed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from skyasync.models import MICRO_BATCH_TOKENS, STEPPED_AT_ONCE, MeshShape
from skyasync.models.backend import MODEL, LossFn, ModelSpec, OutputRequest, RankContext
from skyasync.models.batch import UpdateBatch
from skyasync.models.config import head_size
from skyasync.models.fsdp.backend import FSDPBackend
from skyasync.models.fsdp.loading import decoder_layers
from skyasync.models.fsdp.optimizers import is_low_precision, state_bytes
from skyasync.models.meter import Meter
from skyasync.models.packing import Layout, MicroBatches
from skyasync.models.parallel.context import RING, Context
from skyasync.models.rank_memory import (
    ACTIVATIONS,
    ADAPTERS,
    GATHERED,
    GRADIENTS,
    LINES,
    LOGITS,
    OPTIMIZER_STATE,
    WEIGHTS,
    Lines,
    RankUse,
)
from skyasync.models.token_model import TokenModel

META = torch.device("meta")
FLOAT32 = 4

SCORE = "score"
HEAD = "head"
LAYERS = "layers"
EMBEDDING = "embedding"
WINDOWS = (HEAD, LAYERS, EMBEDDING)
"""Of an update: until the head's gradient is there, until the layers' are, and the rest. In each of
them the fullest moment stays where it is when layers are added."""

QUANTIZED_BYTES = {"nf4": 4.5 / 8, "fp4": 4.5 / 8, "int8": 1.0}
"""Of an element, with the scale of its block."""

MUON_COPIES = 4
"""Of a whole matrix: its gradient, the step, and two in torch's Muon."""

LOW_PRECISION_COPIES = 10
"""Of the elements that ``LowPrecisionAdamW`` steps at once, in float32: weight, gradient, moments,
scales and codes, random bits, and what is between them. Fitted to a measured step on a CPU."""

ADAPTER_COPIES = 3
"""Of a matrix in float32 while adapters are merged into it for the weight sync."""

ELEMENTS = "elements"
TRAINED = "trained"
MATRIX = "matrix"
OPERATIONS = "operations"

Numbers = dict[str, float]


@dataclass
class RankSample:
    """One micro-batch of a model of ``depth`` layers.

    Args:
        numbers: linear in the layers: bytes, elements and operations.
        layer: elements of the largest layer, and of its largest matrix.
        root: elements of all that is no layer: embeddings, norm and head.
        rows: of the micro-batch.
        tokens: of a rank in it.
    """

    backend: FSDPBackend
    depth: int
    numbers: Numbers
    layer: Numbers
    root: Numbers
    rows: int
    tokens: int


def sample(
    spec: ModelSpec,
    ranks: RankContext,
    depth: int,
    batch: UpdateBatch,
    request: OutputRequest,
    loss: LossFn | None,
) -> RankSample:
    """Compute the first micro-batch of a batch, the largest, with a model of ``depth`` layers.

    Args:
        spec: of a model with so many layers, and with the sizes of one rank of the tensor
            dimension.
        ranks: their number, and the kind of their devices.
        request: what a pass without gradient computes.
        loss: None: the model is not trained.
    """
    backend = FSDPBackend()
    model = backend.load_without_memory(replace(spec, router_replay="none"), ranks)
    model.vision = None  # images are not reckoned
    config = model.model.config.get_text_config()
    context = spec.mesh_shape.context
    trainer = spec.trainer
    cap = trainer.micro_batch_tokens or MICRO_BATCH_TOKENS[ranks.device.type]
    micro_batches = MicroBatches(
        batch,
        max_tokens=cap * context,
        max_rows=trainer.micro_train_batch_size_per_gpu,
        share_prefixes=backend.shares_prefixes,
        hidden_size=config.hidden_size,
        packs=model.packs and context == 1,
    )
    micro = next(iter(micro_batches))  # tokens [packed rows, width]
    layout = micro.layout
    pairs = _attended_pairs(layout)
    if context > 1:
        ring = trainer.parallel.context_kind == RING
        layout = Context(None, 0, context, ring).slice(layout)  # type: ignore[arg-type]
    if ranks.device.type == "cuda":  # FlexAttention makes neither masks nor rectangles
        layout = replace(layout, visible_until=None, blocks=())
    tokens = layout.tokens.numel()
    layout = layout.to(META)
    numbers, root, layer = _sizes(backend)
    with Meter(model, config.vocab_size) as meter, torch.no_grad():
        model(layout, request)
    _note(numbers, SCORE, meter.take_peak())
    if loss is not None:
        meter = Meter(model, config.vocab_size)
        of_rows = micro.batch.each(lambda tensor: tensor.to(META))
        _update(model, loss, layout, of_rows, meter, numbers)
        heads = config.num_attention_heads * head_size(config)
        # Attention has two products forward and five backward; recomputed layers repeat the two.
        products = 7 + 2 * bool(backend.recomputes())
        attention = 2 * products * heads * depth * pairs / context
        numbers[OPERATIONS] = meter.operations + attention
    return RankSample(backend, depth, numbers, layer, root, len(micro.rows), tokens)


def _attended_pairs(layout: Layout) -> int:
    """Pairs of a query and a key, with the masked half, over rows."""
    if not layout.blocks:
        return layout.tokens.numel() * layout.tokens.shape[1]
    pairs = 0
    for block in layout.blocks:
        keys = block.queries if block.keys is None else block.keys
        pairs += block.queries.numel() * keys.shape[1]
    return pairs


def _update(
    model: TokenModel,
    loss: LossFn,
    layout: Layout,
    batch: UpdateBatch,
    meter: Meter,
    numbers: Numbers,
) -> None:
    """Note the peak of each window of a forward and backward pass."""
    ended: set[str] = set()

    def end(window: str) -> None:
        # A recomputed layer calls its hooks again.
        if window not in ended:
            ended.add(window)
            _note(numbers, window, meter.take_peak())

    def after_last_layer(module: nn.Module, inputs: object, output: Any) -> None:  # noqa: ANN401
        states = output if isinstance(output, Tensor) else output[0]
        if states.requires_grad:
            states.register_hook(lambda gradient: end(HEAD))

    def before_first_layer(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs and inputs[0].requires_grad:
            inputs[0].register_hook(lambda gradient: end(LAYERS))

    def drop_gradient(parameter: Tensor) -> None:
        parameter.grad = None  # accumulated gradients are counted by formula

    layers = decoder_layers(model)
    layers[-1].register_forward_hook(after_last_layer)
    layers[0].register_forward_pre_hook(before_first_layer)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(drop_gradient)
    with meter:
        terms = loss(model(layout, loss.request(batch)), batch)
        total: Any = sum(term.loss for term in terms.values())
        total.backward()
    for window in WINDOWS:
        end(window)


def _note(numbers: Numbers, window: str, peak: Mapping[str, int]) -> None:
    for line in (ACTIVATIONS, LOGITS):
        numbers[f"{window} {line}"] = peak.get(line, 0)


def _sizes(backend: FSDPBackend) -> tuple[Numbers, Numbers, Numbers]:
    """Bytes and elements of a rank without shards: of the model, of its root, of its largest
    layer."""
    spec = backend.spec
    model = backend.model
    layers = decoder_layers(model)
    head = model.model.get_output_embeddings()
    embeddings = model.model.get_input_embeddings()
    stored = backend.dtype if spec.lora.rank else backend.master_dtype()
    quantized: set[int] = set()
    if spec.lora.rank and spec.lora.base_dtype:
        linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
        quantized = {id(m.weight) for m in linear if not m.weight.requires_grad}
    in_layers = {id(p) for layer in layers for p in layer.parameters()}
    sizes = dict.fromkeys((ELEMENTS, TRAINED, WEIGHTS, ADAPTERS, OPTIMIZER_STATE), 0.0)
    sizes[WEIGHTS] = sum(buffer.nbytes for buffer in model.buffers())
    root = {ELEMENTS: 0.0, TRAINED: 0.0, HEAD: 0.0}
    for parameter in model.parameters():
        count = parameter.numel()
        if parameter is embeddings.weight and (head is None or head.weight is not parameter):
            # Embeddings that are not the head stay whole on ranks of the tensor dimension.
            count *= spec.mesh_shape.tensor
        trained = count if spec.optimizers and parameter.requires_grad else 0
        if trained and spec.lora.rank:
            sizes[ADAPTERS] += FLOAT32 * count
        elif id(parameter) in quantized:
            sizes[WEIGHTS] += QUANTIZED_BYTES[spec.lora.base_dtype] * count
        else:
            sizes[WEIGHTS] += stored.itemsize * count
        if trained:
            of_layer = id(parameter) in in_layers
            settings = spec.optimizers[MODEL]
            dtype = backend.master_dtype()
            sizes[OPTIMIZER_STATE] += count * state_bytes(parameter, settings, dtype, of_layer)
        sizes[ELEMENTS] += count
        sizes[TRAINED] += trained
        if id(parameter) not in in_layers:
            root[ELEMENTS] += count
            root[TRAINED] += trained
            if head is not None and parameter is head.weight:
                root[HEAD] = trained
    largest = max(layers, key=lambda layer: sum(p.numel() for p in layer.parameters()))
    parameters = list(largest.parameters())
    layer: Numbers = {
        ELEMENTS: sum(p.numel() for p in parameters),
        TRAINED: sum(p.numel() for p in parameters if p.requires_grad and spec.optimizers),
        MATRIX: max(p.numel() for p in parameters),
    }
    return sizes, root, layer


def _line(samples: Sequence[RankSample], layers: int) -> Numbers:
    """The numbers of so many layers, on the straight line through two samples."""
    few, more = samples[0], samples[-1]
    if few is more:
        return more.numbers
    step = (layers - more.depth) / (more.depth - few.depth)
    return {
        name: max(0.0, number + (number - few.numbers[name]) * step)
        for name, number in more.numbers.items()
    }


def rank_use(
    samples: Sequence[RankSample], mesh: MeshShape, layers: int, largest_tensor: int, rows: int
) -> RankUse:
    """What a rank needs with all layers.

    Args:
        samples: of one or two depths.
        mesh: of the model's ranks.
        layers: of the whole model.
        largest_tensor: its elements.
        rows: of a rank in an optimizer step.
    """
    sample = samples[-1]
    backend = sample.backend
    spec = backend.spec
    trains = bool(spec.optimizers)
    layers_of_rank = math.ceil(layers / mesh.pipeline)
    rank = _line(samples, layers_of_rank)
    # A stage keeps as many micro-batches as there are stages: together those of all layers.
    peaks = _line(samples, layers)
    shards = spec.fsdp_size or mesh.ranks // (mesh.tensor * mesh.pipeline)
    resident = {line: rank[line] / shards for line in (WEIGHTS, ADAPTERS, OPTIMIZER_STATE)}
    gradients = FLOAT32 * rank[TRAINED] / shards
    scoring, updating = _fullest_phases(sample, rank, peaks, resident, gradients)
    stepping: Lines = {}
    if trains:
        stepping = _lines(resident | {GRADIENTS: gradients})
        if spec.optimizers[MODEL].name == "muon":
            stepping[GATHERED] = int(MUON_COPIES * FLOAT32 * sample.layer[MATRIX])
        if is_low_precision(spec.optimizers[MODEL]):
            stepping[GATHERED] = LOW_PRECISION_COPIES * FLOAT32 * STEPPED_AT_ONCE
        if sum(stepping.values()) > sum(updating.values()):
            updating = stepping
    master = backend.master_dtype()
    stored = backend.dtype if spec.lora.rank else master
    # One tensor at a time: its shards, joined, and as it is sent.
    copies = 2 * stored.itemsize * backend.is_sharded()
    if stored != backend.dtype:
        copies += backend.dtype.itemsize
    gathered = copies * largest_tensor
    if spec.lora.rank:
        gathered += int(ADAPTER_COPIES * FLOAT32 * sample.layer[MATRIX])
    micro_batches = math.ceil(rows / sample.rows)
    return RankUse(
        resident=_lines(resident),
        scoring=scoring,
        updating=updating,
        stepping=stepping,
        publishing=_lines(resident | {GATHERED: gathered}),
        gradients=int(gradients),
        learnt=int(master.itemsize * rank[TRAINED] / shards + resident[OPTIMIZER_STATE]),
        tokens=sample.tokens,
        micro_batches=micro_batches,
        flops=int(micro_batches * rank.get(OPERATIONS, 0)),
        sent=_sent(sample, rank, mesh, shards, layers_of_rank, micro_batches) if trains else {},
        checkpointing=trains and bool(backend.recomputes()),
    )


def _fullest_phases(
    sample: RankSample, rank: Numbers, peaks: Numbers, resident: Numbers, gradients: float
) -> tuple[Lines, Lines]:
    """The fullest moment of a pass without gradient, and of an update."""
    backend = sample.backend
    spec = backend.spec
    computed = backend.dtype.itemsize
    sharded = backend.is_sharded()
    if spec.reduce_gradients == "update" and sharded:
        gradients = FLOAT32 * rank[TRAINED]  # whole until the last micro-batch
    copies = 0.0
    if not (sharded or spec.lora.rank or backend.dtype == backend.master_dtype()):
        copies = computed * rank[ELEMENTS]  # of the weights, in the dtype of the computation

    def phase(gathered: float, window: str = "", unsharded: float = 0.0) -> Numbers:
        """``unsharded``: bytes of gradients that FSDP2 has not reduced yet."""
        activations = peaks.get(f"{window} {ACTIVATIONS}", 0.0)
        return resident | {
            GATHERED: gathered if sharded else copies,
            ACTIVATIONS: activations + (unsharded if sharded else 0.0),
            LOGITS: peaks.get(f"{window} {LOGITS}", 0.0),
        }

    # FSDP2 keeps the root gathered for the whole pass, and gathers a layer while another computes.
    # It copies a layer's gradients to float32 for the reduction; the root's stay until the end.
    root, layer = sample.root, sample.layer
    one_layer = computed * (root[ELEMENTS] + layer[ELEMENTS])
    two_layers = one_layer + computed * layer[ELEMENTS]
    # What is gathered is copied into the parameters: at the start, root and first layer.
    start = phase(2 * one_layer)
    scoring = _fullest([start, phase(one_layer, SCORE)])
    if not spec.optimizers:
        return scoring, {}
    all_of_root = computed * root[ELEMENTS] + FLOAT32 * root[TRAINED]
    candidates = [
        start,
        phase(one_layer, HEAD),
        # The meter has seen the gradients of the matrices that are computed at the fullest moment.
        phase(two_layers + FLOAT32 * layer[TRAINED], LAYERS, computed * root[HEAD]),
        phase(all_of_root, EMBEDDING, computed * root[HEAD]),
    ]
    return scoring, _fullest([numbers | {GRADIENTS: gradients} for numbers in candidates])


def _fullest(candidates: Sequence[Numbers]) -> Lines:
    return _lines(max(candidates, key=lambda numbers: sum(numbers.values())))


def _lines(sizes: Numbers) -> Lines:
    return {line: int(sizes[line]) for line in LINES if sizes.get(line, 0) >= 1}


def _sent(
    sample: RankSample, rank: Numbers, mesh: MeshShape, shards: int, layers: int, micro_batches: int
) -> dict[str, int]:
    """Bytes of an update's collectives; ``layers`` are those of the rank."""
    backend = sample.backend
    spec = backend.spec
    config = backend.model.model.config.get_text_config()
    computed = backend.dtype.itemsize
    gradients = FLOAT32 * rank[TRAINED]
    if spec.reduce_gradients != "update":
        gradients *= micro_batches
    sent = Counter[str]()
    if shards > 1:
        root = sample.root[ELEMENTS]
        # Layers are gathered for the forward and for the backward pass.
        gathered = computed * (2 * (rank[ELEMENTS] - root) + root)
        sent["all-gather"] = int(micro_batches * gathered)
        sent["reduce-scatter"] = int(gradients)
    if mesh.ranks > shards * mesh.tensor * mesh.pipeline:  # replicas of the shards
        sent["all-reduce"] += int(gradients / shards)
    passes = 1 + bool(backend.recomputes())
    states = sample.tokens * layers * micro_batches
    if mesh.tensor > 1:
        # Float32 sums: of two products forward, of the inputs of five products backward.
        sent["all-reduce"] += FLOAT32 * config.hidden_size * states * (2 * passes + 5)
    if mesh.context > 1 and spec.trainer.parallel.context_kind != RING:
        # Queries, keys, values and results, forward and backward.
        heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
        sent["all-to-all"] = computed * heads * head_size(config) * states * (passes + 1)
    return dict(sent)

"""Bytes of one rank that trains or scores with a model, and of one device of an engine.

Invariant: pure arithmetic. Activations are the tensors that autograd saves in transformers' own modules with sdpa
attention; a test compares them, family by family. ``b`` is the bytes of a number in the dtype that is computed in;
norms compute in float32. ``benchmarks/memory.py`` measures the same phases on real ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from skyasync.config.schema import Config
from skyasync.inference.backends.vllm.setup import MIN_BATCHED_TOKENS
from skyasync.inference.interface import EngineConfig
from skyasync.models import MAX_LOGITS, MICRO_BATCH_TOKENS, MIN_SAVED_TOKENS, STEPPED_AT_ONCE
from skyasync.planning.shape import ModelShape

FLOAT32 = 4
INT64 = 8


@dataclass(frozen=True)
class Pass:
    """One micro-batch: ``tokens`` in rows of ``width``, ``loss_tokens`` of which are scored.

    Args:
        masked: several responses share a row, so that attention has a dense mask.
        context: ranks that split the rows; the other counts are those of one of them.
    """

    tokens: int
    width: int
    loss_tokens: int
    masked: bool = False
    context: int = 1


def layer_bytes(shape: ModelShape, work: Pass, b: int, *, frozen: bool = False) -> int:
    """Saved by one decoder layer; by one whose own weights are ``frozen``, under adapters of all linear layers."""
    per_token = _norms(shape, b, frozen=frozen) + _attention(shape, b, masked=work.masked)
    per_token += _experts(shape, b, frozen=frozen) if shape.experts else _mlp(shape, shape.intermediate, b)
    if work.masked:
        per_token += work.context * work.width * b  # the mask as numbers, once more in every layer
    return work.tokens * per_token


def recomputation_bytes(shape: ModelShape, work: Pass, b: int) -> int:
    """Of one decoder layer where all but the results of its matrices and its attention is recomputed."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * queries + 2 * keys + shape.hidden
    inside = (2 if shape.family.gated else 1) * shape.intermediate + shape.hidden
    routed = max(1, shape.experts_per_token) * inside + shape.experts
    shared = 3 * shape.shared_intermediate + 1 if shape.shared_intermediate else 0
    return work.tokens * ((attention + routed + shared) * b + shape.heads * FLOAT32)


def mask_bytes(work: Pass) -> int:
    """The mask that the batch's layout makes, once."""
    return work.tokens * work.context * work.width if work.masked else 0


def _norms(shape: ModelShape, b: int, *, frozen: bool = False) -> int:
    h, family = shape.hidden, shape.family
    if family.norm == "layer":
        return 2 * (2 * h * b + 2 * b)
    normed = FLOAT32 if family.norm == "gemma" else b
    normed = 0 if frozen else normed  # it is the gradient of the norm's weight that takes it
    before = 2 * (h * (FLOAT32 + normed + b) + FLOAT32)
    after = 2 * (h * (FLOAT32 + normed) + FLOAT32) if family.post_norms else 0
    of_heads = (shape.heads + shape.kv_heads) * (shape.head_dim * (FLOAT32 + normed) + FLOAT32)
    return before + after + (of_heads if family.head_norms else 0)


def _attention(shape: ModelShape, b: int, *, masked: bool) -> int:
    """Queries, keys, values, the result, and the softmax's logarithm; a mask makes the library repeat shared heads."""
    kv_heads = shape.heads if masked else shape.kv_heads
    return 2 * (shape.heads + kv_heads) * shape.head_dim * b + shape.heads * FLOAT32


def _mlp(shape: ModelShape, width: int, b: int) -> int:
    """Gated: the gate before and after its activation, the other half, the product. GPT-2's gelu saves five."""
    return (4 if shape.family.gated else 5) * width * b


def _experts(shape: ModelShape, b: int, *, frozen: bool = False) -> int:
    """Each of a token's experts has its own copy of the token, before and after, and of the MLP's insides.

    Frozen ones, which have no adapters, keep neither the token nor the product: these are for their matrices' gradient.
    """
    k, shared = shape.experts_per_token, shape.shared_intermediate
    routed = k * (2 * shape.hidden + 4 * shape.intermediate + 1) * b + 4 * k * INT64 + shape.experts * FLOAT32
    if frozen:
        routed -= (k * (shape.hidden + shape.intermediate) + (0 if shared else shape.hidden)) * b
    return routed + ((4 * shared + shape.hidden + 1) * b if shared else 0)


def final_norm_bytes(shape: ModelShape, work: Pass, b: int, *, frozen: bool = False) -> int:
    """The last norm, and the hidden states that the head reads; a frozen head keeps none."""
    if frozen and shape.family.norm != "layer":
        return work.tokens * shape.hidden * FLOAT32
    normed = FLOAT32 if shape.family.norm == "gemma" else b
    upcast = b if shape.family.norm == "layer" else FLOAT32
    return work.tokens * shape.hidden * (upcast + normed + b) + work.loss_tokens * shape.hidden * b


BYTES_PER_CELL = 40
"""Of a training batch: tokens 8, masks 2, and up to seven numbers per token."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest prompt and of the longest rest of an episode, and samples per prompt."""

    prompt: int
    response: int
    samples: int

    @classmethod
    def of(cls, cfg: Config) -> Lengths:
        generator, prompt = cfg.generator, cfg.trainer.max_prompt_length
        response = generator.sampling_params.max_generate_length * (generator.max_turns or 1)
        if generator.max_model_len:
            response = min(response, generator.max_model_len - prompt)
        return cls(prompt, response, generator.n_samples_per_prompt)

    @property
    def total(self) -> int:
        return self.prompt + self.response


def largest_micro_batch(
    cfg: Config, shape: ModelShape, *, gpus: bool, ranks: int, rows_limit: int, context: int = 1
) -> tuple[Pass, int]:
    """The widest micro-batch of a rank, and how many there are per optimizer step.

    Args:
        ranks: that have rows of their own, each with ``context`` that split them.
    """
    lengths, trainer = Lengths.of(cfg), cfg.trainer
    cap = context * (trainer.micro_batch_tokens or MICRO_BATCH_TOKENS["cuda" if gpus else "cpu"])
    prompts = trainer.policy_mini_batch_size or trainer.train_batch_size
    rows = max(1, math.ceil(prompts * lengths.samples / ranks))
    rings = context > 1 and trainer.parallel.context_kind == "ring"  # whose pieces know no mask
    together = 1 if rings else _rows_sharing_a_prompt(lengths, shape, cap, rows_limit)
    width = lengths.prompt + together * lengths.response
    in_all = math.ceil(rows / together)
    at_once = min(in_all, max(1, cap // width), max(1, rows_limit // together) if rows_limit else in_all)
    tokens, scored = at_once * width, at_once * together * lengths.response
    work = Pass(-(-tokens // context), width, -(-scored // context), masked=together > 1, context=context)
    return work, math.ceil(in_all / at_once)


def _rows_sharing_a_prompt(lengths: Lengths, shape: ModelShape, cap: int, rows_limit: int) -> int:
    """1 where nothing is shared."""
    saved = (lengths.samples - 1) * lengths.prompt / (lengths.samples * lengths.total)
    if not shape.shares_prefixes or saved < MIN_SAVED_TOKENS:
        return 1
    cheapest = int(math.sqrt(lengths.prompt**2 + 6 * shape.hidden * lengths.prompt))
    space = max(1, min(cheapest, cap - lengths.prompt))
    most = min(lengths.samples, rows_limit or lengths.samples)
    return max(1, min(most, math.ceil(space / lengths.response)))


def batch_bytes(cfg: Config, shape: ModelShape) -> int:
    """A training batch as tensors."""
    lengths = Lengths.of(cfg)
    each = BYTES_PER_CELL + expert_bytes(cfg, shape) + 2 * 4 * cfg.trainer.teacher.top_k
    return cfg.trainer.train_batch_size * lengths.samples * lengths.total * each


def expert_bytes(cfg: Config, shape: ModelShape) -> int:
    """Of a token: the experts that are replayed, in every layer."""
    if cfg.trainer.policy.router_replay == "none":
        return 0
    return shape.layers * shape.experts_per_token * (1 if shape.experts <= 255 else 2)  # of experts, else none known


Lines = dict[str, int]
"""Bytes by what takes them."""

PARAMETERS = "parameters"

FRAGMENTATION = 0.15
"""Of what is taken and given back within a step: allocators (C's on a CPU, torch's on a GPU) keep holes. Measured."""

RETAINED_SHARE = 1.2
"""Of one layer's activations, what the allocator has not given back when the next thing is done. Measured."""


ORTHOGONALISED = 4 * FLOAT32 + 3 * 2
"""Bytes per number of a matrix while Muon turns it: what is gathered, Muon's own copies, and three in bfloat16."""


COPIED = 40
"""Bytes per number while an optimizer with a short state steps: float32 copies, codes, bits of chance."""

IN_BLOCKS = 1 + FLOAT32 / 256
"""Bytes of a moment of eight bits, with its share of a scale. Vectors', which are in float32, are few."""


@dataclass(frozen=True)
class RankMemory:
    """How one rank computes.

    Args:
        ranks: over which the model, or a rank's part of it, is sharded.
        replicas: of each shard.
        split: its matrices are split over further ranks; the shape is then a rank's part.
        b: bytes of a number in the dtype that is computed in.
        work: its largest micro-batch.
        micro_batches: per optimizer step; from the second on there are gradients already.
        trained: it has an optimizer, whose weights are float32; a reference has neither.
        adapters: numbers that are trained next to frozen weights; 0: the weights themselves are.
        between: numbers per token between the halves of a layer's adapters.
        selective: with checkpointing, what matrices and attention gave is kept.
        reduced_once: gradients are added up over the ranks once per update.
        vocabulary: its head spans it; else it says one number.
        entropy, shaped: what the loss asks of the logits: their entropy; a temperature or filters.
        muon: matrices of layers have one moment instead of two.
        routed: bytes of a token's experts, where they are replayed.
        master: bytes of a trained weight between steps, and of its moments.
        eight_bits: but these, where they are codes.
        offloads: what its device has lent to the host (``cpu_offload``).
        critic: a head for values is on its layers.
        bits: of a frozen number of its layers' matrices, with its share of a scale; 0: they are as they are computed.
    """

    ranks: int
    b: int
    work: Pass
    micro_batches: int = 1
    trained: bool = True
    adapters: int = 0
    between: int = 0
    checkpointing: bool = False
    selective: bool = False
    reduced_once: bool = False
    vocabulary: bool = True
    entropy: bool = False
    shaped: bool = False
    muon: bool = False
    replicas: int = 1
    routed: int = 0
    split: bool = False
    master: int = FLOAT32
    eight_bits: bool = False
    offloads: str = "none"
    critic: bool = False
    bits: float = 0.0

    @property
    def sharded(self) -> bool:
        forced = self.offloads == PARAMETERS or self.bits > 0 or self.split
        return forced or self.ranks * self.replicas > 1 or (self.trained and self.b != self.master)

    @property
    def short(self) -> bool:
        """Whether what is kept between steps is copied for a step."""
        return self.trained and (self.eight_bits or self.master != FLOAT32)

    def optimizer_bytes(self, numbers: int) -> int:
        """Bytes of both."""
        return int(2 * numbers * (IN_BLOCKS if self.eight_bits else self.master))


def resident(shape: ModelShape, rank: RankMemory) -> Lines:
    """Between two calls, where it computes."""
    away = offloaded(shape, rank)
    return {what: size for what, size in persistent(shape, rank).items() if what not in away}


def offloaded(shape: ModelShape, rank: RankMemory) -> Lines:
    """Of what is kept between two calls, what the host holds."""
    away = {"none": (), "optimizer": ("moments",), PARAMETERS: ("weights", "adapters", "moments")}[rank.offloads]
    return {what: size for what, size in persistent(shape, rank).items() if what in away}


def on_host(shape: ModelShape, rank: RankMemory) -> Lines:
    """What the host holds for a rank's device at most, gradients included."""
    lines = {f"{what} on the host": size for what, size in offloaded(shape, rank).items()}
    if rank.trained and rank.offloads == PARAMETERS:
        lines["gradients on the host"] = -(-(rank.adapters or shape.parameters) // rank.ranks) * FLOAT32
    return lines


def persistent(shape: ModelShape, rank: RankMemory) -> Lines:
    """Between two calls, wherever it is."""
    share = -(-shape.parameters // rank.ranks)
    if not rank.trained:
        return {"weights": share * rank.b}
    if rank.adapters:
        coded = shape.layers * shape.layer_matrices / rank.ranks if rank.bits else 0
        spared = int(coded * (rank.b - rank.bits / 8))
        return {"weights": share * rank.b - spared} | learnt(shape, rank)
    head = _head(shape, rank)
    turned = -(-shape.layers * shape.layer_matrices // rank.ranks) if rank.muon else 0
    return {"weights": share * rank.master, "moments": rank.optimizer_bytes(share) - turned * FLOAT32} | head


def learnt(shape: ModelShape, rank: RankMemory) -> Lines:
    """Of what is held, what training changes: all that a checkpoint needs."""
    if not rank.adapters:
        return persistent(shape, rank)
    share = -(-rank.adapters // rank.ranks)
    return {"adapters": share * FLOAT32, "moments": rank.optimizer_bytes(share)} | _head(shape, rank)


def _head(shape: ModelShape, rank: RankMemory) -> Lines:
    """A head for values on the layers: one vector and its moments, which one rank holds."""
    return {"critic": 3 * shape.hidden * FLOAT32} if rank.critic else {}


def scoring(shape: ModelShape, rank: RankMemory) -> Lines:
    """A log-probability pass: a layer's activations, or the part retained while logits are computed."""
    layer, logits = _one_layer(shape, rank), logits_bytes(shape, rank, backward=False)
    in_head = int(RETAINED_SHARE * layer) + rank.work.loss_tokens * shape.hidden * rank.b
    in_a_layer = layer > in_head + logits
    return resident(shape, rank) | {
        "gathered": _gathered(shape, rank),
        "activations": layer if in_a_layer else in_head,
        "logits": 0 if in_a_layer else logits,
        "masks": mask_bytes(rank.work),
        **_routed(rank),
    }


def gradients(shape: ModelShape, rank: RankMemory) -> int:
    """Bytes of a rank's share of them, from its backward pass to its step."""
    return -(-(rank.adapters or shape.parameters) // rank.ranks) * FLOAT32


def updating(shape: ModelShape, rank: RankMemory) -> Lines:
    """An optimizer step at its fullest: in the head's backward pass, when all activations are there, or at the end of
    the whole, when the embeddings' gradient is, too."""
    own = resident(shape, rank)
    share = gradients(shape, rank)
    # The gradient of the head, or, at the end, of the embeddings: none where they are frozen.
    row = 0 if rank.adapters else shape.hidden * rank.b
    whole, embedded = shape.vocabulary * row, max(shape.vocabulary, shape.embedded) * row
    if rank.reduced_once and rank.sharded and rank.micro_batches > 1:
        share = (rank.adapters or shape.parameters) * FLOAT32  # of all that is trained, until the last micro-batch
    layer, root = (rank.adapters // shape.layers, 0) if rank.adapters else (shape.layer, shape.root)
    here = 0 if rank.offloads == PARAMETERS and not rank.reduced_once else share  # the host's, once they are reduced
    head = own | {
        "gradients": (here if rank.micro_batches > 1 else 0) + (whole if rank.vocabulary else 0),
        "gathered": _gathered(shape, rank, reduced=layer),
        "activations": activations(shape, rank),
        "logits": logits_bytes(shape, rank, backward=True),
        "masks": mask_bytes(rank.work),
        **_routed(rank),
    }
    end = own | {"gradients": here + embedded, "gathered": _gathered(shape, rank, reduced=root)}
    if rank.offloads == PARAMETERS:  # the step is the host's
        return max(_with_holes(head, "activations", "logits"), end, key=lambda lines: sum(lines.values()))
    if rank.offloads == "optimizer":
        end |= {"moments": persistent(shape, rank)["moments"]}
    if rank.muon and not rank.adapters:
        end["orthogonalised"] = ORTHOGONALISED * shape.largest_matrix
    if rank.short:
        end["copies"] = COPIED * min(STEPPED_AT_ONCE, -(-shape.largest_tensor // rank.ranks))
    return max(_with_holes(head, "activations", "logits"), end, key=lambda lines: sum(lines.values()))


def _routed(rank: RankMemory) -> Lines:
    """The experts of the current micro-batch."""
    return {"replayed experts": rank.work.tokens * rank.routed} if rank.routed else {}


def activations(shape: ModelShape, rank: RankMemory) -> int:
    """Saved for the backward pass; with checkpointing each layer's input, what is kept of it besides, and one layer's
    while it is recomputed."""
    b, work = rank.b, rank.work
    frozen = rank.adapters > 0
    layer = layer_bytes(shape, work, b, frozen=frozen) + work.tokens * rank.between * b
    inputs = work.tokens * shape.hidden * b
    saved = inputs + (recomputation_bytes(shape, work, b) if rank.selective else 0)
    layers = shape.layers * saved + layer if rank.checkpointing else shape.layers * layer
    return layers + final_norm_bytes(shape, work, b, frozen=frozen)


def logits_bytes(shape: ModelShape, rank: RankMemory, *, backward: bool) -> int:
    """Of the piece of the loss tokens that spans the vocabulary at once."""
    if not rank.vocabulary:
        return rank.work.loss_tokens * FLOAT32 * (shape.hidden * (rank.b != FLOAT32) + 1)  # values, of float32 states
    values = rank.work.loss_tokens * FLOAT32 * ((2 if rank.b != FLOAT32 else 1) * shape.hidden + 1) * rank.critic
    tokens = min(rank.work.loss_tokens, max(1, MAX_LOGITS // shape.vocabulary))
    copies = FLOAT32 * 2 + (rank.b if rank.b != FLOAT32 else 0)  # logits, their log-softmax; before, in a short dtype
    if backward:
        copies += FLOAT32  # the log-softmax saved, its gradient, that of the logits (in the short dtype as well)
        copies += FLOAT32 * (2 if rank.entropy else 0)
    copies += FLOAT32 * rank.shaped + rank.b * shape.head_copies
    return tokens * shape.vocabulary * copies + values


def _gathered(shape: ModelShape, rank: RankMemory, *, reduced: int = 0) -> int:
    """Whole parameters that FSDP puts together: the root's, and those of two layers; and ``reduced`` parameters'
    gradients, in the computing dtype and in float32, on their way to the shards."""
    if not rank.sharded:
        return 0
    return (shape.root + 2 * shape.layer) * rank.b + reduced * (rank.b + FLOAT32)


def publishing(shape: ModelShape, rank: RankMemory) -> Lines:
    """Weights leave one tensor at a time; where they go is not counted here."""
    gathered = shape.largest_tensor * FLOAT32 if rank.ranks > 1 or rank.split else 0
    if rank.adapters:
        gathered = max(gathered, 2 * shape.largest_matrix * FLOAT32)  # a weight and what is added to it
    retained = int(RETAINED_SHARE * _one_layer(shape, rank))
    return resident(shape, rank) | {"gathered": gathered, "fragmentation": retained}


def _one_layer(shape: ModelShape, rank: RankMemory) -> int:
    return layer_bytes(shape, rank.work, rank.b) + 2 * rank.work.tokens * shape.hidden * rank.b


def _with_holes(lines: Lines, *transient: str) -> Lines:
    return lines | {"fragmentation": int(FRAGMENTATION * sum(lines[name] for name in transient))}


GIB = 1 << 30
GRAPHS = GIB
"""CUDA graphs and what libraries keep on a GPU, roughly."""

FORWARD_TOKENS = 2048
"""That of the embedded engine (``skyasync.inference.backends.transformers.model``, which imports torch)."""


@dataclass(frozen=True)
class EngineMemory:
    """Per device. ``least_cache`` holds one sequence of full length."""

    weights: int
    workspace: int
    cache: int
    least_cache: int
    tokens: int  # that the caches of the engine's devices hold together

    @property
    def lines(self) -> dict[str, int]:
        return {"weights": self.weights, "workspace": self.workspace, "cache": max(self.cache, self.least_cache)}


def engine_memory(
    cfg: Config, config: EngineConfig, shape: ModelShape, *, backend: str, b: int, share: int
) -> EngineMemory:
    """Of one device.

    Args:
        b: bytes of a number.
        share: bytes of a GPU that the engine may take; 0 where there is none.
    """
    parallel = cfg.generator.devices_per_engine
    weights = shape.parameters * b // parallel
    batched = max(MIN_BATCHED_TOKENS, config.max_model_len) if backend == "vllm" else FORWARD_TOKENS
    batched = getattr(cfg.generator, "max_num_batched_tokens", 0) or batched
    workspace = _workspace(shape, batched, min(config.max_num_seqs, batched), b, parallel) + (GRAPHS if share else 0)
    per_token = cache_bytes_per_token(shape, b, parallel)
    needed = config.max_num_seqs * config.max_model_len * per_token
    space = share - weights - workspace if share else int(cfg.generator.kv_cache_gb * GIB)
    cache = min(space, needed) if backend != "vllm" else space
    return EngineMemory(weights, workspace, cache, config.max_model_len * per_token, max(0, cache) // per_token)


def cache_bytes_per_token(shape: ModelShape, b: int, parallel: int) -> int:
    """Keys and values of all layers; heads that are fewer than devices are held more than once."""
    return 2 * shape.layers * max(1, shape.kv_heads // parallel) * shape.head_dim * b


def _workspace(shape: ModelShape, tokens: int, sequences: int, b: int, parallel: int) -> int:
    """A forward pass over ``tokens``, one layer at a time, and the logits of ``sequences``, sampled from in float32."""
    width = (shape.experts_per_token or 1) * 3 * shape.intermediate // parallel + shape.shared_intermediate
    return tokens * (width + 4 * shape.hidden) * b + sequences * shape.vocabulary * 2 * FLOAT32

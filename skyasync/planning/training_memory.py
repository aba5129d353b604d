"""Bytes of one rank that trains, or scores with, a model: what it holds, and the peak of each thing it does.

Invariant: pure arithmetic on a shape and a :class:`Rank`. Gradients live from the backward pass to the optimizer step,
nowhere else. ``benchmarks/memory.py`` measures the same phases on real ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from skyasync.models.limits import MAX_LOGITS, STEPPED_AT_ONCE
from skyasync.planning.activations import FLOAT32, Pass, final_norm_bytes, kept_bytes, layer_bytes, mask_bytes
from skyasync.planning.shape import ModelShape

Lines = dict[str, int]
"""Bytes by what takes them."""

PARAMETERS = "parameters"

FRAGMENTATION = 0.15
"""Of what is taken and given back within a step: allocators (C's on a CPU, torch's on a GPU) keep holes. Measured."""

KEPT = 1.2
"""Of one layer's activations, what the allocator has not given back when the next thing is done. Measured."""


ORTHOGONALISED = 4 * FLOAT32 + 3 * 2
"""Bytes per number of a matrix while Muon turns it: what is gathered, Muon's own copies, and three in bfloat16."""


COPIED = 40
"""Bytes per number while an optimizer with a short state steps: float32 copies, codes, bits of chance."""

IN_BLOCKS = 1 + FLOAT32 / 256
"""Bytes of a moment of eight bits, with its share of a scale. Vectors', which are in float32, are few."""


@dataclass(frozen=True)
class Rank:
    """How one rank computes.

    Args:
        ranks: over which the model, or a rank's part of it, is sharded.
        replicas: of each shard.
        split: its matrices are split over further ranks; the shape is then a rank's part.
        b: bytes of a number in the dtype that is computed in.
        work: its largest micro-batch.
        micro_batches: per optimizer step; from the second on there are gradients already.
        trained: it has an optimizer, whose weights are float32; a reference has neither.
        adapters: numbers that are trained beside frozen weights; 0: the weights themselves are.
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
        asked = self.offloads == PARAMETERS or self.bits > 0 or self.split
        return asked or self.ranks * self.replicas > 1 or (self.trained and self.b != self.master)

    @property
    def short(self) -> bool:
        """Whether what is kept between steps is copied for a step."""
        return self.trained and (self.eight_bits or self.master != FLOAT32)

    def moments(self, numbers: int) -> int:
        """Bytes of both."""
        return int(2 * numbers * (IN_BLOCKS if self.eight_bits else self.master))


def held(shape: ModelShape, rank: Rank) -> Lines:
    """Between two calls, where it computes."""
    away = offloaded(shape, rank)
    return {what: size for what, size in kept(shape, rank).items() if what not in away}


def offloaded(shape: ModelShape, rank: Rank) -> Lines:
    """Of what is kept between two calls, what the host holds."""
    away = {"none": (), "optimizer": ("moments",), PARAMETERS: ("weights", "adapters", "moments")}[rank.offloads]
    return {what: size for what, size in kept(shape, rank).items() if what in away}


def on_host(shape: ModelShape, rank: Rank) -> Lines:
    """What the host holds for a rank's device at most, gradients included."""
    lines = {f"{what} on the host": size for what, size in offloaded(shape, rank).items()}
    if rank.trained and rank.offloads == PARAMETERS:
        lines["gradients on the host"] = -(-(rank.adapters or shape.parameters) // rank.ranks) * FLOAT32
    return lines


def kept(shape: ModelShape, rank: Rank) -> Lines:
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
    return {"weights": share * rank.master, "moments": rank.moments(share) - turned * FLOAT32} | head


def learnt(shape: ModelShape, rank: Rank) -> Lines:
    """Of what is held, what training changes: all that a checkpoint needs."""
    if not rank.adapters:
        return kept(shape, rank)
    share = -(-rank.adapters // rank.ranks)
    return {"adapters": share * FLOAT32, "moments": rank.moments(share)} | _head(shape, rank)


def _head(shape: ModelShape, rank: Rank) -> Lines:
    """A head for values on the layers: one vector and its moments, which one rank holds."""
    return {"critic": 3 * shape.hidden * FLOAT32} if rank.critic else {}


def scoring(shape: ModelShape, rank: Rank) -> Lines:
    """A log-probability pass: a layer's activations, or what is kept of them beside a piece of the logits."""
    layer, logits = _one_layer(shape, rank), logits_bytes(shape, rank, backward=False)
    beside = int(KEPT * layer) + rank.work.loss_tokens * shape.hidden * rank.b
    in_a_layer = layer > beside + logits
    return held(shape, rank) | {
        "gathered": _gathered(shape, rank),
        "activations": layer if in_a_layer else beside,
        "logits": 0 if in_a_layer else logits,
        "masks": mask_bytes(rank.work),
        **_routed(rank),
    }


def gradients(shape: ModelShape, rank: Rank) -> int:
    """Bytes of a rank's share of them, from its backward pass to its step."""
    return -(-(rank.adapters or shape.parameters) // rank.ranks) * FLOAT32


def updating(shape: ModelShape, rank: Rank) -> Lines:
    """An optimizer step at its fullest: in the head's backward pass, when all activations are there, or at the end of
    the whole, when the embeddings' gradient is, too."""
    own = held(shape, rank)
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
        end |= {"moments": kept(shape, rank)["moments"]}
    if rank.muon and not rank.adapters:
        end["orthogonalised"] = ORTHOGONALISED * shape.largest_matrix
    if rank.short:
        end["copies"] = COPIED * min(STEPPED_AT_ONCE, -(-shape.largest_tensor // rank.ranks))
    return max(_with_holes(head, "activations", "logits"), end, key=lambda lines: sum(lines.values()))


def _routed(rank: Rank) -> Lines:
    """The experts of the micro-batch in hand."""
    return {"replayed experts": rank.work.tokens * rank.routed} if rank.routed else {}


def activations(shape: ModelShape, rank: Rank) -> int:
    """Saved for the backward pass; with checkpointing each layer's input, what is kept of it besides, and one layer's
    while it is recomputed."""
    b, work = rank.b, rank.work
    frozen = rank.adapters > 0
    layer = layer_bytes(shape, work, b, frozen=frozen) + work.tokens * rank.between * b
    inputs = work.tokens * shape.hidden * b
    kept = inputs + (kept_bytes(shape, work, b) if rank.selective else 0)
    layers = shape.layers * kept + layer if rank.checkpointing else shape.layers * layer
    return layers + final_norm_bytes(shape, work, b, frozen=frozen)


def logits_bytes(shape: ModelShape, rank: Rank, *, backward: bool) -> int:
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


def _gathered(shape: ModelShape, rank: Rank, *, reduced: int = 0) -> int:
    """Whole parameters that FSDP puts together: the root's, and those of two layers; and ``reduced`` parameters'
    gradients, in the computing dtype and in float32, on their way to the shards."""
    if not rank.sharded:
        return 0
    return (shape.root + 2 * shape.layer) * rank.b + reduced * (rank.b + FLOAT32)


def publishing(shape: ModelShape, rank: Rank) -> Lines:
    """Weights leave one tensor at a time; where they go is not counted here."""
    gathered = shape.largest_tensor * FLOAT32 if rank.ranks > 1 or rank.split else 0
    if rank.adapters:
        gathered = max(gathered, 2 * shape.largest_matrix * FLOAT32)  # a weight and what is added to it
    kept = int(KEPT * _one_layer(shape, rank))
    return held(shape, rank) | {"gathered": gathered, "fragmentation": kept}


def _one_layer(shape: ModelShape, rank: Rank) -> int:
    return layer_bytes(shape, rank.work, rank.b) + 2 * rank.work.tokens * shape.hidden * rank.b


def _with_holes(lines: Lines, *transient: str) -> Lines:
    return lines | {"fragmentation": int(FRAGMENTATION * sum(lines[name] for name in transient))}

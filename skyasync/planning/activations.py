"""What a forward pass leaves in memory for the backward pass, in bytes.

Invariant: these are the tensors that autograd saves in transformers' own modules with sdpa attention; a test compares
them, family by family. ``b`` is the bytes of a number in the dtype that is computed in; norms compute in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def kept_bytes(shape: ModelShape, work: Pass, b: int) -> int:
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
    behind = 2 * (h * (FLOAT32 + normed) + FLOAT32) if family.post_norms else 0
    of_heads = (shape.heads + shape.kv_heads) * (shape.head_dim * (FLOAT32 + normed) + FLOAT32)
    return before + behind + (of_heads if family.head_norms else 0)


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

"""A model as one rank of the tensor axis sees it.

Invariant: what the plan of transformers splits is divided, what it leaves whole is not: norms (counted generously),
and embeddings that are not tied to the head. A mixture's experts are divided whole; tokens are taken to spread evenly.
"""

from __future__ import annotations

from dataclasses import replace

from skyasync.config.schema import Config
from skyasync.planning.shape import ModelShape


def filters(cfg: Config) -> bool:
    """Whether the distribution that is trained looks at the whole vocabulary, as ``SampledDistribution.filters``."""
    sampling = cfg.generator.sampling_params
    looks = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    some = looks or bool(sampling.logit_bias) or bool(sampling.allowed_token_ids)
    return some and cfg.trainer.algorithm.filter_logprobs and bool(sampling.temperature)


def divided(shape: ModelShape, tensor: int, *, gathers: bool = False) -> ModelShape:
    """A rank's part.

    Args:
        gathers: the logits are put together for each rank, whatever the head's weights are.
    """
    if tensor == 1:
        return shape
    by_vocabulary = shape.vocabulary % tensor == 0
    head = shape.vocabulary * shape.hidden
    spared = (head - head // tensor) if by_vocabulary else 0
    return replace(
        shape,
        heads=shape.heads // tensor,
        kv_heads=max(1, shape.kv_heads // tensor),
        intermediate=shape.intermediate if shape.experts else shape.intermediate // tensor,
        experts=shape.experts // tensor,
        experts_per_token=-(-shape.experts_per_token // tensor),
        shared_intermediate=shape.shared_intermediate // tensor,
        vocabulary=shape.vocabulary // tensor if by_vocabulary and not gathers else shape.vocabulary,
        embedded=0 if shape.tied else shape.vocabulary,
        layer=shape.layer // tensor + 4 * shape.hidden,
        root=shape.root - spared,
    )

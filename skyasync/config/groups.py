"""Which settings of rewards and groups contradict each other.

Invariant: each line names its keys and the way out; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from skyasync.config.algorithm import AlgorithmConfig


def check_groups(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Contradictions in overlong penalty, dynamic sampling and the handling of truncated responses."""
    buffer = algorithm.overlong_buffer
    if buffer.len and buffer.max_len < buffer.len:
        yield (
            f"trainer.algorithm.overlong_buffer.len={buffer.len} is longer than trainer.algorithm.overlong_buffer."
            f"max_len={buffer.max_len}, which punishes every response: set max_len to the tokens at which the penalty "
            f"is complete"
        )
    sampling = algorithm.dynamic_sampling
    if sampling.mode == "refill" and sampling.type == "none":
        yield (
            "trainer.algorithm.dynamic_sampling.mode=refill replaces groups that are left out, and trainer.algorithm."
            "dynamic_sampling.type=none leaves none out: set it to variance or mean"
        )
    within = sampling.low <= sampling.reward_min and sampling.high >= sampling.reward_max
    if sampling.early_end and (sampling.type != "mean" or within):
        yield (
            f"trainer.algorithm.dynamic_sampling.early_end=true never ends a group early with dynamic_sampling.type="
            f"{sampling.type}, low={sampling.low:g} and high={sampling.high:g}: it needs type=mean, and a range that "
            f"rewards from reward_min={sampling.reward_min:g} to reward_max={sampling.reward_max:g} can miss"
        )
    if sampling.early_end and sampling.metric:
        yield (
            f"trainer.algorithm.dynamic_sampling.early_end=true decides by rewards, and trainer.algorithm."
            f"dynamic_sampling.metric={sampling.metric} judges groups by something else: remove one of them"
        )
    if algorithm.truncated_responses in ("zero", "drop") and algorithm.stop_properly_penalty_coef != 1:
        yield (
            f"trainer.algorithm.truncated_responses={algorithm.truncated_responses} and trainer.algorithm."
            f"stop_properly_penalty_coef={algorithm.stop_properly_penalty_coef:g} both decide about the reward of a "
            f"truncated response: leave the one at train, or the other at 1"
        )

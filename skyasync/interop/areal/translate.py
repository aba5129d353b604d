"""AReaL's keys that depend on each other."""

from __future__ import annotations

import re
from math import prod

from skyasync.config.values import Value
from skyasync.interop.conversion import BATCH, Conversion, ConversionContext, NoCounterpartError, is_number
from skyasync.interop.draft import A, Draft


def _minibatches(value: Value, context: ConversionContext) -> list[Value]:
    """Optimizer steps per batch there, prompts per optimizer step here."""
    batch = context.number(BATCH)
    if not is_number(value) or not value or batch % value:  # type: ignore[operator]
        raise NoCounterpartError(f"{BATCH}={batch:g} does not divide by {value}")
    return [0 if value == 1 else int(batch // value)]  # type: ignore[operator]


def _sizes(value: Value) -> dict[str, int]:
    """``fsdp:d4p1t2`` as sizes by letter."""
    return {letter: int(size) for letter, size in re.findall(r"([a-z])(\d+)", str(value).rpartition(":")[2])}


def _ranks(value: Value, context: ConversionContext) -> list[Value]:
    """Ranks of the policy, and the axes that they are divided by (``d2p2t2``), or experts by the data axis (``e4``)."""
    sizes = _sizes(value)
    if not sizes:
        raise NoCounterpartError("")
    dimensions = [sizes.get(letter, 1) for letter in "tcp"]
    experts = sizes.get("e", 1)
    return [sizes.get("d", 1) * prod(dimensions), *dimensions, experts if experts > 1 else 0]


def _engines(value: Value, context: ConversionContext) -> list[Value]:
    sizes = _sizes(value)
    if "d" not in sizes or sizes.get("p", 1) > 1:
        raise NoCounterpartError("stages of an engine are generator.engine_kwargs.pipeline_parallel_size")
    return [sizes["d"], sizes.get("t", 1)]


def _allocation(value: Value, context: ConversionContext) -> list[Value]:
    """``sglang:d4t2+d8``: engines, and ranks of the policy."""
    engines, plus, ranks = str(value).partition("+")
    if not plus:
        raise NoCounterpartError("")
    return [*_ranks(ranks, context), *_engines(engines, context)]


def _minutes(value: Value, context: ConversionContext) -> list[Value]:
    if not isinstance(value, int | float):
        raise NoCounterpartError("")
    return [value / 60]


CONVERSIONS: dict[str, Conversion] = {
    "minibatches": _minibatches,
    "areal_ranks": _ranks,
    "areal_engines": _engines,
    "allocation": _allocation,
    "minutes": _minutes,
}


def finish(draft: Draft) -> None:
    """Rewards' norms, a critic, adapters and penalties that are on, and what its workflow and its evaluation bring."""
    norms = [f"{A}reward_norm_{end}" for end in ("mean", "std")]
    if not any(name.startswith("actor.reward_norm") and draft.given[name] is not None for name in draft.given):
        for path in norms:
            draft.put(path, "none")
        draft.put(f"{A}advantage_estimator", "normalized")
    if draft.value(f"{A}advantage_estimator") == "rloo":
        for path in norms:
            draft.drop(path, "the estimator rloo")
    if any(name.startswith("critic.") for name in draft.given):
        draft.put(f"{A}advantage_estimator", "gae", *draft.named("critic.path"))
        draft.put(f"{A}gae_whiten", False)
        for path in norms:
            draft.drop(path, "not with a critic: see trainer.algorithm.reward_normalization")
    rank = "trainer.policy.lora.rank"
    if not draft.theirs("actor.use_lora"):
        draft.drop_group("trainer.policy.lora.", "it has no effect there without actor.use_lora")
    elif rank not in draft.ours:
        draft.put(rank, 32, "actor.use_lora")
    if not draft.theirs("actor.overlong_reward_penalty"):
        draft.drop_group(f"{A}overlong_buffer.", "it has no effect there without actor.overlong_reward_penalty")
    if not draft.named("eval_gconfig.temperature") and not draft.theirs("eval_gconfig.greedy"):
        draft.put("generator.eval_sampling_params.temperature", None)  # as in training
    for key, split in (("train_data", "train"), ("val_data", "test")):
        sources = draft.value(f"data.{key}")
        if isinstance(sources, list) and any("gsm8k" in str(source) for source in sources):  # its loader knows these
            draft.put("data.prompt_key", "question")
            draft.put("data.label_key", "answer")
            draft.put(f"data.{key}", [f"{s}#main:{split}" if s == "openai/gsm8k" else s for s in sources])
    if draft.value("environment.reward_funcs") == [] and "generator.agent_program" not in draft.ours:
        draft.left.setdefault("workflow", "the reward is in the program: write environment.reward_funcs")

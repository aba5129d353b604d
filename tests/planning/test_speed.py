"""Speeds from published peaks, against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyasync.planning.plan import make_plan
from skyasync.planning.speed import CARDS, card_of, roofline
from tests.planning.test_plan import EIGHT, QWEN_7B, reckoned, settings


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", None), ("NVIDIA GH200 480GB", None), ("", None),
    ],
)  # fmt: skip
def test_a_card_is_known_by_a_whole_word_of_its_name(name: str, card: str | None) -> None:
    assert card_of(name) is (CARDS[card] if card else None)


def test_an_update_is_its_operations_and_bytes_and_a_token_the_weights_and_the_cache_that_are_read() -> (
    None
):
    cfg, card = settings(ranks=4, engines=4), CARDS["H100"]
    cfg.generator.max_num_seqs = 64
    plan = make_plan(cfg, QWEN_7B, EIGHT, reckoned())
    plan = replace(
        plan, rank=replace(plan.rank, flops=989 * 10**12 * 3, sent={"all-gather": 900 * 10**9})
    )
    speed = roofline(cfg, plan, card)
    assert speed.update == pytest.approx(3) and speed.collectives == pytest.approx(2)
    prompt, response = (
        cfg.trainer.max_prompt_length,
        cfg.generator.sampling_params.max_generate_length,
    )
    cache = 64 * (prompt + response / 2) * 2 * 28 * 4 * 128 * 2
    seconds = (2 * QWEN_7B.parameters + cache) / card.bandwidth
    assert speed.tokens == pytest.approx(64 / seconds, rel=1e-3)
    rows = cfg.trainer.train_batch_size * cfg.generator.n_samples_per_prompt
    assert speed.generation == pytest.approx(rows * response / (4 * 64 / seconds), rel=1e-3)


def test_stages_of_a_pipeline_wait_for_one_micro_batch_each() -> None:
    cfg, card = settings(ranks=4, engines=4), CARDS["H100"]
    plan = make_plan(cfg, QWEN_7B, EIGHT, reckoned())
    plan = replace(plan, rank=replace(plan.rank, flops=989 * 10**12 * 3, micro_batches=8))
    cfg.trainer.parallel.pipeline = 3
    assert roofline(cfg, plan, card).update == pytest.approx(3 * (8 + 2) / 8)


@pytest.mark.parametrize("layers", [QWEN_7B.layers, QWEN_7B.layers // 2])
def test_of_experts_those_that_a_token_has_are_operations(layers: int) -> None:
    """Of the layers with experts. Memory traffic bounds one sequence; operations bound very many."""
    cfg, card = settings(ranks=4, engines=4), replace(CARDS["H100"], bandwidth=1e30)
    active = QWEN_7B.parameters
    experts = 3 * QWEN_7B.hidden * QWEN_7B.intermediate * layers
    moe = replace(
        QWEN_7B,
        experts=4,
        experts_per_token=1,
        expert_parameters=4 * experts,
        parameters=active + 3 * experts,
    )
    dense, mixed = (
        roofline(cfg, make_plan(cfg, shape, EIGHT, reckoned()), card) for shape in (QWEN_7B, moe)
    )
    assert dense.tokens == pytest.approx(card.flops / (2 * active)) == mixed.tokens

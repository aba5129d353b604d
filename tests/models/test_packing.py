from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.models.batch import TokenBatch, UpdateBatch
from skyasync.models.heads import load_causal_lm
from skyasync.models.packing import MicroBatches, plain_layout
from skyasync.models.token_model import TokenModel
from tests.workers.conftest import make_batch


def pack(
    batch: TokenBatch,
    max_tokens: int = 4096,
    max_rows: int = 0,
    share: bool = True,
    hidden: int = 32,
    ends: bool = False,
) -> list:
    settings = {
        "max_tokens": max_tokens,
        "max_rows": max_rows,
        "share_prefixes": share,
        "hidden_size": hidden,
    }
    return list(MicroBatches(batch, **settings, packs=ends))


@settings(max_examples=60, deadline=None)
@given(
    groups=st.integers(1, 5), samples=st.integers(1, 6), seed=st.integers(0, 99), share=st.booleans(),
    ends=st.booleans(), max_tokens=st.integers(8, 200), max_rows=st.sampled_from([0, 1, 3]),
)  # fmt: skip
def test_every_loss_token_is_in_exactly_one_micro_batch_with_its_own_predictor(
    groups: int, samples: int, seed: int, share: bool, ends: bool, max_tokens: int, max_rows: int
) -> None:
    batch = make_batch(groups, samples, seed)
    shuffled = batch.select(
        torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    )
    seen = torch.zeros_like(shuffled.tokens)
    for micro in pack(shuffled, max_tokens, max_rows, share, ends=ends):
        layout = micro.layout
        rows, columns = layout.cells // layout.shape[1], layout.cells % layout.shape[1]
        computed = torch.arange(len(rows)) if layout.copies is None else layout.copies
        before = layout.tokens.flatten()[layout.predictors]
        assert torch.equal(layout.targets[computed], shuffled.tokens[micro.rows[rows], columns])
        assert torch.equal(before[computed], shuffled.tokens[micro.rows[rows], columns - 1])
        seen[micro.rows[rows], columns] += 1
        assert len(micro.rows) <= (max_rows or len(batch))
        assert layout.tokens.numel() <= max_tokens or len(micro.rows) == 1, (
            "only a single longer row"
        )
    assert torch.equal(seen, shuffled.loss_mask.long())


def test_a_group_shares_its_prompt_and_computes_fewer_tokens() -> None:
    batch = make_batch(groups=2, samples=8, longest_response=5)
    shared, plain = pack(batch), pack(batch, share=False)
    assert sum(m.layout.tokens.numel() for m in shared) < 0.6 * sum(
        m.layout.tokens.numel() for m in plain
    )
    assert all(m.layout.visible_until is None and m.layout.positions is None for m in plain)


def test_many_rows_per_pass_stay_within_the_tokens_of_a_pass() -> None:
    batch = make_batch(groups=4, samples=16)
    for share in (False, True):
        for micro in pack(batch, max_tokens=64, max_rows=64, share=share):
            assert micro.layout.tokens.numel() <= 64


def test_a_batch_of_384k_tokens_is_cut_in_little_time_and_without_its_masks() -> None:
    """24 groups of 4 samples of 4,000 tokens, whose attention masks would take a gigabyte."""
    groups, samples, length = 24, 4, 4_000
    tokens = (
        torch.randint(1, 90, (groups, 1, length))
        .expand(groups, samples, length)
        .reshape(-1, length)
        .clone()
    )
    tokens[:, 2_000:] = torch.randint(1, 90, (groups * samples, 2_000))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    loss_mask = mask.clone()
    loss_mask[:, :2_000] = False
    batch = TokenBatch(
        tokens, mask, loss_mask, group_ids=torch.arange(groups).repeat_interleave(samples)
    )
    began = time.process_time()
    pieces = MicroBatches(batch, max_tokens=16_384, share_prefixes=True, hidden_size=4_096)
    first = next(iter(pieces))
    assert time.process_time() - began < 8
    assert first.layout.visible_until is not None
    largest = max(
        value.nbytes for value in vars(first.layout).values() if isinstance(value, torch.Tensor)
    )
    assert largest <= 8 * 16_384


def test_unequal_prompts_under_one_group_id_are_not_shared() -> None:
    batch = make_batch(groups=4, samples=1)
    batch.group_ids.zero_()
    batch.tokens[:, 0] = torch.arange(4) + 1
    assert all(m.layout.visible_until is None for m in pack(batch))


def test_long_responses_to_a_short_prompt_are_not_shared() -> None:
    """Sharing 2 of 60 tokens saves less than a dense attention mask costs."""
    tokens = torch.randint(1, 90, (8, 60))
    tokens[:, :2] = 7
    mask = torch.ones_like(tokens, dtype=torch.bool)
    loss_mask = mask.clone()
    loss_mask[:, :2] = False
    batch = TokenBatch(tokens, mask, loss_mask, group_ids=torch.zeros(8, dtype=torch.int64))
    assert all(m.layout.visible_until is None for m in pack(batch))


@pytest.mark.parametrize("max_tokens", [24, 100, 4096])
@pytest.mark.parametrize("ends", [False, True])
def test_shared_prompts_and_rows_end_to_end_change_neither_logprobs_nor_gradients(
    model_path: str, max_tokens: int, ends: bool
) -> None:
    batch = UpdateBatch.concatenate(
        [make_batch(groups=3, samples=5), make_batch(groups=1, samples=1, seed=2)]
    )
    model = TokenModel(load_causal_lm(model_path, torch.float64))
    weights = torch.randn(batch.tokens.shape, dtype=torch.float64)

    def run(layouts: list) -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        result = torch.zeros_like(weights)
        for rows, layout in layouts:
            scores = model(layout)["logprobs"]
            (scores * weights[rows][:, : scores.shape[1]]).sum().backward()
            result[rows, : scores.shape[1]] = scores.detach()
        return result, [p.grad.clone() for p in model.parameters()]

    packed = pack(batch, max_tokens, ends=ends)
    if max_tokens > 24:
        assert any(m.layout.visible_until is not None or m.layout.blocks for m in packed)
    assert any(m.layout.blocks for m in packed) == ends
    plain = plain_layout(batch.tokens, batch.attention_mask, batch.loss_mask)
    expected = run([(torch.arange(len(batch)), plain)])
    # Not tighter: transformers computes RMSNorm and rotary angles in float32 in any dtype.
    torch.testing.assert_close(
        run([(m.rows, m.layout) for m in packed]), expected, atol=1e-5, rtol=1e-4
    )


def test_rows_end_to_end_have_no_padding_and_few_blocks() -> None:
    """Lengths from 4 to 1,024: linear layers compute the tokens only, attention's rectangles are little more."""
    lengths = (1024 / torch.arange(1, 129)).long().clamp(min=4)
    mask = torch.arange(1024) < lengths[:, None]
    batch = TokenBatch(
        torch.randint(1, 90, mask.shape) * mask, mask, mask.clone(), group_ids=torch.arange(128)
    )
    pieces = pack(batch, ends=True)
    tokens, blocks = (
        int(lengths.sum()),
        [block for piece in pieces for block in piece.layout.blocks],
    )
    assert sum(piece.layout.tokens.numel() for piece in pieces) == tokens
    pairs = sum(block.queries.numel() * block.queries.shape[1] for block in blocks)
    assert pairs < 1.1 * lengths.double().square().sum()
    assert len(blocks) < 24
    assert sum(p.layout.tokens.numel() for p in pack(batch)) > 1.2 * tokens, (
        "a padded batch has padding"
    )


def test_a_model_that_does_not_hand_attention_its_mask_keeps_rows_below_each_other(
    untied_model: str,
) -> None:
    model = load_causal_lm(untied_model, torch.float32)
    model._supports_attention_backend = False
    assert not TokenModel(model).packs


def test_blocks_are_refused_by_any_other_attention(untied_model: str) -> None:
    """Without an error, every token would attend to all others."""
    wrapped = TokenModel(load_causal_lm(untied_model, torch.float32))
    wrapped.model.set_attn_implementation("sdpa")
    (piece,) = pack(make_batch(groups=4, samples=2, longest_response=40), ends=True, share=False)
    assert piece.layout.blocks
    with pytest.raises(RuntimeError):
        wrapped(piece.layout)


def test_an_empty_batch_has_no_micro_batches() -> None:
    assert pack(make_batch().select(torch.zeros(0, dtype=torch.int64))) == []

"""The tensors of training, and their parts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyasync.models.batch import RolloutBatch, ScoredBatch, TrainingBatch, UpdateBatch


def batch(lengths, groups=None, width=0):
    """Rows of these lengths; row r has r * 100 + position."""
    width = max([*lengths, width], default=0)
    mask = torch.tensor([[t < n for t in range(width)] for n in lengths], dtype=torch.bool).reshape(
        -1, width
    )
    tokens = torch.arange(len(lengths)).reshape(-1, 1) * 100 + torch.arange(width)
    return ScoredBatch(
        tokens=torch.where(mask, tokens, 0),
        attention_mask=mask,
        loss_mask=mask.clone(),
        group_ids=torch.tensor(groups if groups is not None else list(range(len(lengths)))),
        behaviour_logprobs=torch.where(mask, -1.0, 0.0),
        versions=torch.where(mask, 0, -1),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        rewards=torch.where(mask, 1.0, 0.0),
    )


ROWS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=12)


def rows(part):
    return [row[mask].tolist() for row, mask in zip(part.tokens, part.attention_mask, strict=True)]


def test_select_takes_rows_of_every_tensor_and_leaves_what_is_missing_missing():
    part = batch([2, 3, 1]).select(torch.tensor([2, 0]))
    assert rows(part) == [[200], [0, 1]]
    assert part.group_ids.tolist() == [2, 0]
    assert part.rewards.sum(1).tolist() == [1.0, 2.0]
    assert part.reference_logprobs is None


def test_trim_drops_the_columns_that_only_pad():
    part = batch([2, 3], width=9).trim()
    assert part.tokens.shape == part.rewards.shape == (2, 3)
    assert part.group_ids.shape == (2,)
    assert batch([2, 3]).select(torch.tensor([], dtype=torch.int64)).trim().tokens.shape == (0, 0)


@given(ROWS, st.integers(1, 5))
def test_pieces_hold_every_row_once_and_in_order(found, size):
    whole = batch([n for n, _ in found])
    pieces = list(whole.split(size))
    assert [r for piece in pieces for r in rows(piece.trim())] == rows(whole)
    assert all(len(piece) == size for piece in pieces[:-1])
    assert len(pieces[-1]) <= size


@given(ROWS, st.integers(0, 4))
def test_mini_batches_hold_whole_groups_and_every_row_once(found, size):
    whole = batch([n for n, _ in found], sorted(g for _, g in found))
    parts = [part for part, _ in whole.mini_batches(size)]
    assert [r for part in parts for r in rows(part)] == rows(whole)
    groups = [set(part.group_ids.tolist()) for part in parts]
    assert len(set.union(*groups)) == sum(map(len, groups)) == len(whole.group_ids.unique())
    assert all(len(g) == size for g in groups[:-1]) or size == 0
    if size == 0:
        assert len(parts) == 1


def test_a_stage_keeps_what_came_before_and_what_a_hook_has_added():
    scored = batch([2, 3])
    scored.bonus = torch.ones(2)
    trained = scored.to_stage(TrainingBatch, advantages=torch.zeros(2, 3))
    assert trained.tokens is scored.tokens and trained.bonus is scored.bonus
    update = trained.to_stage(UpdateBatch, loss_weights=torch.ones(2, 3))
    assert (
        isinstance(update, RolloutBatch)
        and update.advantages is trained.advantages
        and update.selection is None
    )


def test_a_stage_is_refused_without_what_it_promises():
    with pytest.raises(TypeError, match="advantages"):
        batch([2]).to_stage(TrainingBatch)


def test_what_a_hook_set_by_the_name_of_the_next_stage_is_that_stages():
    scored = batch([2])
    scored.advantages = torch.ones(1, 2)
    assert scored.to_stage(TrainingBatch).select(torch.tensor([0])).advantages.tolist() == [
        [1.0, 1.0]
    ]


def test_pieces_and_their_concatenation_are_of_the_same_stage():
    trained = batch([2, 3]).to_stage(TrainingBatch, advantages=torch.ones(2, 3))
    pieces = list(trained.split(1))
    assert all(type(piece) is TrainingBatch for piece in pieces)
    whole = TrainingBatch.concatenate([piece.trim() for piece in pieces])
    assert (
        type(whole) is TrainingBatch
        and whole.advantages.shape == (2, 3)
        and whole.proximal_logprobs is None
    )


def test_what_a_hook_has_added_is_cut_and_joined_with_the_rest():
    scored = batch([2, 3])
    scored.lengths = torch.tensor([2, 3])
    pieces = list(scored.split(1))
    assert pieces[1].lengths.tolist() == [3]
    assert ScoredBatch.concatenate(pieces).lengths.tolist() == [2, 3]


def test_concatenation_keeps_a_number_that_all_parts_share():
    rows = batch([2, 3])
    nothing = {"advantages": torch.zeros(2, 3), "loss_weights": torch.zeros(2, 3)}
    first, same, other = (rows.to_stage(UpdateBatch, **nothing) for _ in range(3))
    first.correction_exponent = same.correction_exponent = 0.5
    first.approximated_version = other.approximated_version = 4
    assert UpdateBatch.concatenate([first, same]).correction_exponent == 0.5
    assert UpdateBatch.concatenate([first, other]).correction_exponent is None
    assert UpdateBatch.concatenate([first, other]).approximated_version == 4
    assert UpdateBatch.concatenate([first, same]).approximated_version is None

"""The tensors that training sees, and their pieces."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from skyasync.workers.batch import TrainingBatch


def batch(lengths, groups=None, width=0):
    """Rows of these lengths; row r holds r * 100 + position."""
    width = max([*lengths, width], default=0)
    mask = torch.tensor([[t < n for t in range(width)] for n in lengths], dtype=torch.bool).reshape(-1, width)
    tokens = torch.arange(len(lengths)).reshape(-1, 1) * 100 + torch.arange(width)
    return TrainingBatch(
        tokens=torch.where(mask, tokens, 0),
        attention_mask=mask,
        loss_mask=mask.clone(),
        group_ids=torch.tensor(groups if groups is not None else list(range(len(lengths)))),
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
    assert part.advantages is None


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

"""The position of training, for batches in any order."""

from hypothesis import given
from hypothesis import strategies as st

from skyasync.trainer.context import Progress


@given(st.permutations(range(12)), st.lists(st.integers(1, 4), min_size=12, max_size=12))
def test_the_position_and_what_overtook_it_are_exactly_what_was_trained(positions, sizes):
    progress, trained = Progress(), set()
    for size in sizes:
        batch = positions[len(trained) : len(trained) + size]
        progress.trained(batch)
        trained.update(batch)
        assert {*range(progress.position), *progress.trained_early} == trained
        assert progress.position not in trained
        assert all(position > progress.position for position in progress.trained_early)
    assert progress.step == len(sizes)


def test_a_batch_that_is_trained_again_changes_nothing_but_the_step():
    progress = Progress()
    progress.trained([0, 1])
    progress.trained([0, 1])
    assert (progress.step, progress.position, progress.trained_early) == (2, 2, frozenset())

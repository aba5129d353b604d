"""The benchmark of mesh dimensions runs at toy size, and each way of dividing finds the same gradient."""

import pytest

from benchmarks.parallelism import cases, make, of_rank
from tests.workers.processes import Ranks


def measured(rank, case, folder):
    return of_rank(case, folder, folder, rank.rank)


@pytest.mark.matrix
@pytest.mark.slow
def test_two_ranks_find_what_one_finds(fork_socket, tmp_path):
    one, *_, divided = [
        case for case in cases(toy=True, updates=1) if case.name == "mixture" and case.ranks < 4
    ]
    assert divided.mesh == "tensor 2, expert 2"
    make(one, str(tmp_path))
    ranks = Ranks(2, fork_socket)
    try:
        found = ranks.call(measured, divided, str(tmp_path))
    finally:
        ranks.close()
    alone = of_rank(one, str(tmp_path), str(tmp_path), 0)
    assert [each.norm for each in found] == pytest.approx([alone.norm] * 2, rel=1e-5)
    assert all(each.cpu > 0 and each.seconds > 0 for each in found)

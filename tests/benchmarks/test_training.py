"""The benchmarks of an update and of its log-probabilities run at toy size; only their output is tested."""

import sys
from pathlib import Path

import pytest

from benchmarks import lean_logprobs, update_speed
from tests.fork_server import program

pytestmark = pytest.mark.slow


@pytest.fixture
def small(monkeypatch):
    """Few and short rows instead of the benchmark's."""
    grouped, ragged = update_speed.grouped_batch, update_speed.ragged_batch
    monkeypatch.setattr(update_speed, "grouped_batch", lambda prompts, samples: grouped(2, 2))
    monkeypatch.setattr(update_speed, "ragged_batch", lambda: ragged(rows=8, mean=16))
    trees = update_speed.tree_batch
    monkeypatch.setattr(update_speed, "tree_batch", lambda: trees(episodes=1, turns=3, branches=2))


@pytest.mark.parametrize(("options", "lines"), [([], 10), (["--ragged"], 5)])
def test_every_way_to_update_has_its_seconds(small, monkeypatch, capsys, options, lines):
    monkeypatch.setattr(sys, "argv", ["update_speed", "--rounds=1", *options])
    update_speed.main()
    head, *found = capsys.readouterr().out.splitlines()
    assert head.endswith("of them trained") and len(found) == lines
    assert all(" s " in line and line.endswith("tokens/s") for line in found)
    assert [
        line.split(" s ")[1].split()[0] for line in found if line.startswith(update_speed.OWN)
    ] == ["1.00"]


def test_trees_compute_fewer_tokens_and_learn_the_same(small, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["update_speed", "--rounds=1", "--trees"])
    update_speed.main()
    _, trees, rows, weights, *seconds = capsys.readouterr().out.splitlines()
    assert int(trees.split()[-3].replace(",", "")) < 0.5 * int(rows.split()[-3].replace(",", ""))
    assert (
        float(weights.split()[3]) < 1e-2
    )  # Adam's first step divides each gradient, also a tiny one, by its size
    assert len(seconds) == 3 and all(line.endswith("tokens/s") for line in seconds)


@pytest.mark.matrix
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="reads Linux's record of memory"
)
def test_the_memory_of_every_pass_is_printed_with_the_plain_one(fork_socket, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", program(fork_socket))
    monkeypatch.setattr(sys, "argv", ["lean_logprobs", "--tokens=512", "--vocabulary=20000"])
    passes = lean_logprobs.PASSES[::3]  # the simplest, and the one with most options
    monkeypatch.setattr(lean_logprobs, "PASSES", passes)
    lean_logprobs.main()
    found = capsys.readouterr().out.splitlines()
    assert [line.split(" plain ")[0].strip() for line in found] == list(passes)
    assert all(line.count("GiB") == 2 and 0 < float(line.split()[-1]) < 2 for line in found)

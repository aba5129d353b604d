"""The plan against the peaks of real ranks in separate processes; ``benchmarks/memory.py`` has more of them.

Without the allocators' caches, which differ from run to run, and would hide errors of the plan.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from benchmarks import gpu
from benchmarks.memory import CASES, Case, estimated, measured
from tests.fork_server import program

CHECKED = ("llama", "qwen3, tied")


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in CHECKED], ids=lambda case: case.name
)
def test_planned_peaks_are_within_8_percent_of_measured_ones(case: Case, fork_socket: Path) -> None:
    check(
        replace(case, rows=2, micro_batch_tokens=128, prompt=32, response=96),
        fork_socket,
        within=0.08,
    )


@pytest.mark.matrix
@pytest.mark.slow
def test_planned_peaks_with_a_short_state_are_within_10_percent_too(fork_socket: Path) -> None:
    """A model with fewer layers: packing the state into bytes is slow on a CPU."""
    case = next(case for case in CASES if case.name == "llama, both")
    smaller = case.model | {"num_hidden_layers": 2, "vocab_size": 8000}
    check(replace(case, model=smaller, rows=2, micro_batch_tokens=256), fork_socket)


@pytest.mark.matrix
@pytest.mark.slow
def test_planned_peaks_with_adapters_are_within_10_percent_too(fork_socket: Path) -> None:
    """With larger micro-batches: without optimizer state, a process's constant memory would be a large part."""
    case = next(case for case in CASES if case.name == "llama, adapters")
    check(replace(case, rows=4), fork_socket)


def check(case: Case, fork_socket: Path, within: float = 0.10) -> None:
    found = measured(case, exact=True, python=program(fork_socket))
    for phase, planned in estimated(case).items():
        assert planned == pytest.approx(found[phase], rel=within), (
            phase,
            planned >> 20,
            found[phase] >> 20,
        )


ON_H100 = {("0.6B", False): 41.67, ("0.6B", True): 12.05, ("1.7B", False): 76.54}
"""GiB of the fullest moment by ``benchmarks.gpu`` with packed rows, bfloat16, torch 2.11: shape, checkpointing."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "checkpointing"),
    [
        case if case == ("0.6B", False) else pytest.param(*case, marks=pytest.mark.matrix)
        for case in ON_H100
    ],
)
def test_planned_peaks_are_within_8_percent_of_those_of_a_gpu(
    shape: str, checkpointing: bool, tmp_path: Path
) -> None:
    AutoConfig.for_model(**gpu.SHAPES[shape]).save_pretrained(tmp_path)
    case = next(
        c for c in gpu.cases(shape, toy=False) if c.packed and c.checkpointing == checkpointing
    )
    found = gpu.planned(gpu.config(case, str(tmp_path)), "cuda") / 2**30
    assert found == pytest.approx(ON_H100[shape, checkpointing], rel=0.08)

"""The plan beside the peaks of real ranks, each in a process of its own; ``benchmarks/memory.py`` has more of them.

Without what allocators keep, which differs from run to run: it hides what the plan forgot, or makes up for it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.memory import CASES, Case, estimated, measured
from tests.warm import program

CHECKED = ("llama", "llama, both", "qwen3, tied", "qwen2, deep")


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.name in CHECKED], ids=lambda case: case.name)
def test_planned_peaks_are_within_10_percent_of_measured_ones(case: Case, warm_processes: Path) -> None:
    check(replace(case, rows=2, micro_batch_tokens=256), warm_processes)


@pytest.mark.slow
def test_planned_peaks_with_adapters_are_within_10_percent_too(warm_processes: Path) -> None:
    """With larger micro-batches: beside what is left without moments, what a process takes besides would weigh."""
    check(next(case for case in CASES if case.name == "llama, adapters"), warm_processes)


def check(case: Case, door: Path) -> None:
    found = measured(case, exact=True, python=program(door))
    for phase, planned in estimated(case, exact=True).items():
        assert planned == pytest.approx(found[phase], rel=0.10), (phase, planned >> 20, found[phase] >> 20)

"""The plan beside the peaks of real ranks, each in a process of its own; ``benchmarks/memory.py`` has more of them."""

from __future__ import annotations

import pytest

from benchmarks.memory import CASES, Case, estimated, measured

CHECKED = ("llama", "qwen3, tied", "qwen2, deep")


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.name in CHECKED], ids=lambda case: case.name)
def test_planned_peaks_are_within_15_percent_of_measured_ones(case: Case) -> None:
    found = measured(case)
    for phase, planned in estimated(case).items():
        assert planned == pytest.approx(found[phase], rel=0.15), (phase, planned >> 20, found[phase] >> 20)

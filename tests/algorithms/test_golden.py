"""Our functions give other frameworks' values and gradients; if a framework is wrong, the right ones.

The cases come from the file that ``GOLDEN_CASES`` names (JSON, may be gzipped), by default the one next to this test.
The adapters from the frameworks' names to our functions are ``golden_losses``, ``golden_reductions``,
``golden_corrections`` and ``golden_advantages``; the right values for the frameworks' bugs are in ``golden_pins``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.algorithms import golden_advantages, golden_corrections, golden_losses, golden_reductions
from tests.algorithms.golden_case import Case, assert_close, find_adapter, load_cases
from tests.algorithms.golden_pins import right_value

ADAPTER_MODULES = (golden_advantages, golden_corrections, golden_losses, golden_reductions)
CASES = {case.id: case for case in load_cases()}
COVERED = [case for case in CASES.values() if find_adapter(case.name)]
PEER_BUGS = [case for case in COVERED if case.bug]
METRIC_RTOL = 1e-6  # other frameworks add 1e-8 to counts and compute statistics in float32
PIN_RTOL = 2e-6  # some right values are another framework's, computed in float32


def results(case: Case) -> dict[str, Any]:
    """Results of our functions, with the gradient if the case has one."""
    out = find_adapter(case.name)(case)
    if case.leaf:
        target = out["loss"] if "loss" in out else out["kl"].sum()
        out["grad"] = torch.autograd.grad(target, case[case.leaf], retain_graph=True)[0]
    return out


@pytest.mark.parametrize("case", [c for c in COVERED if not c.bug], ids=lambda c: c.id)
def test_equals_the_original(case: Case) -> None:
    out = results(case)
    for what, expected in case.expected.items():
        assert_close(case, what, out[what], expected)
    if case.grad is not None:
        assert_close(case, "grad", out["grad"], case.grad)
    for what in case.metrics.keys() & out.keys():
        assert_close(case, what, out[what], case.metrics[what], rtol=METRIC_RTOL)


@pytest.mark.parametrize("case", PEER_BUGS, ids=lambda c: c.id)
def test_gives_the_right_value_where_the_original_does_not(case: Case) -> None:
    out = results(case)
    right = right_value(case, CASES)
    if not right:
        pytest.skip(f"the file lacks {case.raw['correct_case']}, which has the right value")
    for what, expected in right.items():
        assert_close(case, what, out[what], expected, rtol=PIN_RTOL)


def test_covers_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    missing = sorted(CASES.keys() - {case.id for case in COVERED})
    bugs = len(PEER_BUGS)
    with capsys.disabled():
        print(
            f"\ngolden cases: {len(COVERED)} of {len(CASES)} covered: {len(COVERED) - bugs} against the original, "
            f"{bugs} against the right value where the original is wrong; not covered: {', '.join(missing) or 'none'}"
        )
    assert not missing

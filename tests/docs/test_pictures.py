"""The pictures of the plans are what the plans do on virtual time."""

from __future__ import annotations

import pytest

from benchmarks.plan_pictures import OUT, STEPS, picture, watch
from skyasync.trainer.plans import PLANS

DRAWN = {
    **{name: name for name in PLANS.names()},
    "TwoStepsPerSync": "examples.custom_plan.main_double:TwoStepsPerSync",
}


@pytest.mark.parametrize("name", DRAWN)
def test_the_committed_picture_is_current(name: str) -> None:
    drawn = watch(DRAWN[name])
    assert len(drawn.responses) == STEPS * 8
    assert drawn.swaps[-1][1] == STEPS
    made = picture(name, drawn)
    assert (OUT / f"plan-{name}.svg").read_text() == made, "run: python -m benchmarks.plan_pictures"

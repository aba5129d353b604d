"""The pictures of the plans show what the plans do in simulation, and the badges what pyproject.toml says."""

from __future__ import annotations

import pytest

from benchmarks import badges
from benchmarks.plan_pictures import OUT, STEPS, picture, watch
from skyasync.trainer.plans import PLANS

DRAWN = {
    **{name: name for name in PLANS.names()},
    "TwoStepsPerSync": "examples.custom_plan.main_double:TwoStepsPerSync",
}


@pytest.mark.parametrize("name", DRAWN)
def test_the_committed_picture_is_current(name: str) -> None:
    drawn = watch(DRAWN[name])
    assert drawn.ended == STEPS * 8
    assert len(drawn.responses) == drawn.ended or name in ("colocated_async", "hybrid_async"), (
        "in one part"
    )
    assert drawn.swaps[-1][1] == STEPS
    made = picture(name, drawn)
    assert (OUT / f"plan-{name}.svg").read_text() == made, "run: python -m benchmarks.plan_pictures"


def test_the_badges_are_current_and_the_readme_says_the_same() -> None:
    readme = (badges.ROOT / "README.md").read_text()
    for name, (label, value) in badges.badges().items():
        file = badges.OUT / f"badge-{name}.svg"
        assert file.read_text() == badges.picture(label, value), "run: python -m benchmarks.badges"
        assert f"![{label} {value}]({file.relative_to(badges.ROOT)})" in readme

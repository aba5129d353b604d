"""Every plan with ten objectives gives the recorded losses: refactoring does not change a figure."""

import json
import shutil

import pytest

from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.recorded import FILE, OBJECTIVES, RECORDED_PLANS, checkpointed, figures

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=False)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("plan", RECORDED_PLANS)
async def test_the_figures_are_those_that_were_recorded(model, plan, objective):
    recorded = json.loads(FILE.read_text())[f"{plan} {objective}"]
    assert await figures(model, plan, objective) == {
        name: pytest.approx(values, rel=1e-3, abs=1e-6) for name, values in recorded.items()
    }


async def test_a_recorded_checkpoint_is_continued_with_the_same_figures(model, tmp_path):
    """``recorded_checkpoint`` has weights, optimizer state, prompt positions and untrained rollouts."""
    shutil.copytree(FILE.with_name("recorded_checkpoint"), tmp_path, dirs_exist_ok=True)
    resumed = await checkpointed(model, tmp_path, resume_mode="latest")
    assert list(resumed.tracker.rows) == [4]
    step = resumed.tracker.rows[4]
    assert (
        step["staleness/mean"] == 1.0
    )  # the rollouts of the checkpoint were trained, not generated again
    assert step["policy/loss"] == pytest.approx(-0.03891989216208458, rel=1e-3)
    assert step["policy/grad_norm"] == pytest.approx(1.1303585767745972, rel=1e-3)

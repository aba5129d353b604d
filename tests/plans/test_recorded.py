"""Every plan with ten objectives gives the losses that were recorded: a change of structure does not move a number."""

import json

import pytest

from tests.engines.tiny_llama import save_tiny_llama
from tests.plans.recorded import FILE, OBJECTIVES, RECORDED_PLANS, figures

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

"""The example's plan in simulation and with real parts, and both ways to select it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.custom_plan import main_double
from examples.custom_plan.main_double import TwoStepsExp, TwoStepsPerSync
from skyasync.config.schema import Config
from skyasync.run.experiment import BasePPOExp
from skyasync.simulate.clock import run_virtual
from skyasync.simulate.run import make_trainer, simulate, work
from tests.inference.tiny_llama import save_tiny_llama
from tests.simulate.test_plans import config
from tests.trainer.plans.local_run import LocalRun, prompts
from tests.trainer.plans.local_run import config as local_config

REFERENCE = "examples.custom_plan.main_double:TwoStepsPerSync"


def test_it_fits_on_a_screen() -> None:
    assert len(Path(main_double.__file__).read_text().splitlines()) < 60


def test_it_overlaps_generation_and_training() -> None:
    cfg = config()
    assert work(cfg).step_s / simulate(cfg, REFERENCE).step_s > 0.97


def test_it_syncs_every_other_step_and_at_the_end_and_keeps_its_bound() -> None:
    async def run() -> tuple[Any, list[int]]:
        trainer = make_trainer(config("lognormal", steps=21), TwoStepsPerSync)
        sync, versions = trainer.weight_sync.sync, []

        async def noted(version: int, *paused: Any) -> dict[str, float]:
            versions.append(version)
            return await sync(version, *paused)

        trainer.weight_sync.sync = noted
        await trainer.run()
        return trainer, versions

    trainer, versions = run_virtual(run())
    assert versions == [0, *range(2, 21, 2), 21]
    assert 2 <= max(trainer.staleness) <= 4


async def test_it_trains_with_real_parts(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path, tied=False)
    run = await LocalRun(TwoStepsPerSync, local_config(model, steps=5)).train()
    assert sorted(run.tracker.rows) == [1, 2, 3, 4, 5]
    assert run.tracker.rows[5]["eval/version"] == 5


@pytest.mark.parametrize(("experiment", "plan"), [(BasePPOExp, REFERENCE), (TwoStepsExp, "sync")])
def test_a_key_or_a_subclass_of_the_experiment_chooses_it(
    experiment: type[BasePPOExp], plan: str
) -> None:
    cfg = Config()
    cfg.trainer.plan = plan
    trainer = experiment(cfg).get_trainer(cfg, None, None, prompts(4), None, None, None, None)
    assert type(trainer) is TwoStepsPerSync

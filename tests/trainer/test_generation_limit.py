"""Generation and evaluation may take longer than ``trainer.step_timeout_s`` while the engines generate."""

from __future__ import annotations

import asyncio

import pytest

from skyasync.inference.interface import EngineStats
from skyasync.simulate.clock import run_virtual
from skyasync.trainer.generation_limit import GenerationLimit
from tests.trainer.plans.parts import PLANS, Engines, Run, make_run
from tests.virtual_time import virtual_time

LIMIT_S = 50.0
NEVER_S = 1e9

every_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)


class GeneratingEngines(Engines):
    """They generate a token per second until ``stops_s``, and count the reports that were requested."""

    stops_s = NEVER_S
    reports = 0

    async def stats(self) -> list[EngineStats]:
        self.reports += 1
        seconds = min(asyncio.get_running_loop().time(), self.stops_s)
        return [EngineStats(), EngineStats(generated_tokens=int(seconds))]


def slow_run(plan: type, *, held_out: bool, stops_s: float = NEVER_S) -> Run:
    """A run whose generation, or evaluation, takes ten times the limit after the first step."""
    run = make_run(
        plan, prompts=12, eval_prompts=2, trainer__eval_interval=1, trainer__step_timeout_s=LIMIT_S
    )
    engines = GeneratingEngines(run.engines.faults, update_in_flight=run.engines.update_in_flight)
    engines.stops_s = stops_s
    run.engines.stats = engines.stats
    generate = run.generator.generate
    slow = [held_out]

    async def generate_slowly(batch):
        if slow and batch["is_eval"] == held_out and run.trainer.global_step == 1:
            slow.clear()
            await asyncio.sleep(10 * LIMIT_S)
        return await generate(batch)

    run.generator.generate = generate_slowly
    return run


@every_plan
@pytest.mark.parametrize("held_out", [False, True])
def test_a_run_whose_engines_generate_does_not_end(plan, held_out):
    run = slow_run(plan, held_out=held_out)

    async def scenario() -> float:
        await run.trainer.run()
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) > 10 * LIMIT_S
    assert run.trainer.global_step == 3


@every_plan
@pytest.mark.parametrize("held_out", [False, True])
def test_a_run_whose_engines_stop_ends_within_the_limit(plan, held_out):
    stops_s = 4 * LIMIT_S
    run = slow_run(plan, held_out=held_out, stops_s=stops_s)

    async def scenario() -> float:
        with pytest.raises(TimeoutError, match="generated nothing within 50 s") as caught:
            await run.trainer.run()
        what = "evaluation" if held_out else "generation"
        assert str(caught.value).startswith(f"the {what} of step ")
        assert str(caught.value).endswith("(trainer.step_timeout_s)")
        return asyncio.get_running_loop().time()

    assert 0.8 * LIMIT_S <= run_virtual(scenario()) - stops_s <= LIMIT_S


async def wait(limit: GenerationLimit, seconds: float) -> None:
    async with limit.limited("the generation of step 1"):
        await asyncio.sleep(seconds)


def engines_that_stop(stops_s: float = NEVER_S) -> GeneratingEngines:
    engines = GeneratingEngines(make_run(PLANS[0]).engines.faults)
    engines.stops_s = stops_s
    return engines


@virtual_time
async def test_generations_at_the_same_time_share_the_reports_of_the_engines():
    engines = engines_that_stop()
    limit = GenerationLimit(LIMIT_S, engines)
    await asyncio.gather(*(wait(limit, 10 * LIMIT_S) for _ in range(100)))
    assert 100 < engines.reports <= 10 * 16
    reports = engines.reports
    await asyncio.sleep(10 * LIMIT_S)
    assert engines.reports == reports


@virtual_time
async def test_the_limit_counts_from_the_start_of_a_generation():
    engines = engines_that_stop(10.0)
    limit = GenerationLimit(LIMIT_S, engines)
    await wait(limit, 20.0)
    await asyncio.sleep(1000.0)
    with pytest.raises(TimeoutError):
        await wait(limit, 60.0)
    assert asyncio.get_running_loop().time() == pytest.approx(1020.0 + LIMIT_S)


@pytest.mark.parametrize("fault", ["error", "no answer"])
@virtual_time
async def test_the_limit_holds_for_engines_that_do_not_report(fault):
    class Mute(GeneratingEngines):
        async def stats(self) -> list[EngineStats]:
            if fault == "error":
                raise ConnectionError("gone")
            await asyncio.sleep(NEVER_S)
            return []

    limit = GenerationLimit(LIMIT_S, Mute(make_run(PLANS[0]).engines.faults))
    with pytest.raises(TimeoutError, match="the generation of step 1"):
        await wait(limit, 10 * LIMIT_S)
    assert asyncio.get_running_loop().time() == pytest.approx(LIMIT_S)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual_time
async def test_a_timeout_of_the_generation_itself_is_not_taken_for_the_limit():
    with pytest.raises(TimeoutError, match="the worker is away"):
        async with GenerationLimit(LIMIT_S, engines_that_stop()).limited(
            "the generation of step 1"
        ):
            raise TimeoutError("the worker is away")

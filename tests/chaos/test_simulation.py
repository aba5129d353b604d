"""Simulated runs of all plans with faults; ``python -m tests.chaos --virtual --schedules 10000`` runs more."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from skyasync.trainer.context import Progress
from skyasync.weight_sync.update import WeightUpdate
from tests.chaos.simulated_processes import Engine
from tests.chaos.simulated_ranks import Ranks
from tests.chaos.simulation import NAMES, OTHER_WEIGHTS, WEIGHTS, play, play_all

pytestmark = pytest.mark.slow

SCHEDULES = 12
#: With hybrid engines most faults end the command, so that it takes more schedules until workers alone are restarted.
MORE_SCHEDULES = {"hybrid_async": 26}


@pytest.mark.parametrize("plan", NAMES)
def test_no_prompt_is_lost_or_trained_twice_no_step_is_missing_nothing_hangs_and_the_weights_are_undisturbed(
    plan: str,
) -> None:
    plays = [play(seed, plan) for seed in range(MORE_SCHEDULES.get(plan, SCHEDULES))]
    assert {each.seed: each.wrong for each in plays if each.wrong} == {}
    met = sum((each.events for each in plays), Counter[str]())
    assert met.keys() == WEIGHTS.keys(), "each kind of event has had a target"
    assert sum(each.restarts for each in plays) > 3 and sum(each.commands - 1 for each in plays) > 3


@pytest.mark.parametrize(
    "seed, plan",
    [
        (
            4318,
            "one_step_off",
        ),  # the command ended between a checkpoint and its step's line in the metrics
        (
            3039,
            "streamed",
        ),  # an episode starts again before the former one of its name has been closed
    ],
)
def test_what_was_broken_once(seed: int, plan: str) -> None:
    assert play(seed, plan).wrong == []


def test_other_tokens_after_a_failure_of_an_engine_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that begins a stream of random numbers with each request, as vLLM."""
    token = Engine._token

    def of_a_new_stream(engine: Engine, name: str) -> int:
        request = engine._prompts[name]
        engine._prompts[name] = replace(request, sampling=request.fresh_sampling, response_tokens=0)
        try:
            return token(engine, name)
        finally:
            engine._prompts[name] = request

    monkeypatch.setattr(Engine, "_token", of_a_new_stream)
    assert play(7, "sync").wrong == [OTHER_WEIGHTS]


def test_a_replacement_engine_with_old_weights_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[WeightUpdate] = []

    async def release(ranks: Ranks, update: WeightUpdate) -> None:
        released.append(update)

    async def for_late_engine(ranks: Ranks, version: int) -> WeightUpdate:
        return replace(released[-1], info=released[-2:][0].info)

    monkeypatch.setattr(Ranks, "release", release)
    monkeypatch.setattr(Ranks, "for_late_engine", for_late_engine)
    assert play(11, "sync").wrong == [OTHER_WEIGHTS]


def test_groups_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    chance, train = random.Random(0), Ranks.train

    async def in_any_order(ranks: Ranks, part: str) -> None:
        await train(ranks, part)
        chance.shuffle(ranks.gradients)

    monkeypatch.setattr(Ranks, "train", in_any_order)
    assert OTHER_WEIGHTS in [line for seed in range(4) for line in play(seed, "streamed").wrong]


def test_the_same_seed_plays_the_same() -> None:
    assert play(11, "fully_async") == play(11, "fully_async")


def test_a_run_that_skips_a_prompt_or_a_step_when_it_goes_on_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, resumed = [], Progress.resumed
    monkeypatch.setattr(
        Progress,
        "resumed",
        lambda self, step, place, trained: resumed(self, step, place + 1, trained),
    )
    assert play_all(8, 40, found.append) == 1
    assert any("is nowhere in the ledger" in line for line in found)

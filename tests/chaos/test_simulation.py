"""Simulated runs of all plans with faults; ``python -m tests.chaos --virtual --schedules 10000`` runs more."""

from __future__ import annotations

from collections import Counter

import pytest

from skyasync.trainer.context import Progress
from tests.chaos.simulation import NAMES, WEIGHTS, play, play_all

pytestmark = pytest.mark.slow

EACH = 12


@pytest.mark.parametrize("plan", NAMES)
def test_no_prompt_is_lost_or_trained_twice_no_step_is_missing_and_nothing_hangs(plan: str) -> None:
    plays = [play(seed, plan) for seed in range(EACH)]
    assert {each.seed: each.wrong for each in plays if each.wrong} == {}
    met = sum((each.events for each in plays), Counter[str]())
    assert met.keys() == WEIGHTS.keys(), "each kind of event has had a target"
    assert sum(each.restarts for each in plays) > 3 and sum(each.commands - 1 for each in plays) > 3


@pytest.mark.parametrize(
    "seed, plan",
    [
        (4318, "one_step_off"),  # the command ended between a checkpoint and its step's line in the metrics
        (3039, "streamed"),  # an episode starts again before the former one of its name has been closed
    ],
)
def test_what_was_broken_once(seed: int, plan: str) -> None:
    assert play(seed, plan).wrong == []


def test_the_same_seed_plays_the_same() -> None:
    assert play(11, "fully_async") == play(11, "fully_async")


def test_a_run_that_skips_a_prompt_or_a_step_when_it_goes_on_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found, resumed = [], Progress.resumed
    monkeypatch.setattr(Progress, "resumed", lambda self, step, place, trained: resumed(self, step, place + 1, trained))
    assert play_all(8, 40, found.append) == 1
    assert any("is nowhere in the ledger" in line for line in found)

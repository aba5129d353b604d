"""The benchmark of the controller runs at toy size; its figures are not tested."""

import pytest

from benchmarks.controller import TURNS, measure


@pytest.mark.parametrize(("env", "turns"), [("instant", 1), ("local", 1), ("turns", TURNS)])
async def test_all_episodes_and_turns_are_counted(env: str, turns: int) -> None:
    (cost,) = await measure(env, prompts=3, samples=2, repeats=1, profile=None)
    assert cost.episodes == 6
    assert cost.turns == 6 * turns
    assert cost.cpu_s > 0 and cost.loop_turns_s

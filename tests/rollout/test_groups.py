"""The samples of a prompt are played together for as long as nothing tells them apart."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from skyasync.envs.base import BaseTextEnv
from skyasync.inference.interface import GenerationRequest, SamplingParams
from skyasync.rollout.generator_api import run_generator
from skyasync.rollout.types import RolloutRequest, TrajectoryId
from tests.rollout.episodes import ScriptedEngine, generator, prompt, registered, requests
from tests.virtual_time import virtual_time


class LengthEnv(BaseTextEnv):
    """Ends after as many turns as the row says."""

    def step(self, action: str) -> Any:
        self.turns += 1
        more = [{"role": "user", "content": f"turn {self.turns}"}]
        return {
            "observations": more,
            "reward": 1.0,
            "done": self.turns >= self.extras["turns"],
            "metadata": {},
        }


class InstantEnv(LengthEnv):
    @classmethod
    def instant(cls, env_config: dict[str, Any], extras: dict[str, Any]) -> bool:
        return True


class SlowEngine(ScriptedEngine):
    """One second per answer."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> Any:
        async for outputs in super().generate(requests):
            await asyncio.sleep(1.0)
            yield outputs


@virtual_time
async def test_samples_of_all_prompts_share_one_message_and_those_of_a_prompt_its_tokens() -> None:
    engine = ScriptedEngine(lambda _: "7")
    prompts = [prompt(row, registered(InstantEnv), turns=1) for row in range(100)]
    groups, _ = await run_generator(generator(engine), requests(prompts, samples=4), 0)
    assert engine.messages == 1
    assert [group.rewards for group in groups] == [[1.0] * 4] * 100
    assert len({id(each.prompt_token_ids) for each in engine.requests}) == 100


@pytest.mark.parametrize("env", [LengthEnv, InstantEnv])
@virtual_time
async def test_later_turns_are_played_one_by_one(env: type[BaseTextEnv]) -> None:
    engine = ScriptedEngine(lambda _: "7")
    asked = requests([prompt(0, registered(env), turns=3)], samples=4)
    (group,), _ = await run_generator(generator(engine), asked, 0)
    assert [len(trajectory.actions) for trajectory in group.trajectories] == [3] * 4
    names = [each.request_id for each in engine.requests]
    assert names[:4] == [f"e0-i0-r{repetition}-t0" for repetition in range(4)]
    assert len(names) == len(set(names)) == 12


@virtual_time
async def test_each_sample_has_the_seed_that_it_has_alone() -> None:
    together, alone = ScriptedEngine(lambda _: "7"), ScriptedEngine(lambda _: "7")
    row = prompt(0, registered(InstantEnv), turns=1)
    sampling = SamplingParams(max_tokens=8, seed=5)
    asked = [
        RolloutRequest(TrajectoryId(row.id, repetition), row, row.extras, sampling)
        for repetition in range(4)
    ]
    await run_generator(generator(together), asked, 0)
    for request in asked:
        await run_generator(generator(alone), [request], 0)
    seeds = [each.sampling.seed for each in together.requests]
    assert seeds == [each.sampling.seed for each in alone.requests]
    assert len(set(seeds)) == 4


@virtual_time
async def test_the_time_limit_of_a_group_ends_only_the_samples_without_an_answer() -> None:
    asked = requests([prompt(0, registered(InstantEnv), turns=1)], samples=4)
    played = generator(
        SlowEngine(lambda _: "7"), timeout_s=2.5, on_error="keep", give_up_reward=-1.0
    )
    (group,), _ = await run_generator(played, asked, 0)
    assert [bool(trajectory.metrics["given_up"]) for trajectory in group.trajectories] == [
        False,
        False,
        True,
        True,
    ]
    assert [len(trajectory.actions) for trajectory in group.trajectories] == [1, 1, 0, 0]

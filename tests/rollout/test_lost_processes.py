"""Episodes of a failed environment process are repeated in another one, without asking the model again."""

from __future__ import annotations

from typing import Any

import pytest

from skyasync.envs.episodes import EnvSettings, Episodes
from skyasync.envs.pool import EnvPool
from skyasync.utils.rpc import LocalTransport, ProcessLostError
from tests.rollout.episodes import RecordedEnv, ScriptedEngine, generator, prompt, registered, requests
from tests.rollout.test_generator import Countdown, groups
from tests.virtual_time import virtual_time


class Mortal(LocalTransport):
    """A process that fails at a given call."""

    def __init__(self, settings: EnvSettings, dies: int) -> None:
        super().__init__(Episodes(settings))
        self.left = dies

    def die(self, asked: int) -> None:
        self.left -= asked
        if self.left <= 0:
            raise RuntimeError("the actor failed")

    async def load(self, *args: object) -> Exception | None:
        self.die(1)
        return await super().load(*args)

    async def exchange(self, calls: Any) -> Any:
        self.die(len(calls))
        return await super().exchange(calls)


def mortal_pool(*dies: int) -> tuple[EnvPool, list[Mortal]]:
    """The first processes fail; their replacements fail until these numbers have run out."""
    settings, made = EnvSettings({}), list[Mortal]()

    def start() -> Mortal:
        made.append(Mortal(settings, dies[len(made)] if len(made) < len(dies) else 10**9))
        return made[-1]

    return EnvPool(start, 1, settings), made


def asked(env: type[RecordedEnv], count: int) -> list[Any]:
    name = registered(env)
    return [prompt(row, name, name=str(row)) for row in range(count)]


@pytest.mark.parametrize("dies", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("on_error", ["raise", "mask"])
@virtual_time
async def test_an_episode_goes_on_in_another_process_with_what_the_model_had_said(dies: int, on_error: str) -> None:
    engine, (pool, made), prompts = ScriptedEngine(lambda _: "7"), mortal_pool(dies, 3), asked(Countdown, 2)
    found = await groups(generator(engine, pool=pool, on_error=on_error), requests(prompts))
    whole = await groups(generator(ScriptedEngine(lambda _: "7")), requests(prompts))
    for group, expected in zip(found, whole, strict=True):
        (played,), (wanted,) = group.trajectories, expected.trajectories
        assert [s.tokens.tolist() for s in played.segments] == [s.tokens.tolist() for s in wanted.segments]
        assert [s.reward for s in played.actions] == [1.0, 2.0, 3.0]
        assert played.metrics["retries"] == 2.0 and not played.metrics.get("given_up")
    assert len(made) == 3
    assert len(engine.requests) == 6, "three turns of two episodes, each requested once"


@virtual_time
async def test_one_that_loses_process_after_process_is_to_blame() -> None:
    (pool, made), prompts = mortal_pool(2, 2, 2, 2), asked(Countdown, 1)
    with pytest.raises(ProcessLostError, match="the actor failed"):
        await groups(generator(ScriptedEngine(lambda _: "7"), pool=pool), requests(prompts))
    assert len(made) == 4
    pool, made = mortal_pool(2, 2, 2, 2)
    found = await groups(generator(ScriptedEngine(lambda _: "7"), pool=pool, on_error="mask"), requests(prompts))
    assert found[0].trajectories[0].metrics == {"given_up": 1.0}

"""Episodes of a failed environment process are repeated in another one, without asking the model again."""

from __future__ import annotations

from typing import Any

import pytest

from skyasync.envs.episodes import EnvSettings, Episodes
from skyasync.envs.pool import EnvPool
from skyasync.utils.rpc import LocalTransport, ProcessLostError
from tests.rollout.episodes import (
    RecordedEnv,
    ScriptedEngine,
    generator,
    prompt,
    registered,
    requests,
)
from tests.rollout.test_generator import Countdown, groups
from tests.virtual_time import virtual_time


class FailingProcess(LocalTransport):
    """A process that fails at a given call."""

    def __init__(self, settings: EnvSettings, failing_call: int) -> None:
        super().__init__(Episodes(settings))
        self.left = failing_call

    def fail(self, calls: int) -> None:
        self.left -= calls
        if self.left <= 0:
            raise RuntimeError("the actor failed")

    async def load(self, *args: object) -> Exception | None:
        self.fail(1)
        return await super().load(*args)

    async def exchange(self, calls: Any) -> Any:
        self.fail(len(calls))
        return await super().exchange(calls)


def failing_pool(*failing_call: int) -> tuple[EnvPool, list[FailingProcess]]:
    """The first processes fail; their replacements fail until these numbers have run out."""
    settings, made = EnvSettings({}), list[FailingProcess]()

    def start() -> FailingProcess:
        made.append(
            FailingProcess(
                settings, failing_call[len(made)] if len(made) < len(failing_call) else 10**9
            )
        )
        return made[-1]

    return EnvPool(start, 1, settings), made


def prompts_of(env: type[RecordedEnv], count: int) -> list[Any]:
    name = registered(env)
    return [prompt(row, name, name=str(row)) for row in range(count)]


@pytest.mark.parametrize("failing_call", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("on_error", ["raise", "mask"])
@virtual_time
async def test_an_episode_continues_in_another_process_with_the_models_actions(
    failing_call: int, on_error: str
) -> None:
    engine, (pool, made) = ScriptedEngine(lambda _: "7"), failing_pool(failing_call, 3)
    prompts = prompts_of(Countdown, 2)
    found = await groups(generator(engine, pool=pool, on_error=on_error), requests(prompts))
    whole = await groups(generator(ScriptedEngine(lambda _: "7")), requests(prompts))
    for group, expected in zip(found, whole, strict=True):
        (played,), (wanted,) = group.trajectories, expected.trajectories
        assert [s.tokens.tolist() for s in played.segments] == [
            s.tokens.tolist() for s in wanted.segments
        ]
        assert [s.reward for s in played.actions] == [1.0, 2.0, 3.0]
        assert played.metrics["retries"] == 2.0 and not played.metrics.get("given_up")
    assert len(made) == 3
    assert len(engine.requests) == 6, "three turns of two episodes, each requested once"


@virtual_time
async def test_one_that_loses_process_after_process_is_to_blame() -> None:
    (pool, made), prompts = failing_pool(2, 2, 2, 2), prompts_of(Countdown, 1)
    with pytest.raises(ProcessLostError, match="the actor failed"):
        await groups(generator(ScriptedEngine(lambda _: "7"), pool=pool), requests(prompts))
    assert len(made) == 4
    pool, made = failing_pool(2, 2, 2, 2)
    found = await groups(
        generator(ScriptedEngine(lambda _: "7"), pool=pool, on_error="mask"), requests(prompts)
    )
    assert found[0].trajectories[0].metrics == {"given_up": 1.0}

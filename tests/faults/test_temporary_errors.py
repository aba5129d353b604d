"""Temporary errors of environments, rewards and agent programs are retried; then the episode fails and is counted."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from skyasync import TransientError
from skyasync.agents.generator import AgentGenerator
from skyasync.agents.programs import AgentError, AgentPool, AgentProcess
from skyasync.agents.server import Endpoint
from skyasync.config.schema import Config
from skyasync.envs.pool import local_pool
from skyasync.errors import UserError
from skyasync.inference.client import InferenceClient
from skyasync.rollout.episode_limits import EpisodeLimits, check_given_up
from skyasync.rollout.generator_api import run_generator
from skyasync.rollout.types import Group
from skyasync.utils.rpc import LocalTransport, RetryPolicy
from tests.agents.test_generator import PROGRAMS, Engine
from tests.rollout.episodes import (
    RecordedEnv,
    ScriptedEngine,
    generator,
    prompt,
    registered,
    requests,
    tokenizer,
)
from tests.virtual_time import virtual_time

PATIENCE = RetryPolicy(tries=3, pause_s=4.0, names=("ConnectionError", "builtins.LookupError"))


class Shaky(RecordedEnv):
    """Two turns; ``fails`` calls of the second one raise the error named by ``kind``."""

    left: dict[str, int] = {}  # noqa: RUF012  (shared on purpose)

    def init(self, prompt: Any) -> Any:
        self.fail("init")
        return super().init(prompt)

    def step(self, action: str) -> Any:
        if self.turns == 1:
            self.fail("step")
        self.turns += 1
        return {"observations": [], "reward": 1.0, "done": self.turns == 2, "metadata": {}}

    def fail(self, where: str) -> None:
        name = self.extras["name"]
        if where == self.extras["where"] and self.left.setdefault(name, self.extras["fails"]):
            self.left[name] -= 1
            raise {"marked": TransientError, "named": ConnectionResetError, "other": OSError}[
                self.extras["kind"]
            ]("no")


class ShakyAsync(Shaky):
    async def step(self, action: str) -> Any:
        return super().step(action)


async def played(
    env: type, fails: int, kind: str = "marked", where: str = "step", on_error: str = "raise"
) -> tuple[Group, ScriptedEngine]:
    Shaky.left = {}
    name, engine = registered(env), ScriptedEngine(lambda _: "go")
    rows = [prompt(0, name, name="a", fails=fails, kind=kind, where=where)]
    found = generator(engine, pool=local_pool(patience=PATIENCE), on_error=on_error)
    return (await run_generator(found, requests(rows), 0))[0][0], engine


@pytest.mark.parametrize("env", [Shaky, ShakyAsync])
@pytest.mark.parametrize("kind, where", [("marked", "step"), ("named", "step"), ("marked", "init")])
def test_a_call_that_fails_for_now_is_made_again_later_and_later(
    env: type, kind: str, where: str
) -> None:
    random.seed(0)

    @virtual_time
    async def scenario() -> None:
        group, engine = await played(env, fails=3, kind=kind, where=where)
        assert 0.5 * (4 + 8 + 16) <= asyncio.get_running_loop().time() <= 4 + 8 + 16 + 1
        (trajectory,) = group.trajectories
        assert trajectory.metrics == {"turns": 2.0, "retries": 3.0}
        assert len(engine.requests) == 2, "the model gets no second request"
        assert env.closed == (["a"] * 4 if where == "init" else ["a"])  # type: ignore[attr-defined]

    scenario()


def test_one_failure_too_many_is_an_error_like_any_other() -> None:
    @virtual_time
    async def scenario() -> None:
        with pytest.raises(TransientError, match="no"):
            await played(Shaky, fails=4)
        group, _ = await played(Shaky, fails=4, on_error="mask")
        assert group.trajectories[0].metrics == {"given_up": 1.0}
        await asyncio.sleep(1)
        assert Shaky.closed == ["a"]

    scenario()


def test_what_is_not_marked_is_not_asked_again() -> None:
    @virtual_time
    async def scenario() -> None:
        with pytest.raises(OSError, match="no"):
            await played(Shaky, fails=1, kind="other")
        assert asyncio.get_running_loop().time() < 1

    scenario()


@pytest.mark.parametrize("fails, score", [(2, 3.0), (9, None)])
async def test_an_agent_program_is_played_again_from_its_beginning(
    fails: int, score: float | None, tmp_path: Path
) -> None:
    endpoint = Endpoint(InferenceClient([Engine(lambda _: "yes")]), tokenizer(), 256)
    patience = RetryPolicy(tries=3, pause_s=0.01)
    pool = AgentPool(
        lambda: LocalTransport(AgentProcess(f"{PROGRAMS}:shaky", {}, patience=patience))
    )
    found = AgentGenerator(endpoint, pool, tokenizer(), EpisodeLimits(), patience)
    rows = [prompt(0, mark=str(tmp_path / "calls"), fails=fails)]
    try:
        if score is None:
            with pytest.raises(AgentError, match="TransientError: busy"):
                await run_generator(found, requests(rows), 0)
            return
        (group,) = (await run_generator(found, requests(rows), 0))[0]
        assert group.rewards == [score]
        assert group.trajectories[0].metrics["retries"] == 2.0
        assert len(group.trajectories[0].actions) == 1, "of the last attempt only"
    finally:
        await found.close()


def test_too_many_given_up_end_the_run() -> None:
    @virtual_time
    async def scenario() -> None:
        given_up, _ = await played(Shaky, fails=4, on_error="mask")
        well, _ = await played(Shaky, fails=0, on_error="mask")
        check_given_up([given_up, well], 0.5)
        with pytest.raises(UserError, match=r"1 of 2 episodes .*environment\.max_given_up=0\.4"):
            check_given_up([given_up, well], 0.4)

    scenario()


def test_an_agent_program_has_a_limit_by_itself() -> None:
    cfg = Config()
    assert EpisodeLimits.of(cfg).timeout_s == 0
    cfg.generator.agent_program = "a:b"
    assert EpisodeLimits.of(cfg).timeout_s == pytest.approx(0.9 * cfg.trainer.step_timeout_s)
    cfg.generator.episode_timeout_s = 7.0
    assert EpisodeLimits.of(cfg).timeout_s == 7.0

"""Environments behind the pool, in this process and on virtual time."""

import asyncio
import math
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest

from skyasync.envs import ENVS, BaseTextEnv
from skyasync.envs.pool import EnvPool, EnvWorker, local_pool
from skyasync.errors import UserError
from tests.virtual_time import virtual_time

PROMPT = [{"role": "user", "content": "begin"}]


class Logged(BaseTextEnv):
    """Its extras script it: ``fails`` names the method that raises, ``reward`` and ``turns`` what a step gives."""

    log: ClassVar[Counter[tuple[str, str]]] = Counter()

    def _live(self, what):
        self.log[self.extras["name"], what] += 1
        if self.extras.get("fails") == what:
            raise LookupError(f"broken {what}")

    def init(self, prompt):
        self._live("init")
        return [*prompt, {"role": "user", "content": self.extras["name"]}], {}

    def step(self, action):
        self._live("step")
        self.turns += 1
        done = self.turns >= self.extras.get("turns", 1)
        return {"observations": [], "reward": self.extras.get("reward", 1.0), "done": done, "metadata": {}}

    def get_metrics(self):
        self._live("get_metrics")
        return {"turns": float(self.turns)}

    def close(self):
        self._live("close")


@pytest.fixture(autouse=True)
def _registered():
    Logged.log.clear()
    ENVS["logged"] = Logged
    yield
    del ENVS["logged"]


async def begin(pool, name, **extras):
    return await pool.init(name, "logged", {"name": name, **extras}, PROMPT)


def lived(name):
    return {what: count for (who, what), count in Logged.log.items() if who == name}


@virtual_time
async def test_an_episode_is_begun_stepped_and_closed_once():
    pool = local_pool(workers=2)
    assert (await begin(pool, "a", turns=2))[-1]["content"] == "a"
    first = await pool.step("a", "x")
    assert (first["done"], first["metrics"]) == (False, {})
    last = await pool.step("a", "y")
    assert (last["done"], last["reward"], last["metrics"]) == (True, 1.0, {"turns": 2.0})
    assert await pool.close("a") == {}
    assert lived("a") == {"init": 1, "step": 2, "get_metrics": 1, "close": 1}


@virtual_time
async def test_closing_early_gives_the_metrics_so_far_and_only_once():
    pool = local_pool()
    await begin(pool, "a", turns=9)
    await pool.step("a", "x")
    assert await pool.close("a") == {"turns": 1.0}
    assert await pool.close("a") == {}
    assert lived("a")["close"] == 1


@pytest.mark.parametrize("fails", ["init", "step", "get_metrics", "close"])
def test_an_error_reaches_its_own_caller_with_the_traceback_and_closes_the_environment(fails):
    @virtual_time
    async def run():
        pool = local_pool()

        async def episode(name, **extras):
            await begin(pool, name, **extras)
            return await pool.step(name, "x")

        broken, whole = await asyncio.gather(episode("a", fails=fails), episode("b"), return_exceptions=True)
        assert isinstance(broken, LookupError)
        note = "\n".join(broken.__notes__)
        assert "Raised by the environment of a" in note
        assert f"in {fails}" in note
        assert whole["reward"] == 1.0
        assert lived("a")["close"] == lived("b")["close"] == 1
        assert await pool.close("a") == {}

    run()


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1", None, True, [1.0]])
def test_a_reward_must_be_a_finite_number(reward):
    @virtual_time
    async def run():
        pool = local_pool()
        await begin(pool, "a", reward=reward)
        with pytest.raises(ValueError, match=r"the reward of a is .*; it must be a finite number"):
            await pool.step("a", "x")

    run()


@pytest.mark.parametrize("reward", [0, -1.5, np.float32(0.5), np.int64(2)])
def test_any_finite_number_is_a_reward(reward):
    @virtual_time
    async def run():
        pool = local_pool()
        await begin(pool, "a", reward=reward)
        assert (await pool.step("a", "x"))["reward"] == reward

    run()


def counting_pool(workers=2, seconds=0.0, **options):
    """A pool whose workers take their time, and how many messages each has had."""
    messages = Counter()

    def caller(number, worker):
        async def call(method, *args):
            messages[number, method] += 1
            await asyncio.sleep(seconds if method == "run" else 0)
            return getattr(worker, method)(*args)

        return call

    return EnvPool([caller(i, EnvWorker({})) for i in range(workers)], **options), messages


@virtual_time
async def test_calls_of_one_turn_of_the_loop_travel_in_one_message_per_worker():
    pool, messages = counting_pool(workers=2)
    names = [f"e{i}" for i in range(10)]
    await asyncio.gather(*(begin(pool, name) for name in names))
    await asyncio.gather(*(pool.step(name, "x") for name in names))
    assert messages == {(0, "define"): 1, (1, "define"): 1, (0, "run"): 2, (1, "run"): 2}


@virtual_time
async def test_a_worker_that_does_not_answer_is_a_timeout_that_names_the_episode_and_the_key():
    pool, _ = counting_pool(workers=1, seconds=100.0, step_timeout_s=30.0)
    with pytest.raises(TimeoutError, match=r"environments of slow .*within 30 s \(environment\.step_timeout_s\)"):
        await begin(pool, "slow")
    assert asyncio.get_running_loop().time() == pytest.approx(30)


@virtual_time
async def test_a_timeout_raised_by_an_environment_is_its_own_and_not_the_pools():
    class Impatient(Logged):
        def step(self, action):
            raise TimeoutError("the game server is away")

    ENVS["logged"] = Impatient
    pool = local_pool()
    await begin(pool, "a")
    with pytest.raises(TimeoutError, match="the game server is away"):
        await pool.step("a", "x")


@virtual_time
async def test_a_cancelled_callers_episode_is_abandoned_and_closed_while_others_go_on():
    pool, _ = counting_pool(workers=1, seconds=5.0)
    await asyncio.gather(begin(pool, "a", turns=9), begin(pool, "b"))
    cancelled = asyncio.create_task(pool.step("a", "x"))
    kept = asyncio.create_task(pool.step("b", "x"))
    await asyncio.sleep(1)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    pool.abandon("a")
    pool.abandon("a")
    assert (await kept)["done"]
    await asyncio.sleep(10)
    assert lived("a")["close"] == lived("b")["close"] == 1


@virtual_time
async def test_an_unknown_environment_is_refused_with_the_nearest_names():
    with pytest.raises(UserError, match="did you mean 'logged'"):
        await local_pool().init("a", "loged", {}, PROMPT)


@virtual_time
async def test_the_runs_env_config_reaches_every_environment():
    seen = []

    class Configured(BaseTextEnv):
        def step(self, action):
            seen.append(self.env_config)
            return {"observations": [], "reward": 0.0, "done": True, "metadata": {}}

    ENVS["logged"] = Configured
    pool = local_pool({"level": 3})
    await begin(pool, "a")
    await pool.step("a", "x")
    assert seen == [{"level": 3}]


def test_the_base_class_asks_for_a_step():
    with pytest.raises(NotImplementedError, match=r"Mine must define step"):
        type("Mine", (BaseTextEnv,), {})().step("x")

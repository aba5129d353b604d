"""Environments in Ray actors: real processes that wait, fail and hang."""

import asyncio
import os
import time

import pytest

from skyasync.envs import ENVS, BaseTextEnv
from skyasync.envs.episodes import EnvSettings
from skyasync.utils.rpc import MAX_HUNG

pytestmark = pytest.mark.slow

PROMPT = [{"role": "user", "content": "begin"}]


def output(done=True):
    return {"observations": [], "reward": 1.0, "done": done, "metadata": {}}


class Scripted(BaseTextEnv):
    """The action selects its behaviour."""

    def step(self, action):
        if action == "die":
            os._exit(1)
        while action == "hang":
            time.sleep(0.01)
        return output()

    def get_metrics(self):
        return {"pid": float(os.getpid())}


@pytest.fixture
def pool(ray_session, monkeypatch):
    from skyasync.envs.pool import ray_pool

    def make(workers=1, **settings):
        made = ray_pool(EnvSettings({}, **settings), workers)
        pools.append(made)
        return made

    pools = []
    monkeypatch.setitem(ENVS, "living", Scripted)
    yield make
    for made in pools:
        made.pool.close()


async def episode(pool, name, action="go"):
    await pool.init(name, "living", {}, PROMPT)
    return await pool.step(name, action)


async def test_a_thousand_episodes_run_in_all_workers_and_their_errors_are_separate(pool):
    pool = pool(workers=2, step_timeout_s=60.0)
    results = await asyncio.gather(*(episode(pool, f"e{i}") for i in range(1000)))
    assert len({result["metrics"]["pid"] for result in results}) == 2


async def test_a_failed_process_loses_its_episodes_and_is_replaced(pool):
    pool = pool(workers=1)
    first = (await episode(pool, "a"))["metrics"]["pid"]
    failed, _ = await asyncio.gather(
        episode(pool, "b", "die"), pool.init("c", "living", {}, PROMPT), return_exceptions=True
    )
    assert "the process that runs the environment of b is lost" in str(failed)
    with pytest.raises(RuntimeError, match="environment of c is lost"):
        await pool.step("c", "go")
    assert (await episode(pool, "d"))["metrics"]["pid"] != first


async def test_a_process_full_of_hanging_steps_is_replaced_while_its_other_episodes_go_on(pool):
    pool = pool(workers=1, step_timeout_s=0.5)
    await pool.init("kept", "living", {}, PROMPT)
    stuck = [episode(pool, f"stuck{i}", "hang") for i in range(MAX_HUNG)]
    for error in await asyncio.gather(*stuck, return_exceptions=True):
        assert "did not answer within 0.5 s (environment.step_timeout_s)" in str(error)
    old, new = await asyncio.gather(pool.step("kept", "go"), episode(pool, "new"))
    assert pool.pool.replaced == 1
    assert old["metrics"]["pid"] != new["metrics"]["pid"]

"""The pool of environments, in this process and in simulation."""

import asyncio
import math
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest

from skyasync.envs import ENVS, BaseTextEnv
from skyasync.envs.episodes import EnvSettings, Episodes
from skyasync.envs.pool import EnvPool, local_pool
from skyasync.errors import UserError
from skyasync.utils.rpc import MAX_HUNG, LocalTransport
from tests.virtual_time import virtual_time

PROMPT = [{"role": "user", "content": "begin"}]


class Logged(BaseTextEnv):
    """Scripted by its extras: ``fails`` names the method that raises, ``reward`` and ``turns`` are a step's results."""

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
        return {
            "observations": [],
            "reward": self.extras.get("reward", 1.0),
            "done": done,
            "metadata": {},
        }

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


async def cancel_a_step(pool, *, after_s):
    """The caller of a step is cancelled while it waits, and abandons the episode."""
    step = asyncio.create_task(pool.step("a", "x"))
    await asyncio.sleep(after_s)
    step.cancel()
    await asyncio.wait([step])
    pool.abandon("a")


def lived(name):
    return {what: count for (who, what), count in Logged.log.items() if who == name}


@virtual_time
async def test_an_episode_is_started_stepped_and_closed_once():
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

        broken, whole = await asyncio.gather(
            episode("a", fails=fails), episode("b"), return_exceptions=True
        )
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
        with pytest.raises(
            ValueError, match=r"the environment of a: the reward is .*; it must be a finite number"
        ):
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


class SlowWorker(LocalTransport):
    """Takes time, records its messages, and fails or reports hanging calls on request."""

    def __init__(self, number, seconds=0.0):
        super().__init__(Episodes(EnvSettings({})))
        self.number, self.seconds, self.messages, self.killed, self.hung = (
            number,
            seconds,
            Counter(),
            False,
            0,
        )
        self.broken = None

    async def load(self, *args):
        self.messages["load"] += 1
        return await super().load(*args)

    async def exchange(self, calls):
        self.messages["exchange"] += 1
        await asyncio.sleep(self.seconds)
        if self.broken:
            raise self.broken
        answers, _ = await super().exchange(calls)
        return answers, self.hung

    def kill(self):
        self.killed = True


def slow_pool(workers=1, seconds=0.0, **options):
    """A pool, and every worker that it has started."""
    started = []

    def start():
        started.append(SlowWorker(len(started), seconds))
        return started[-1]

    return EnvPool(start, workers, EnvSettings({}, **options)), started


@virtual_time
async def test_calls_of_one_turn_of_the_loop_travel_in_one_message_per_worker():
    pool, workers = slow_pool(workers=2)
    names = [f"e{i}" for i in range(10)]
    await asyncio.gather(*(begin(pool, name) for name in names))
    await asyncio.gather(*(pool.step(name, "x") for name in names))
    assert [worker.messages for worker in workers] == [{"load": 1, "exchange": 2}] * 2


class Plain(BaseTextEnv):
    """An environment with the default methods."""

    def step(self, action):
        self.turns += 1
        done = self.turns == 2
        return {"observations": [], "reward": float(len(action)), "done": done, "metadata": {}}


@virtual_time
async def test_an_environment_whose_beginning_does_nothing_begins_with_its_first_step():
    ENVS["logged"] = Plain
    pool, (worker,) = slow_pool()
    assert await begin(pool, "a") is PROMPT
    assert worker.messages == {"load": 1}
    assert (await pool.step("a", "xx"))["reward"] == 2.0
    assert (await pool.step("a", "y"))["done"]
    assert worker.messages == {"load": 1, "exchange": 2}
    await begin(pool, "b")
    assert await pool.close("b") == {}
    assert not pool.pool.processes[0].keys


class Instant(Logged):
    @classmethod
    def instant(cls, env_config, extras):
        return not extras.get("slow")


@virtual_time
async def test_an_instant_environment_runs_in_the_controller_like_any_other():
    ENVS["logged"] = Instant
    pool, (worker,) = slow_pool()
    await asyncio.gather(
        begin(pool, "a", turns=2), begin(pool, "b", fails="step"), begin(pool, "c")
    )
    assert not (await pool.step("a", "x"))["done"]
    assert (await pool.step("a", "x"))["metrics"] == {"turns": 2.0}
    with pytest.raises(LookupError, match="broken step"):
        await pool.step("b", "x")
    pool.abandon("c")
    await asyncio.sleep(1)
    assert [lived(name)["close"] for name in "abc"] == [1, 1, 1]
    assert not worker.messages
    await begin(pool, "d", slow=True)
    assert worker.messages == {"load": 1, "exchange": 1}


@virtual_time
async def test_an_episode_that_costs_nothing_is_answered_in_its_callers_turn():
    ENVS["logged"] = Instant
    pool, turns = local_pool(), []
    asyncio.get_running_loop().call_soon(turns.append, "another's")
    await begin(pool, "a", turns=2)
    await pool.step("a", "x")
    await pool.close("a")
    assert not turns and lived("a")["close"] == 1


@virtual_time
async def test_an_async_step_continues_after_its_caller_is_cancelled_and_is_closed_afterwards():
    class Waiting(Instant):
        async def step(self, action):
            await asyncio.sleep(1)
            return super().step(action)

    ENVS["logged"] = Waiting
    pool = local_pool()
    await begin(pool, "a")
    await cancel_a_step(pool, after_s=0.5)
    await asyncio.sleep(0.1)
    assert lived("a") == {"init": 1}
    await asyncio.sleep(1)
    assert lived("a")["step"] == lived("a")["close"] == 1


@virtual_time
async def test_one_that_cancels_itself_is_an_error_of_its_own():
    class Cancelled(Instant):
        async def step(self, action):
            raise asyncio.CancelledError

    ENVS["logged"] = Cancelled
    pool = local_pool()
    await begin(pool, "a")
    with pytest.raises(RuntimeError, match="a cancelled itself"):
        await pool.step("a", "x")


@virtual_time
async def test_a_worker_without_a_heartbeat_is_replaced_and_its_episodes_are_lost():
    pool, workers = slow_pool(workers=2, seconds=1.0, step_timeout_s=30.0)
    await asyncio.gather(
        begin(pool, "a", turns=9), begin(pool, "b", turns=9), begin(pool, "c", turns=9)
    )
    workers[0].seconds = 1e9
    failed = await asyncio.gather(pool.step("a", "x"), pool.step("b", "x"), return_exceptions=True)
    assert (
        "the process that runs the environment of a is lost: it sent no heartbeat for 35 s"
        in str(failed[0])
    )
    assert failed[1]["reward"] == 1.0
    with pytest.raises(RuntimeError, match="environment of c is lost"):
        await pool.step("c", "x")
    assert (workers[0].killed, len(workers), pool.pool.replaced) == (True, 3, 1)
    await begin(pool, "d")
    assert (await pool.step("d", "x"))["done"]


@virtual_time
async def test_the_episodes_of_a_failed_worker_fail_at_once_with_the_reason():
    pool, workers = slow_pool()
    await begin(pool, "a")
    workers[0].broken = ConnectionError("the actor failed")
    with pytest.raises(RuntimeError, match="environment of a is lost: the actor failed") as caught:
        await pool.step("a", "x")
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert asyncio.get_running_loop().time() == 0


@virtual_time
async def test_a_worker_with_stuck_calls_gets_no_new_episodes_and_ends_with_its_last_one():
    pool, workers = slow_pool()
    await begin(pool, "old", turns=2)
    workers[0].hung = MAX_HUNG
    await pool.step("old", "x")
    await begin(pool, "new")
    assert [worker.messages["exchange"] for worker in workers] == [2, 1]
    assert not workers[0].killed
    assert (await pool.step("old", "x"))["done"]
    assert workers[0].killed
    assert (await pool.step("new", "x"))["done"]
    assert not workers[1].killed


class Awaiting(Logged):
    """Awaits ``seconds`` in a step, without blocking other episodes."""

    async def init(self, prompt):
        return super().init(prompt)

    async def step(self, action):
        await asyncio.sleep(self.extras.get("seconds", 0.0))
        return super().step(action)

    async def close(self):
        super().close()


@virtual_time
async def test_async_environments_wait_concurrently_and_answer_as_they_finish():
    ENVS["logged"] = Awaiting
    pool, ended = local_pool(), []

    async def episode(name, seconds):
        await begin(pool, name, seconds=seconds)
        await pool.step(name, "x")
        ended.append((name, asyncio.get_running_loop().time()))

    await asyncio.gather(*(episode(f"e{seconds}", seconds) for seconds in (3, 1, 2)))
    assert ended == [("e1", 1.0), ("e2", 2.0), ("e3", 3.0)]
    assert lived("e1") == {"init": 1, "step": 1, "get_metrics": 1, "close": 1}


@virtual_time
async def test_a_step_that_awaits_for_too_long_is_a_timeout_that_names_the_episode_and_the_key():
    ENVS["logged"] = Awaiting
    pool = local_pool(step_timeout_s=30.0)
    await asyncio.gather(begin(pool, "slow", seconds=100.0), begin(pool, "quick"))
    slow, quick = await asyncio.gather(
        pool.step("slow", "x"), pool.step("quick", "x"), return_exceptions=True
    )
    assert isinstance(slow, TimeoutError)
    assert "environment of slow did not answer within 30 s (environment.step_timeout_s)" in str(
        slow
    )
    assert asyncio.get_running_loop().time() == pytest.approx(30)
    assert quick["done"]
    assert lived("slow")["close"] == 1


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
    pool, _ = slow_pool(seconds=5.0)
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
async def test_an_episode_abandoned_in_the_middle_of_a_step_is_closed_by_that_step_and_once():
    ENVS["logged"] = Awaiting
    pool = local_pool()
    await begin(pool, "a", seconds=5.0, turns=9)
    await cancel_a_step(pool, after_s=1)
    await asyncio.sleep(1)
    assert "close" not in lived("a")
    await asyncio.sleep(10)
    assert lived("a")["close"] == 1


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


class Counting(BaseTextEnv):
    """Starts counting with its first step."""

    def step(self, action):
        self.turns += 1
        return {
            "observations": [],
            "reward": float(self.turns),
            "done": self.turns == 2,
            "metadata": {},
        }


class Late(LocalTransport):
    """The message that ends an episode arrives after later messages."""

    async def exchange(self, calls):
        await asyncio.sleep(10.0 if any(call.method == "close" for call in calls) else 0.0)
        return await super().exchange(calls)


@virtual_time
async def test_a_restarted_episode_is_independent_of_the_former_one_whose_end_is_late():
    ENVS["counting"] = Counting
    own = EnvSettings({})
    pool = EnvPool(lambda: Late(Episodes(own), own.step_timeout_s), 1, own)
    await pool.init("a", "counting", {}, PROMPT)
    assert (await pool.step("a", "x"))["reward"] == 1.0
    pool.abandon("a")  # its run is cancelled; workers are restarted, and the environments stay
    await asyncio.sleep(1)
    await pool.init("a", "counting", {}, PROMPT)
    assert (await pool.step("a", "x"))["reward"] == 1.0
    await asyncio.sleep(20)
    assert (await pool.step("a", "x"))["reward"] == 2.0, "only the former one is closed"
    with pytest.raises(KeyError):
        await pool.step("a", "x")

"""An environment worker in its real process: threads, an event loop for async environments, real time.

Environments wait for events that the tests set; if a timeout must pass, it is a short one.
"""

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from functools import partial

import pytest

from skyasync.envs import BaseTextEnv, env_factory
from skyasync.envs.episodes import EnvSettings, Episodes
from skyasync.interop.openrlhf.agent_file import PATH_KEY
from skyasync.rewards.reward_functions import reward_workers
from skyasync.rewards.settings import ENV_KEY, RewardSettings
from skyasync.utils import rpc_server
from skyasync.utils.rpc import Call
from skyasync.utils.rpc_server import RpcServer

PROMPT = [{"role": "user", "content": "begin"}]
PATIENCE_S = 20.0
gates: dict[str, threading.Event] = {}


def output(reward=1.0, done=True):
    return {"observations": [], "reward": reward, "done": done, "metadata": {}}


class Gated(BaseTextEnv):
    """A step waits for the gate that the action names."""

    def step(self, action):
        if action in gates:
            gates[action].wait(PATIENCE_S)
        return output()


class AsyncGated(BaseTextEnv):
    async def init(self, prompt):
        return prompt, {}

    async def step(self, action):
        if action in gates:
            await asyncio.to_thread(gates[action].wait, PATIENCE_S)
        return output()


class Stubborn(AsyncGated):
    """Ignores cancellation."""

    async def step(self, action):
        while not gates["never"].is_set():
            try:
                await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                continue
        return output()


class Own(BaseException):
    pass


KINDS = {"exit": SystemExit, "interrupt": KeyboardInterrupt, "own": Own, "cancel": asyncio.CancelledError,
         "generator": GeneratorExit}  # fmt: skip


class Difficult(BaseTextEnv):
    def step(self, action):
        if action in KINDS:
            raise KINDS[action](3)
        if action == "unpicklable":
            raise LookupError("no", threading.Lock())
        return output(reward=float(action))


class AsyncDifficult(Difficult):
    async def step(self, action):
        return Difficult.step(self, action)


class Caller:
    """Exchanges messages with a worker as an RPC client does, by hand."""

    def __init__(self, worker):
        self.worker, self.answers, self.sent, self.hung = worker, {}, 0, 0

    def calls(self, method, episodes, *args):
        found = [Call(self.sent + i, method, episode, args) for i, episode in enumerate(episodes)]
        self.sent += len(found)
        return found

    async def exchange(self, calls=()):
        answers, self.hung = await self.worker.exchange(calls)
        for answer in answers:
            assert answer.number not in self.answers
            self.answers[answer.number] = answer
        return answers

    async def begin(self, env, *episodes):
        await self.load(env)
        await self.exchange(self.calls("init", episodes, "env", {}, PROMPT))

    async def load(self, env):
        assert await self.worker.load("env", env) is None

    async def until(self, number):
        async with asyncio.timeout(PATIENCE_S):
            while number not in self.answers:
                await self.exchange()
        return self.answers[number]


@asynccontextmanager
async def at_work(config=None, **settings):
    gates.update(open=threading.Event(), never=threading.Event())
    own = EnvSettings(config or {}, **settings)
    worker = RpcServer(partial(Episodes, own), own.step_timeout_s, own.max_threads)
    try:
        yield Caller(worker)
    finally:
        for gate in gates.values():
            gate.set()
        worker.close()


async def test_a_message_of_quick_calls_is_answered_in_one(monkeypatch):
    monkeypatch.setattr(rpc_server, "HOLD_S", PATIENCE_S)  # a busy machine needs more than that
    async with at_work() as caller:
        episodes = [f"e{i}" for i in range(1024)]
        await caller.begin(Gated, *episodes)
        assert len(caller.answers) == 1024
        assert all(answer.result == PROMPT for answer in caller.answers.values())
        await caller.exchange(caller.calls("step", episodes, "go"))
        last = await caller.until(2047)
        assert last.result == {
            "observations": [], "reward": 1.0, "done": True, "metrics": {}, "sampling_params": {},
        }  # fmt: skip


@pytest.mark.parametrize("env", [Gated, AsyncGated])
async def test_a_slow_step_does_not_hold_up_the_answers_to_the_others(env):
    async with at_work() as caller:
        await caller.begin(env, "slow", "a", "b")
        slow, *quick = caller.calls("step", ["slow"], "open") + caller.calls(
            "step", ["a", "b"], "go"
        )
        await caller.exchange([slow, *quick])
        assert [(await caller.until(call.number)).result["done"] for call in quick] == [True, True]
        assert slow.number not in caller.answers
        gates["open"].set()
        assert (await caller.until(slow.number)).result["done"]


@pytest.mark.parametrize("env", [Gated, AsyncGated, Stubborn])
async def test_a_step_that_hangs_is_a_timeout_of_its_episode_alone_and_the_worker_goes_on(
    env, monkeypatch
):
    monkeypatch.setattr("skyasync.utils.rpc_server.HEARTBEAT_S", 0.05)
    async with at_work(step_timeout_s=0.2, max_threads=1) as caller:
        await caller.begin(env, "stuck")
        (call,) = caller.calls("step", ["stuck"], "never")
        await caller.exchange([call])
        error = (await caller.until(call.number)).error
        assert isinstance(error, TimeoutError)
        assert (
            "environment of stuck did not answer within 0.2 s (environment.step_timeout_s)"
            in str(error)
        )
        await caller.exchange()
        assert caller.hung == (
            0 if env is AsyncGated else 1
        )  # a cancelled async step leaves nothing
        await caller.begin(Gated, "next")
        (call,) = caller.calls("step", ["next"], "go")
        await caller.exchange([call])
        assert (await caller.until(call.number)).result["done"]


@pytest.mark.parametrize("env", [Difficult, AsyncDifficult])
@pytest.mark.parametrize("action", KINDS)
async def test_other_raised_errors_than_exceptions_are_reported_at_once_and_leave_no_thread(
    action, env, monkeypatch
):
    monkeypatch.setattr("skyasync.utils.rpc_server.HEARTBEAT_S", 0.05)
    async with at_work(step_timeout_s=PATIENCE_S / 2) as caller:
        await caller.begin(env, "a", "b")
        bad, good = caller.calls("step", ["a"], action) + caller.calls("step", ["b"], "0.5")
        await caller.exchange([bad, good])
        error = (await caller.until(bad.number)).error
        assert not isinstance(error, TimeoutError)
        assert KINDS[action].__name__ in str(error) or "cancelled itself" in str(error)
        assert (await caller.until(good.number)).result["reward"] == 0.5
        await caller.exchange()
        assert caller.hung == 0


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, Own])
async def test_what_a_module_raises_besides_exceptions_when_it_is_loaded_is_told(kind):
    def load():
        raise kind

    error = await RpcServer._error_of_load(load)
    assert kind.__name__ in repr(error)


@pytest.mark.parametrize(
    ("action", "error"), [("exit", "SystemExit"), ("unpicklable", "LookupError"), ("x", "float")]
)
async def test_whatever_is_raised_comes_back_as_an_error_that_travels(action, error):
    import pickle

    async with at_work() as caller:
        await caller.begin(Difficult, "a", "b")
        bad, good = caller.calls("step", ["a"], action) + caller.calls("step", ["b"], "0.5")
        await caller.exchange([bad, good])
        found = pickle.loads(pickle.dumps((await caller.until(bad.number)).error))
        assert error in str(found)
        assert "Raised by the environment of a, in its process" in "\n".join(found.__notes__)
        assert (await caller.until(good.number)).result["reward"] == 0.5


async def test_a_later_exchange_takes_over_from_an_earlier_one():
    async with at_work() as caller:
        await caller.begin(Gated, "a", "b")
        first = asyncio.create_task(caller.exchange(caller.calls("step", ["a"], "open")))
        await asyncio.sleep(0)
        answers = await caller.exchange(caller.calls("step", ["b"], "go"))
        assert await first == []
        assert len(answers) == 1


async def test_silence_ends_with_a_heartbeat(monkeypatch):
    monkeypatch.setattr("skyasync.utils.rpc_server.HEARTBEAT_S", 0.05)
    async with at_work() as caller:
        await caller.begin(Gated, "a")
        assert await caller.exchange(caller.calls("step", ["a"], "open")) == []


SLOW = "import time\ntime.sleep(1.0)\n"
SLOW_FILES = {
    "reward": SLOW + "def reward(response):\n    return 1.0\n",
    "openrlhf": "from tests.envs.test_worker import once\nonce(1.7)\n"
    "async def step(state, action, label, **kwargs):\n    return 1.0, state + action, True\n",
}
slept: list[float] = []


def once(seconds):
    """As a slow import: the second time it is fast."""
    if not slept:
        slept.append(seconds)
        time.sleep(seconds)


@pytest.mark.parametrize("env_class", SLOW_FILES)
async def test_a_users_file_is_loaded_before_the_first_episode_outside_of_the_limit_of_a_step(
    env_class, tmp_path
):
    slept.clear()
    file = tmp_path / "mine.py"
    file.write_text(SLOW_FILES[env_class])
    config = {ENV_KEY: RewardSettings((f"{file}:reward",)), PATH_KEY: str(file)}
    async with at_work(config, step_timeout_s=0.5) as caller:
        await caller.load(env_factory(env_class))
        start = PROMPT if env_class == "reward" else "begin"
        await caller.exchange(caller.calls("init", [f"e{i}" for i in range(16)], "env", {}, start))
        assert [answer.error for answer in caller.answers.values()] == [None] * 16
        for call in (calls := caller.calls("step", [f"e{i}" for i in range(16)], "go")):
            await caller.exchange([call])
        results = [(await caller.until(call.number)).result for call in calls]
        assert [result and result["reward"] for result in results] == [1.0] * 16


@pytest.mark.slow
async def test_responses_wait_for_reward_workers_longer_than_a_step_may_take():
    """A third of the calls hang and a third exit: each of those has the reward 0, and no step fails."""
    rewards = RewardSettings(funcs=("tests.rewards.functions:hangs_or_exits",), timeout_s=0.4)
    actions = ["hang", "leave", "well"] * 20
    async with at_work({ENV_KEY: rewards}, step_timeout_s=0.5) as caller:
        await caller.load(env_factory("reward"))
        episodes = [f"e{number}" for number in range(len(actions))]
        prompt = [{"role": "user", "content": "question"}]
        await caller.exchange(caller.calls("init", episodes, "env", {}, prompt))
        calls = []
        for episode, action in zip(episodes, actions, strict=True):
            calls += caller.calls("step", [episode], action)
        await caller.exchange(calls)
        answers = [await caller.until(call.number) for call in calls]
        reward_workers().close()
    assert [answer.error for answer in answers] == [None] * len(actions)
    assert [answer.result["reward"] for answer in answers] == [0.0, 0.0, 1.0] * 20
    unrewarded = [answer.result["metrics"]["hangs_or_exits/no_reward"] for answer in answers]
    assert unrewarded == [1.0, 1.0, 0.0] * 20

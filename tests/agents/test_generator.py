"""Agent programs as rollouts: the real endpoint, OpenAI's client and the real process code, with a scripted engine."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from skyasync.agents.generator import AgentGenerator
from skyasync.agents.programs import (
    AgentError,
    AgentPool,
    AgentProcess,
    load_program,
    ray_processes,
)
from skyasync.agents.server import Endpoint
from skyasync.algorithms.advantages import ADVANTAGE_ESTIMATORS, compute_advantages
from skyasync.config.schema import AlgorithmConfig
from skyasync.errors import UserError
from skyasync.inference.client import InferenceClient
from skyasync.models.batch import RolloutBatch
from skyasync.rollout import episode_limits as episode_rules
from skyasync.rollout.collate import collate
from skyasync.rollout.episode_limits import EpisodeLimits
from skyasync.rollout.generator_api import run_generator
from skyasync.rollout.types import Group
from skyasync.utils.rpc import LocalTransport
from tests.agents import agent_programs
from tests.rollout.episodes import ScriptedEngine, prompt, requests, tokenizer

pytestmark = pytest.mark.slow  # seconds to wait for hanging programs

PROGRAMS = "tests.agents.agent_programs"
FAILURES = {
    "raises": "LookupError: broken",
    "exits": "SystemExit: 3",
    "nan": "returned nan as its reward",
    "none": "returned None as its reward",
    "text": "returned '1.0' as its reward",
    "bool": "returned True as its reward",
    "key": "it takes reward and metrics",
    "metric": "returned inf as its metric x",
    "no call": "without a call of the model",
    "hangs": r"did not end within 3 s \(generator.episode_timeout_s\)",
}


class Engine(ScriptedEngine):
    """Aborts nothing: it answers at once."""

    async def abort(self, ids: Any) -> None: ...


def local(program: str, **config: Any) -> LocalTransport:
    """An ``AgentProcess`` in this process."""
    return LocalTransport(AgentProcess(f"{PROGRAMS}:{program}", config))


@asynccontextmanager
async def generator(
    process: Callable[[], Any],
    engine: Any = None,
    rules: EpisodeLimits | None = None,
    processes: int = 1,
) -> AsyncIterator[AgentGenerator]:
    endpoint = Endpoint(InferenceClient([engine or Engine(lambda _: "yes")]), tokenizer(), 256)
    pool = AgentPool(process, processes)
    found = AgentGenerator(endpoint, pool, tokenizer(), rules or EpisodeLimits())
    try:
        yield found
    finally:
        await found.close()
        assert endpoint.port == 0


async def played(found: AgentGenerator, rows: list[Any], samples: int = 1) -> list[Group]:
    return (await run_generator(found, requests(rows, samples), 0))[0]


async def test_each_sample_is_an_episode_of_its_own_with_the_programs_score() -> None:
    engine = Engine(lambda tokens: "four" if "question 1" in tokenizer().decode(tokens) else "no")
    async with generator(lambda: local("length"), engine) as found:
        groups = await played(found, [prompt(0), prompt(1)], samples=3)
    assert [g.rewards for g in groups] == [[2.0] * 3, [4.0] * 3]
    only = groups[1].trajectories[2]
    assert [s.kind for s in only.segments] == ["prompt", "action"]
    assert set(only.actions[0].logprobs) == {-0.25}
    assert set(only.versions) == {4}
    assert only.metrics == {"agent_calls": 1.0, "agent_sequences": 1.0}
    assert len({r.request_id for r in engine.requests}) == 6


async def test_programs_without_async_run_in_threads_and_get_what_they_have_parameters_for() -> (
    None
):
    async with generator(lambda: local("in_a_thread", reward=0.25)) as found:
        (group,) = await played(found, [prompt(0)], samples=8)
    assert group.rewards == [0.25] * 8
    for trajectory in group.trajectories:
        assert [s.kind for s in trajectory.segments] == [
            "prompt",
            "action",
            "observation",
            "action",
        ]
        assert [s.reward for s in trajectory.actions] == [0.0, 0.25]
        assert trajectory.metrics == {"agent_calls": 2.0, "agent_sequences": 1.0, "eval": 0.0}


async def test_a_sub_agent_is_a_branch_that_shares_the_score() -> None:
    async with generator(lambda: local("two_agents")) as found:
        (group,) = await played(found, [prompt(0)], samples=2)
    assert group.rewards == [1.0, 1.0]
    trajectory = group.trajectories[0]
    assert len(trajectory.branches) == 1
    assert "Help." in tokenizer().decode(trajectory.branches[0][0].tokens)
    assert [s.reward for s in trajectory.actions] == [0.0, 1.0]
    assert trajectory.metrics["agent_sequences"] == 2.0


async def by_call(discount: float, *rewards: list[float | None]) -> RolloutBatch:
    """A batch of episodes that are rewarded call by call, a group of one trajectory each."""
    rows = [prompt(number, rewards=one) for number, one in enumerate(rewards)]
    rules = replace(EpisodeLimits(), turn_discount=discount)
    async with generator(lambda: local("by_call"), rules=rules) as found:
        return collate(await played(found, rows))


def last_tokens(mask: Tensor) -> Tensor:
    """The positions of the last tokens of all calls."""
    return mask & ~F.pad(mask[:, 1:], (0, 1))


async def test_each_calls_reward_is_on_its_last_token_and_worth_less_by_the_calls_before_it() -> (
    None
):
    batch = await by_call(0.5, [1.0, None, -2.0, 4.0])
    assert batch.trajectory_ids is not None and batch.trajectory_ids.tolist() == [0, 0]
    ends = last_tokens(batch.loss_mask)
    assert batch.rewards[0][ends[0]].tolist() == [1.0, 0.0, -2.0 * 0.25]
    assert batch.rewards[1][ends[1]].tolist() == [4.0 * 0.125]
    assert not batch.rewards[~ends].any()
    plain = await by_call(1.0, [1.0, None, -2.0, 4.0])
    assert plain.rewards[ends].tolist() == [1.0, 0.0, -2.0, 4.0]


class MixtureEngine(Engine):
    """Reports the experts of each token but the last, from the first one of the prompt on."""

    async def generate(self, requests: Any) -> Any:
        async for answers in super().generate(requests):
            for answer, request in zip(answers, requests, strict=True):
                tokens = len(request.prompt_token_ids) + len(answer.token_ids) - 1
                answer.experts = np.zeros((tokens, 1, 1), np.uint8)
            yield answers


async def test_a_mixtures_calls_keep_their_rewards() -> None:
    """Their actions are copied, without the experts of the tokens before."""
    rules = replace(EpisodeLimits(), turn_discount=1.0)
    engine = MixtureEngine(lambda _: "yes")
    async with generator(lambda: local("by_call"), engine, rules=rules) as found:
        (group,) = await played(found, [prompt(0, rewards=[1.0, None, -2.0, 4.0])])
    assert [action.reward for action in group.trajectories[0].actions] == [1.0, 0.0, -2.0, 4.0]


async def test_which_estimators_see_who_earned_what() -> None:
    """A token is credited with the rewards that follow it, or every token of an episode with all of them."""
    batch = await by_call(1.0, [1.0, 0.0, -2.0, 0.5], [0.0, 0.0, 3.0, 0.0])
    batch.group_ids = torch.zeros_like(batch.group_ids)  # one group of two
    ends, values = last_tokens(batch.loss_mask), torch.zeros(batch.tokens.shape)
    see = set()
    for name in ADVANTAGE_ESTIMATORS.builtins():
        cfg = AlgorithmConfig(advantage_estimator=name)
        advantages, returns = compute_advantages(
            cfg, batch.rewards, batch.loss_mask, batch.group_ids, values, batch.trajectory_ids
        )
        if len(set(advantages[:2][ends[:2]].tolist())) > 1:  # of the first episode's four calls
            see.add(name)
            assert returns[:2][ends[:2]].tolist() == pytest.approx([-0.5, -1.5, -1.5, 0.5])
    assert see == {"reinforce++", "gae"}


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_program_that_fails_ends_the_run_naming_the_episode(failure: str) -> None:
    rules = EpisodeLimits(timeout_s=3.0 if failure == "hangs" else 0.0)
    async with generator(lambda: local("length"), rules=rules) as found:
        with pytest.raises(AgentError, match=rf"(?s)e0-i1-r0.*{FAILURES[failure]}"):
            await played(found, [prompt(0), prompt(1, fails=failure)])


@pytest.mark.matrix
@pytest.mark.parametrize("on_error", ["mask", pytest.param("keep", marks=pytest.mark.matrix)])
async def test_given_up_episodes_are_counted_and_the_others_go_on(
    on_error: str, caplog: Any
) -> None:
    rows = [prompt(row, fails=failure) for row, failure in enumerate([*FAILURES, ""])]
    rules = EpisodeLimits(timeout_s=5.0, on_error=on_error, give_up_reward=-1.0)
    episode_rules._warned.clear()
    with caplog.at_level(logging.WARNING):
        async with generator(lambda: local("length"), rules=rules) as found:
            groups = await played(found, rows)
    *failed, right = [g.trajectories[0] for g in groups]
    assert (right.reward, right.metrics["given_up"]) == (3.0, 0.0)
    for trajectory, failure in zip(failed, FAILURES, strict=True):
        assert trajectory.metrics["given_up"] == 1.0
        assert bool(trajectory.actions) == (on_error == "keep" and failure != "no call")
        assert trajectory.reward == (0.0 if failure == "no call" else -1.0)
    assert "is given up" in caplog.text


async def test_a_reward_that_is_no_number_stays_with_its_episode_where_its_step_is_to_be_left_out() -> (
    None
):
    rules = EpisodeLimits(on_nonfinite="skip")
    async with generator(lambda: local("length"), rules=rules) as found:
        bad, good = await played(found, [prompt(0, fails="nan"), prompt(1)])
    assert math.isnan(bad.rewards[0]) and bad.trajectories[0].actions and good.rewards == [3.0]


@pytest.mark.matrix
async def test_a_hanging_thread_is_abandoned_and_its_key_is_invalid() -> None:
    engine = Engine(lambda _: "yes")
    rules = EpisodeLimits(timeout_s=3.0, on_error="mask")
    agent_programs.released.clear()
    agent_programs.refused.clear()
    async with generator(lambda: local("in_a_thread"), engine, rules) as found:
        groups = await played(found, [prompt(0, fails="hangs"), prompt(1)])
        assert [g.trajectories[0].metrics["given_up"] for g in groups] == [1.0, 0.0]
        agent_programs.released.set()  # its second call arrives now
        assert await asyncio.to_thread(agent_programs.refused.wait, 20)
        assert [r.request_id for r in engine.requests if "i0" in r.request_id] == ["e0-i0-r0-c0"]


async def test_an_engines_failure_ends_the_run_as_it_was_whatever_the_program_does() -> None:
    error = RuntimeError("out of memory")
    async with generator(
        lambda: local("length"), Engine(lambda _: error), EpisodeLimits(on_error="keep")
    ) as found:
        with pytest.raises(RuntimeError, match="out of memory") as caught:
            await played(found, [prompt(0)])
    assert caught.value is error


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (f"{PROGRAMS}:lenght", "did you mean 'length'"),
        (f"{PROGRAMS}:no_program", r"must be a function \(data, base_url, api_key\)"),
        (f"{PROGRAMS}:ASYNC_SLEEP_S", "must be a function"),
        ("tests.no_such_module:run", "No module named"),
    ],
)
def test_what_is_no_program_is_refused_by_name(program: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        load_program(program)


async def test_a_program_that_cannot_be_loaded_ends_the_run_also_where_errors_are_given_up() -> (
    None
):
    async with generator(lambda: local("lenght"), rules=EpisodeLimits(on_error="mask")) as found:
        with pytest.raises(UserError, match="did you mean 'length'"):
            await played(found, [prompt(0)])


async def test_cancellation_ends_programs_and_sessions() -> None:
    engine = Engine(lambda _: "yes")
    host = local("length")
    async with generator(lambda: host, engine) as found:
        task = asyncio.create_task(played(found, [prompt(0, fails="hangs")]))
        async with asyncio.timeout(20):
            while not engine.requests:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while host.service._playing:  # type: ignore[attr-defined]  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not found._endpoint._sessions


@pytest.mark.matrix
@pytest.mark.slow
async def test_processes_that_die_are_replaced(ray_session: None, tmp_path: Path) -> None:
    rules = EpisodeLimits(on_error="mask")
    async with generator(
        ray_processes(f"{PROGRAMS}:length", {}, [], "127.0.0.1"), rules=rules
    ) as found:
        mark = str(tmp_path / "died")
        groups = await played(
            found, [prompt(0, fails="crashes once", mark=mark), prompt(1), prompt(2)]
        )
        assert [g.rewards for g in groups] == [[3.0], [3.0], [3.0]]
        groups = await played(found, [prompt(3, fails="crashes")])
        assert groups[0].trajectories[0].metrics["given_up"] == 1.0


def test_a_process_of_its_own_forgets_what_looks_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "SEARCH_API_KEY", "db_password"):
        monkeypatch.setenv(name, "x")
    AgentProcess(f"{PROGRAMS}:length", {}, ["SEARCH_API_KEY"])
    seen = {
        name
        for name in ("WANDB_API_KEY", "HF_TOKEN", "SEARCH_API_KEY", "db_password", "PATH")
        if name in os.environ
    }
    assert seen == {"SEARCH_API_KEY", "PATH"}

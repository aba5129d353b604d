"""Sessions of programs outside of the run: a real separate process, and all kinds of requests."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from skyasync.agents.external_sessions import FILE, SessionBroker
from skyasync.agents.generator import AgentGenerator
from skyasync.agents.server import Endpoint
from skyasync.config.load import load_config
from skyasync.errors import UserError
from skyasync.inference.client import InferenceClient
from skyasync.rollout.episode_limits import EpisodeLimits
from skyasync.rollout.generator_api import run_generator
from tests.agents.test_generator import Engine
from tests.rollout.episodes import prompt, requests, tokenizer

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def online(
    folder: Path, timeout_s: float = 30.0, on_error: str = "mask"
) -> AsyncIterator[SimpleNamespace]:
    """A generator whose episodes are played from outside, and a way to post to it."""
    broker = SessionBroker(folder)
    endpoint = Endpoint(InferenceClient([Engine(lambda _: "yes")]), tokenizer(), 256, broker=broker)
    rules = EpisodeLimits(timeout_s=timeout_s, on_error=on_error, give_up_reward=-1.0)
    generator = AgentGenerator(endpoint, broker, tokenizer(), rules)
    await endpoint.start()
    async with aiohttp.ClientSession() as http:

        async def post(path: str, key: str, **body: Any) -> tuple[int, Any]:
            url = endpoint.base_url.removesuffix("/v1") + path
            async with http.post(
                url, json=body, headers={"Authorization": f"Bearer {key}"}
            ) as answer:
                return answer.status, await answer.json()

        def play(*rows: int, samples: int = 1) -> asyncio.Task[Any]:
            asked = [prompt(row, answer=str(row)) for row in rows]
            return asyncio.ensure_future(run_generator(generator, requests(asked, samples), 0))

        try:
            yield SimpleNamespace(post=post, play=play, broker=broker, endpoint=endpoint)
        finally:
            await generator.close()
    assert not (folder / FILE).exists() and not endpoint._sessions


async def opened(found: Any, **body: Any) -> Any:
    status, session = await found.post("/v1/sessions", found.broker.key, **body)
    assert status == 200, session
    return session


async def test_a_row_may_have_what_json_lacks(tmp_path: Path) -> None:
    async with online(tmp_path) as found:
        playing = asyncio.ensure_future(
            found.broker.play(
                "e0-i0-r0", {"day": date(2024, 1, 1)}, "http://x", "k", is_eval=False, timeout_s=9.0
            )
        )
        assert (await opened(found))["data"] == {"day": "2024-01-01"}
        playing.cancel()


async def test_a_process_of_its_own_plays_and_scores_what_the_plan_asks_for(tmp_path: Path) -> None:
    """The example's program, which knows only the run's folder."""
    async with online(tmp_path) as found:
        file = tmp_path / FILE
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        player = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "examples.online.player", str(tmp_path),
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        groups, _ = await found.play(0, 1, samples=3)
        more, _ = await found.play(2)
    told = (await asyncio.wait_for(player.communicate(), 20))[1]
    assert player.returncode == 0, told.decode()
    assert [g.rewards for g in (*groups, *more)] == [[0.0] * 3, [0.0] * 3, [0.0]]
    for trajectory in groups[0].trajectories:
        assert [s.kind for s in trajectory.segments] == ["prompt", "action"]
        assert trajectory.metrics == {"agent_calls": 1.0, "agent_sequences": 1.0, "given_up": 0.0}


async def test_a_session_is_scored_as_a_whole_or_answer_by_answer(tmp_path: Path) -> None:
    async with online(tmp_path) as found:
        playing = found.play(0, 1)
        first, second = [await opened(found) for _ in range(2)]
        assert first["data"]["answer"] == "0" and first["data"]["prompt"] and not first["is_eval"]
        assert first["timeout_s"] == 30.0 and first["base_url"] == found.endpoint.base_url
        answers = []
        for session in (first, second, second):
            _, answer = await found.post("/v1/chat/completions", session["api_key"], **HELLO)
            answers.append(answer["id"])
        status, said = await found.post(
            "/v1/sessions/end", first["api_key"], reward=0.5, metrics={"moves": 3}
        )
        assert (status, said["calls"]) == (200, 1)
        await found.post("/v1/sessions/score", second["api_key"], id=answers[1], reward=1)
        await found.post("/v1/sessions/end", second["api_key"], rewards={answers[2]: 2.0})
        groups, _ = await playing
        for session in (first, second):
            for path in ("/v1/chat/completions", "/v1/sessions/end"):
                assert (await found.post(path, session["api_key"], **HELLO))[0] == 401, (
                    "its key has ended with it"
                )
    assert [g.rewards for g in groups] == [[0.5], [3.0]]
    assert groups[0].trajectories[0].metrics["moves"] == 3.0


async def test_areals_names_for_sessions_are_understood(tmp_path: Path) -> None:
    async with online(tmp_path) as found:
        playing = found.play(0)
        _, session = await found.post("/rl/start_session", found.broker.key, task_id="task-0")
        _, answer = await found.post("/v1/chat/completions", session["api_key"], **HELLO)
        assert (await found.post("/rl/set_reward", session["api_key"], reward=0.25))[0] == 200
        assert (await found.post("/rl/end_session", session["api_key"]))[0] == 200
        groups, _ = await playing
    assert groups[0].rewards == [0.25] and session["session_id"] == "e0-i0-r0" and answer["id"]


async def test_what_is_wrong_in_a_request_is_refused_and_the_session_goes_on(
    tmp_path: Path,
) -> None:
    async with online(tmp_path) as found:
        playing = found.play(0)
        session = await opened(found)
        key = session["api_key"]
        for path, who, body, status, problem in [
            ("/v1/sessions", key, {}, 401, "the run's key"),
            ("/v1/sessions", "", {}, 401, "the run's key"),
            ("/v1/sessions", "ä", {}, 401, "the run's key"),
            ("/v1/chat/completions", found.broker.key, HELLO, 401, "no running episode"),
            ("/v1/sessions/end", found.broker.key, {"reward": 1}, 401, "no running episode"),
            ("/v1/sessions", found.broker.key, {"wait_s": 0.01}, 503, "asks for no trajectory"),
            ("/v1/sessions", found.broker.key, {"wait_s": -1}, 400, "wait_s"),
            ("/v1/sessions", found.broker.key, {"task": 3}, 400, "task"),
            ("/v1/sessions", found.broker.key, {"tusk": "x"}, 400, "unknown field tusk"),
            (
                "/rl/start_session",
                found.broker.key,
                {"task_id": "x", "group_size": 4},
                400,
                "alone",
            ),
            ("/v1/sessions/end", key, {"reward": 1}, 400, "no call of the model"),
            ("/v1/sessions/end", key, {}, 400, "has no reward"),
            ("/v1/sessions/end", key, {"reward": "1"}, 400, "finite number"),
            ("/v1/sessions/end", key, {"reward": 1, "metrics": {"x": "y"}}, 400, "metric x"),
            (
                "/v1/sessions/end",
                key,
                {"rewards": {"chatcmpl-e9-i9-r9-c0": 1.0}},
                400,
                "id of none",
            ),
            ("/v1/sessions/end", key, {"reward": 1, "rewards": {"a": 1}}, 400, "both"),
            ("/v1/sessions/score", key, {"reward": float("nan")}, 400, "finite number"),
            ("/v1/sessions/score", key, {"reward": 1.0, "id": "x"}, 400, "id of none"),
        ]:
            got, said = await found.post(path, who, **body)
            assert got == status, (path, body, said)
            assert problem in said["error"]["message"]
        await found.post("/v1/chat/completions", key, **HELLO)
        assert (await found.post("/v1/sessions/end", key, reward=1.0))[0] == 200
        groups, _ = await playing
    assert groups[0].rewards == [1.0]


async def test_sessions_of_one_task_are_one_group(tmp_path: Path) -> None:
    async with online(tmp_path) as found:
        playing = found.play(0, 1, samples=2)
        names = [(await opened(found, task=task))["id"] for task in ("a", "b", "a", "b")]
        assert names == ["e0-i0-r0", "e0-i1-r0", "e0-i0-r1", "e0-i1-r1"]
        waiting = asyncio.ensure_future(found.post("/v1/sessions", found.broker.key, task="a"))
        await asyncio.sleep(0)
        again = found.play(2, samples=2)
        assert (await waiting)[1]["id"] == "e0-i2-r0", "a full group's task begins another"
        plain = await found.post("/v1/sessions", found.broker.key, wait_s=0.01)
        assert plain[0] == 503, "the group is kept for its task"
        for task in (playing, again):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert not found.broker._free and not found.broker._playing and not found.broker._tasks
        assert not found.broker._groups


@pytest.mark.parametrize("on_error", ["mask", "keep"])
async def test_sessions_that_never_end_or_never_start_fail(tmp_path: Path, on_error: str) -> None:
    async with online(tmp_path, timeout_s=0.3, on_error=on_error) as found:
        playing = found.play(0, 1, samples=2)
        quiet = await opened(
            found, task="a"
        )  # ... and no client opens the second session of this task
        await found.post("/v1/chat/completions", quiet["api_key"], **HELLO)
        failing = await opened(found, task="b")
        await found.post("/v1/chat/completions", failing["api_key"], **HELLO)
        await found.post("/v1/sessions/end", failing["api_key"], error="the browser has crashed")
        good = await opened(found, task="b")
        await found.post("/v1/chat/completions", good["api_key"], **HELLO)
        await found.post("/v1/sessions/end", good["api_key"], reward=1.0)
        groups, _ = await asyncio.wait_for(playing, 20)
        assert (await found.post("/v1/chat/completions", quiet["api_key"], **HELLO))[0] == 401
    given_up = [t.metrics["given_up"] for g in groups for t in g.trajectories]
    assert given_up == [1.0, 1.0, 1.0, 0.0]
    trained = [bool(t.actions) for g in groups for t in g.trajectories]
    assert trained == [on_error == "keep", False, on_error == "keep", True]
    assert groups[1].trajectories[1].reward == 1.0


async def test_who_stops_waiting_for_a_session_takes_no_place(tmp_path: Path) -> None:
    async with online(tmp_path) as found:
        impatient = asyncio.ensure_future(found.post("/v1/sessions", found.broker.key))
        await asyncio.sleep(0.05)
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        await asyncio.sleep(0.05)
        playing = found.play(0)
        assert (await opened(found))["id"] == "e0-i0-r0"
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)


async def test_the_key_may_be_given_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYASYNC_SESSIONS_KEY", "mine")
    SessionBroker(None)
    async with online(tmp_path) as found:
        assert (
            json.loads((tmp_path / FILE).read_text())["sessions_key"] == found.broker.key == "mine"
        )


def test_without_a_folder_for_the_key_it_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKYASYNC_SESSIONS_KEY", raising=False)
    with pytest.raises(UserError, match="set SKYASYNC_SESSIONS_KEY"):
        SessionBroker(None)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["environment.on_error=mask"], "needs generator.episode_timeout_s"),
        (["generator.episode_timeout_s=9"], "needs environment.on_error=mask or keep"),
        (
            [
                "generator.episode_timeout_s=9",
                "environment.on_error=mask",
                "generator.tool_parser=hermees",
            ],
            "'hermes'",
        ),
        (
            [
                "generator.episode_timeout_s=9",
                "environment.on_error=mask",
                "generator.reasoning_parser=thnk",
            ],
            "'think'",
        ),
    ],
)
def test_settings_without_which_a_run_could_wait_for_ever_are_refused(
    settings: list[str], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        load_config(["trainer.policy.model.path=x", "generator.agent_program=online", "data.train_data=[x.jsonl]",
                     *settings])  # fmt: skip

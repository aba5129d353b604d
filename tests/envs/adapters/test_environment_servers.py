"""Environments on OpenEnv's and NeMo Gym's servers, with fake servers that answer as openenv 0.10 and nemo-gym 0.7 do.

The answers were recorded from openenv's ``grid_world_env`` and ``echo_env``, and nemo-gym's ``mcqa`` and ``blackjack``.
"""

import asyncio
import json
import socket
import threading
from contextlib import contextmanager

import pytest
from aiohttp import web

from skyasync import load_config
from skyasync.data.datasets import as_prompt
from skyasync.envs import make
from skyasync.envs.adapters import openenv, served
from skyasync.envs.base import InvalidEnvOutputError
from skyasync.envs.pool import local_pool
from skyasync.errors import TransientError, UserError
from skyasync.preflight.parts import check_environment
from skyasync.utils.rpc import RetryPolicy

MOVES = {
    "$defs": {"MoveAction": {"enum": ["UP", "DOWN", "LEFT", "RIGHT"], "type": "string"}},
    "properties": {"metadata": {"type": "object"}, "action": {"$ref": "#/$defs/MoveAction"}},
    "required": ["action"],
}
CALLS = {
    "properties": {"type": {"const": "call_tool"}, "tool_name": {}, "arguments": {}},
    "required": ["tool_name"],
}
TOOL = {
    "name": "echo_message",
    "description": "Echo.",
    "input_schema": {"properties": {"message": {}}},
}
REFUSED = {
    "message": "Invalid message",
    "code": "VALIDATION_ERROR",
    "errors": [{"loc": ["action"], "msg": "Input should be 'UP', 'DOWN', 'LEFT' or 'RIGHT'"}],
}


class Hub:
    """A server in a thread. ``answers`` are its next responses; ``heard`` are the requests."""

    def __init__(self, schema=None, paths=("/seed_session", "/verify")):
        self.schema, self.paths = schema or MOVES, paths
        self.answers, self.heard, self.cookies = [], [], []
        self.sessions, self.most_sessions = 0, 1

    def app(self):
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/schema", self._described)
        app.router.add_get("/openapi.json", self._described)
        app.router.add_get("/ws", self._socket)
        app.router.add_post("/{path}", self._post)
        return app

    async def _described(self, request):
        return web.json_response({"action": self.schema, "paths": dict.fromkeys(self.paths)})

    async def _post(self, request):
        path, body = request.match_info["path"], await request.json()
        self.heard.append((path, body))
        self.cookies.append(request.cookies.get("session"))
        answer = self.answers.pop(0) if self.answers else {}
        if isinstance(answer, float):
            await asyncio.sleep(answer)
        if isinstance(answer, int):
            return web.Response(status=answer, text="no")
        response = web.Response(text=answer if isinstance(answer, str) else json.dumps(answer))
        response.set_cookie("session", "s1")
        return response

    async def _socket(self, request):
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        if self.sessions == self.most_sessions:
            await ws.send_json(
                {"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}}
            )
            await ws.close()
            return ws
        self.sessions += 1
        async for message in ws:
            self.heard.append(json.loads(message.data))
            answer = self.answers.pop(0) if self.answers else self._observation(self.heard[-1])
            if answer is None:
                break
            await ws.send_str(answer if isinstance(answer, str) else json.dumps(answer))
        self.sessions -= 1
        await ws.close()
        return ws

    def _observation(self, message):
        data = message["data"]
        if data.get("action") == "x":
            return {"type": "error", "data": REFUSED}
        if data.get("type") == "list_tools":
            return observed({"metadata": {}, "tools": [TOOL]}, None)
        if "tool_name" in data:
            result = {"content": [{"type": "text", "text": "hi"}], "data": "hi", "is_error": False}
            return observed(
                {"metadata": {}, "tool_name": "echo_message", "result": result, "error": None}, None
            )
        return observed({"metadata": {}, "x": 0, "y": 1, "message": "Keep going..."}, -0.1)


def observed(observation, reward, *, done=False, **more):
    return {
        "type": "observation",
        "data": {"observation": observation, "reward": reward, "done": done, **more},
    }


@contextmanager
def serving(hub):
    """The address of its server."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        runner = web.AppRunner(hub.app(), shutdown_timeout=0.1)

        async def start():
            await runner.setup()
            await web.SockSite(runner, listener).start()
            ready.set()

        def run():
            loop.run_until_complete(start())
            loop.run_forever()
            loop.run_until_complete(runner.cleanup())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert ready.wait(10)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)


def episode(name, *actions, prompt="Play.", **extras):
    """The first observation, the steps and the metrics of an episode."""

    async def play():
        env = make(name, extras=extras)
        try:
            opening, _ = await env.init([{"role": "user", "content": prompt}])
            return opening, [await env.step(action) for action in actions], env.get_metrics()
        finally:
            await env.close()

    return asyncio.run(play())


# ---------------------------------------------------------------- OpenEnv


def test_openenv_is_one_session_of_reset_and_steps():
    hub = Hub()
    with serving(hub) as url:
        opening, steps, metrics = episode(
            f"openenv:{url}", "go right", "down!", seed=3, reset={"size": 4}, max_steps=2
        )
    assert opening == [{"role": "user", "content": "Play.\nx: 0\ny: 1\nmessage: Keep going..."}]
    assert hub.heard == [
        {"type": "reset", "data": {"size": 4, "seed": 3}},
        {"type": "step", "data": {"action": "RIGHT"}},
        {"type": "step", "data": {"action": "DOWN"}},
    ]
    assert [(step["reward"], step["done"]) for step in steps] == [(-0.1, False), (-0.1, True)]
    assert metrics == {"steps": 2.0, "invalid_actions": 0.0}
    assert hub.sessions == 0


def test_rewards_ends_and_metrics_are_the_servers():
    hub = Hub()
    first = observed({"message": "hello", "metadata": {}}, None)
    last = observed(
        {"message": "", "metadata": {}},
        True,
        done=True,
        metadata={"score": 3, "won": True, "why": "text"},
    )
    hub.answers = [first, last]
    with serving(hub) as url:
        _, (step,), metrics = episode(f"openenv:{url}", "UP")
    assert (step["observations"], step["reward"], step["done"]) == ([], 1.0, True)
    assert metrics == {"score": 3.0, "won": 1.0, "invalid_actions": 0.0, "steps": 1.0}


def test_an_action_that_the_schema_refuses_is_shown_to_the_model():
    hub = Hub({"properties": {"action": {"type": "string"}}, "required": ["action"]})
    with serving(hub) as url:
        _, (step,), metrics = episode(f"openenv:{url}", "x")
    assert "Input should be 'UP', 'DOWN'" in step["observations"][0]["content"] and not step["done"]
    assert metrics["invalid_actions"] == 1.0


def test_an_error_of_a_step_is_shown_where_the_row_says_so():
    hub = Hub()
    error = {
        "type": "error",
        "data": {"message": "7 is not a valid Action", "code": "EXECUTION_ERROR"},
    }
    hub.answers = [observed({"message": "go"}, None), error]
    with serving(hub) as url:
        _, steps, metrics = episode(f"openenv:{url}", "UP", "DOWN", execution_errors="show")
        with pytest.raises(
            UserError, match="unknown execution_errors 'shown': did you mean 'show'"
        ):
            episode(f"openenv:{url}", execution_errors="shown")
    assert steps[0]["observations"][0]["content"] == "error: 7 is not a valid Action"
    assert steps[1]["reward"] == -0.1 and metrics["invalid_actions"] == 1.0


@pytest.mark.parametrize(
    ("entry", "text", "value"),
    [
        ({"type": "integer"}, "from 3 to -4.", -4),
        ({"type": "number"}, "2.5", 2.5),
        ({"type": "boolean"}, "True", True),
        ({"type": "string"}, " e4\n", "e4"),
        ({"enum": ["up", "UP LEFT", 3]}, "3 or up", "up"),
        ({"type": "array", "items": {"type": "integer"}}, "5", [5]),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, "7", 7),
    ],
)
def test_text_becomes_the_entry_that_the_action_needs(entry, text, value):
    env = make("openenv:http://127.0.0.1:1")
    type(env).description = {
        "action": {"properties": {"entry": entry, "metadata": {}}, "required": ["entry"]}
    }
    assert env._action(text) == {"entry": value}


def test_an_action_of_several_entries_is_a_json_object():
    env = make("openenv:http://127.0.0.1:1", extras={"action_with": {"game": "catch"}})
    entries = {"game": {}, "x": {"type": "integer"}, "y": {"type": "integer"}}
    type(env).description = {"action": {"properties": entries, "required": ["x", "y"]}}
    assert env._action('I move {"a": 1} then {"x": 1, "y": 2}') == {"game": "catch", "x": 1, "y": 2}
    for text in ("1 2", '{"z": 1}', "{" * 500, "[" * 100_000 + '{"x":'):
        with pytest.raises(openenv.RefusedActionError, match="a JSON object of: x, y"):
            env._action(text)


def test_tools_of_a_server_are_called_by_the_model():
    call = '<tool_call>{"name": "echo_message", "arguments": {"message": "hi"}}</tool_call>'
    hub = Hub(CALLS)
    hub.answers = [observed({"metadata": {"message": "ready"}}, 0.0)]
    with serving(hub) as url:
        opening, steps, metrics = episode(f"openenv:{url}", "hm", call)
    assert [message["role"] for message in opening] == ["system", "user"]
    assert (
        '"name": "echo_message"' in opening[0]["content"]
        and opening[1]["content"] == "Play.\nready"
    )
    assert steps[0]["observations"][0]["content"].startswith("error: call a tool")
    assert steps[1]["observations"] == [{"role": "tool", "name": "echo_message", "content": "hi"}]
    assert metrics["invalid_actions"] == 1.0


def test_a_server_that_is_full_is_waited_for(monkeypatch):
    monkeypatch.setattr(openenv, "PAUSES_S", (0.01,))
    hub = Hub()

    async def two():
        envs = [make(f"openenv:{url}") for _ in "ab"]
        await envs[0].init([])
        waiting = asyncio.ensure_future(envs[1].init([]))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await envs[0].close()
        await waiting
        await envs[1].close()

    with serving(hub) as url:
        asyncio.run(two())


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("{", "answered no JSON"),
        ("[" * 100_000, "answered no JSON"),
        ("3", "which is not an observation"),
        ({"type": "observation", "data": {"observation": 3}}, "which is not an observation"),
        (
            {"type": "observation", "data": {"observation": {}, "reward": "1"}},
            "it must be a number",
        ),
        (
            {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "boom"}},
            "EXECUTION_ERROR: boom",
        ),
    ],
)
def test_garbage_fails_the_episode(answer, problem):
    hub = Hub()
    hub.answers = [observed({"message": "go"}, None), answer]
    with serving(hub) as url, pytest.raises(InvalidEnvOutputError, match=problem):
        episode(f"openenv:{url}", "UP")


def test_a_huge_answer_fails_the_episode(monkeypatch):
    monkeypatch.setattr(served, "MAX_BYTES", 1000)
    monkeypatch.setattr(openenv, "MAX_BYTES", 1000)
    hub = Hub()
    hub.answers = [observed({"message": "go"}, None), observed({"message": "x" * 2000}, None)]
    with serving(hub) as url, pytest.raises(InvalidEnvOutputError, match="answered with more than"):
        episode(f"openenv:{url}", "UP")
    hub.answers = [{"reward": 1.0, "x": "x" * 2000}] * 2
    with serving(hub) as url, pytest.raises(InvalidEnvOutputError, match="answered with more than"):
        episode(f"nemo_gym:{url}", "B")


def test_a_session_that_is_lost_is_not_opened_again():
    hub = Hub()
    hub.answers = [observed({"message": "go"}, None), None]

    async def play():
        env = make(f"openenv:{url}")
        await env.init([])
        for _ in "ab":
            with pytest.raises(ConnectionError, match="has closed the session"):
                await env.step("UP")
        await env.close()

    with serving(hub) as url:
        asyncio.run(play())
    assert [message["type"] for message in hub.heard] == ["reset", "step"]


# ---------------------------------------------------------------- NeMo Gym

ROW = {
    "responses_create_params": {
        "instructions": "Be brief.",
        "input": [{"role": "developer", "content": [{"type": "input_text", "text": "Answer."}]},
                  {"role": "user", "content": "2 + 2?"}],
        "tools": [{"type": "function", "name": "add", "description": "Adds.", "parameters": {}, "strict": True}],
    },
    "expected_answer": "4",
}  # fmt: skip
CALL = '<think>sum</think>Let me see. <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


def test_nemo_gym_seeds_calls_tools_and_verifies_in_one_session():
    hub = Hub()
    result = {
        **ROW,
        "response": {},
        "reward": 0.5,
        "mask_sample": False,
        "length": 3,
        "reward_components": {"f": 1},
    }
    hub.answers = [{}, "4", result]
    with serving(hub) as url:
        opening, steps, metrics = episode(f"nemo_gym:{url}", CALL, "It is 4.", **ROW)
    assert '"name": "add"' in opening[0]["content"]
    assert steps[0]["observations"] == [{"role": "tool", "name": "add", "content": "4"}]
    assert (steps[1]["reward"], steps[1]["done"]) == (0.5, True)
    assert metrics == {"length": 3.0, "reward/f": 1.0, "steps": 2.0}
    assert [path for path, _ in hub.heard] == ["seed_session", "add", "verify"]
    assert hub.heard[0][1] == ROW and hub.heard[1][1] == {"a": 2}
    assert hub.cookies == [None, "s1", "s1"]
    response = hub.heard[2][1]["response"]
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call_output", "message"]
    assert response["output"][1]["content"][0]["text"] == "Let me see."
    assert response["output"][2]["call_id"] == response["output"][3]["call_id"]


def test_the_model_reaches_the_tools_of_its_row_alone():
    hub = Hub()
    hub.answers = [{}, {"reward": 1.0}]
    call = '<tool_call>{"name": "verify", "arguments": {}}</tool_call>'
    with serving(hub) as url:
        _, steps, _ = episode(f"nemo_gym:{url}", call, "done", **ROW)
    assert "unknown tool 'verify'" in steps[0]["observations"][0]["content"]
    assert [path for path, _ in hub.heard] == ["seed_session", "verify"]


def test_the_last_turn_is_verified_even_if_it_calls():
    hub = Hub()
    hub.answers = [{}, "4", {"reward": 1.0}]
    with serving(hub) as url:
        _, (step,), _ = episode(f"nemo_gym:{url}", CALL, max_turns=1, **ROW)
    assert step["done"] and step["reward"] == 1.0


def test_a_server_with_steps_is_played_step_by_step():
    hub = Hub(paths=("/reset", "/step"))
    hub.answers = [
        {"observation": "Your hand: [4, 3] = 7", "info": {}},
        {
            "observation": "Your hand: 17",
            "reward": 0.0,
            "terminated": False,
            "truncated": False,
            "info": {},
        },
        {
            "observation": None,
            "reward": -1.0,
            "terminated": True,
            "truncated": False,
            "info": {"value": 27, "r": "bust"},
        },
    ]
    with serving(hub) as url:
        opening, steps, metrics = episode(
            f"nemo_gym:{url}", "hit", "hit", responses_create_params={"input": []}
        )
    assert opening[-1]["content"] == "Play.\nYour hand: [4, 3] = 7"
    assert steps[0]["observations"] == [{"role": "user", "content": "Your hand: 17"}]
    assert (steps[1]["reward"], steps[1]["done"], metrics) == (
        -1.0,
        True,
        {"value": 27.0, "steps": 2.0},
    )
    assert hub.heard[1][1]["response"]["output"][0]["content"][0]["text"] == "hit"


def test_only_a_lost_result_is_requested_again():
    hub = Hub()
    hub.answers = [{}, "4", 503, {"reward": 1.0}]

    async def play():
        pool = local_pool(patience=RetryPolicy(2, 0.0))
        name = f"nemo_gym:{url}"
        await pool.init("e", name, {**ROW, "max_steps": 1}, [{"role": "user", "content": "2 + 2?"}])
        return await pool.step("e", CALL)

    with serving(hub) as url:
        result = asyncio.run(play())
    assert (result["reward"], result["metrics"]) == (1.0, {"steps": 1.0, "retries": 1.0})
    assert [path for path, _ in hub.heard] == ["seed_session", "add", "verify", "verify"]
    assert hub.heard[2] == hub.heard[3]


def test_an_episode_that_the_server_could_not_judge_fails():
    hub = Hub()
    hub.answers = [{}, {"reward": 0.0, "mask_sample": True, "failure_reason": "the judge was away"}]
    with (
        serving(hub) as url,
        pytest.raises(RuntimeError, match="could not judge the episode: the judge was away"),
    ):
        episode(f"nemo_gym:{url}", "4")


def test_a_slow_server_and_a_busy_one():
    hub = Hub()
    hub.answers = [{}, 5.0]
    with (
        serving(hub) as url,
        pytest.raises(TransientError, match=r"did not answer within 0.2 s \(timeout_s\)"),
    ):
        episode(f"nemo_gym:{url}", "4", timeout_s=0.2)
    hub.answers = [503]
    with serving(hub) as url, pytest.raises(TransientError, match="answered HTTP 503"):
        episode(f"nemo_gym:{url}", "4")
    hub.answers = [{}, 422]
    with (
        serving(hub) as url,
        pytest.raises(InvalidEnvOutputError, match="/verify answered HTTP 422: no"),
    ):
        episode(f"nemo_gym:{url}", "4")


def test_rows_of_nemo_gym_are_data_as_they_are():
    prompt = as_prompt(
        0,
        {**ROW, "prompt": "another"},
        load_config(["environment.env_class=nemo_gym:http://127.0.0.1:1"]),
    )
    assert prompt.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": "2 + 2?"},
    ]
    assert prompt.extras == {**ROW, "prompt": "another"}


# ---------------------------------------------------------------- before the run


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://host", "http://", "http://h:99999", "http://h?x=1"]
)
def test_an_address_that_is_none_is_told(url):
    with pytest.raises(
        UserError,
        match=r"is not the address of a server: write it as in openenv:http://127.0.0.1:8000",
    ):
        check_environment(f"openenv:{url}")


def test_the_server_is_asked_before_the_run():
    with serving(Hub()) as url:
        check_environment(f"openenv:{url}/")
        check_environment(f"nemo_gym:{url}")
        with pytest.raises(
            UserError, match=r"answers HTTP 404 to /openapi\.json: it is not a resources server"
        ):
            check_environment(f"nemo_gym:{url}/there")
    with pytest.raises(UserError, match=r"does not answer \(.*refused.*start its server"):
        check_environment(f"openenv:{url}")
    with (
        serving(Hub(paths=("/v1/responses",))) as url,
        pytest.raises(UserError, match="describes something else"),
    ):
        check_environment(f"nemo_gym:{url}")

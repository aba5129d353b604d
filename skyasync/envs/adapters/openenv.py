"""OpenEnv's environments, over a WebSocket of their server; written against openenv 0.10.

An episode is one socket. Its messages are ``{"type": "reset" | "step", "data": {...}}``, answered
with ``{"type": "observation", "data": {"observation", "reward", "done", "metadata"}}`` or
``{"type": "error", "data": {"code", "message"}}``.

Invariant: an action that the server's schema refuses costs a turn, is answered with what was wrong,
and is counted in ``invalid_actions``. A socket that is lost is not opened again: its episode was
lost with it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import aiohttp

from skyasync.envs import ENVS
from skyasync.envs.adapters.served import MAX_BYTES, Answer, ServedEnv, about_tools, numbers
from skyasync.envs.base import BaseTextEnvStepOutput, Conversation, InvalidEnvOutputError
from skyasync.envs.tools import read_tool_calls
from skyasync.errors import UserError, unknown

PAUSES_S = (
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
)  # between questions for a free session; then the last one again
Schema = Mapping[str, Any]


class RefusedActionError(Exception):
    """The model's action is none of this environment; the message is shown to the model."""


@ENVS.register("openenv")
class OpenEnvEnv(ServedEnv):
    """Settings besides those of ``ServedEnv``:

    Args:
        seed: of the episode; other entries of ``reset`` are given to the environment's ``reset``
            too.
        action_field: the entry of an action that takes the response's text; by default the only one
            that is required. A response with a JSON object of the action's entries is taken as it
            is. Of a text for a number the last number counts, for one of several names the last
            name.
        action_with: entries that every action has.
        execution_errors: "fail", or "show" where the environment raises for what the model may do:
            an error of a step then costs a turn, is shown to the model, and is counted too.
        show: names of the observation's entries that the model reads; by default all that are not
            empty.
    """

    hub = "openenv"
    description_path = "/schema"
    not_served = "it is not a server of openenv"

    @classmethod
    def is_described_by(cls, description: Answer) -> bool:
        return isinstance(description, Mapping) and isinstance(description.get("action"), Mapping)

    def __init__(
        self, env_config: dict[str, Any] | None = None, extras: dict[str, Any] | None = None
    ) -> None:
        super().__init__(env_config, extras)
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._fixed: dict[str, Any] = dict(self.settings.get("action_with") or {})
        on_error = self.settings.get("execution_errors", "fail")
        if on_error not in ("fail", "show"):
            raise UserError(unknown("execution_errors", on_error, ("fail", "show")))
        self._shows_errors = on_error == "show"
        self._metadata: object = {}
        self._refused = 0

    async def start(self) -> tuple[Conversation, str]:
        reset = dict(self.settings.get("reset") or {})
        if "seed" in self.settings:
            reset["seed"] = int(self.settings["seed"])
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await self._first_answer(json.dumps({"type": "reset", "data": reset}))
        except TimeoutError:
            self.fail(
                f"{self.url}/ws did not begin an episode within {self.timeout_s:g} s (timeout_s)",
                repeatable=True,
            )
        observation, _, done = self._read(answer)
        if done:
            raise InvalidEnvOutputError(f"{self.url} begins with an episode that is done")
        text = self._text(observation)
        if text:
            shown = [{"role": "user", "content": text}]
        else:
            shown = []
        if not self._plays_tools:
            return shown, ""
        listed, _, _ = self._read(await self._ask({"type": "list_tools"}))
        tools = [
            {"type": "function", "function": {"name": tool["name"], "description": tool.get("description") or "",
                                              "parameters": tool.get("input_schema") or {}}}
            for tool in listed.get("tools") or ()
        ]  # fmt: skip
        return shown, about_tools(tools)

    async def play(self, action: str) -> BaseTextEnvStepOutput:
        reward = 0.0
        done = False
        messages = list[dict[str, str]]()
        try:
            for move in self._tool_calls(action) if self._plays_tools else [self._action(action)]:
                observation, earned, done = self._read(await self._ask(move))
                reward += earned
                if self._plays_tools:
                    author = {"role": "tool", "name": move["tool_name"]}
                else:
                    author = {"role": "user"}
                messages.append({**author, "content": self._text(observation)})
                if done:
                    break
        except RefusedActionError as error:
            self._refused += 1
            messages.append({"role": "user", "content": f"error: {error}"})
        self.metrics = {**numbers(self._metadata), "invalid_actions": float(self._refused)}
        return {"observations": messages, "reward": reward, "done": done, "metadata": {}}

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        await super().close()

    # ---------------------------------------------------------------- the wire

    async def _first_answer(self, reset: str) -> Answer:
        """The answer to the first message. A full server is asked until it has room, or the
        caller's time ends."""
        pauses_s = iter(PAUSES_S)
        while True:
            try:
                self._socket = await self.http.ws_connect(f"{self.url}/ws", max_msg_size=MAX_BYTES)
            except aiohttp.ClientError as error:
                self.fail(
                    f"{self.url}/ws is unreachable: {type(error).__name__}: {error}",
                    repeatable=True,
                )
            match answer := await self._exchange(reset, repeatable=True):
                case {"data": {"code": "CAPACITY_REACHED"}}:
                    await self._socket.close()
                    await asyncio.sleep(next(pauses_s, PAUSES_S[-1]))
                case _:
                    return answer

    async def _ask(self, move: Mapping[str, Any]) -> Answer:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._exchange(json.dumps({"type": "step", "data": move}))
        except TimeoutError:
            self.fail(f"{self.url}/ws did not answer within {self.timeout_s:g} s (timeout_s)")

    async def _exchange(self, message: str, *, repeatable: bool = False) -> Answer:
        assert self._socket is not None
        with suppress(
            aiohttp.ClientError
        ):  # the server has closed the socket: what it said before is read
            await self._socket.send_str(message)
        received = await self._socket.receive()
        if received.type is not aiohttp.WSMsgType.TEXT:
            if self._socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
                raise InvalidEnvOutputError(
                    f"{self.url}/ws answered with more than {MAX_BYTES >> 20} MiB"
                )
            self.fail(
                f"{self.url}/ws has closed the session (code {self._socket.close_code})",
                repeatable=repeatable,
            )
        try:
            return json.loads(received.data)
        except (ValueError, RecursionError):
            raise InvalidEnvOutputError(
                f"{self.url}/ws answered no JSON: {received.data[:80]!r}"
            ) from None

    def _read(self, answer: Answer) -> tuple[Mapping[str, Any], float, bool]:
        """The observation, its reward and whether the episode is done."""
        match answer:
            case {"type": "error", "data": {} as data}:
                code = str(data.get("code"))
                if code == "VALIDATION_ERROR" or (self._shows_errors and code == "EXECUTION_ERROR"):
                    raise RefusedActionError(_what_is_wrong(data))
                raise InvalidEnvOutputError(
                    f"{self.url} answered {code}: {str(data.get('message'))[:300]}"
                )
            case {"type": "observation", "data": {"observation": {} as observation} as data}:
                reward = data.get("reward")
                if reward is not None and not isinstance(reward, bool | int | float):
                    problem = f"answered the reward {str(reward)[:80]!r}; it must be a number"
                    raise InvalidEnvOutputError(f"{self.url}/ws {problem}")
                self._metadata = data.get("metadata") or observation.get("metadata")
                return observation, float(reward or 0.0), bool(data.get("done"))
        raise InvalidEnvOutputError(
            f"{self.url}/ws answered {str(answer)[:80]!r}, which is not an observation"
        )

    # ---------------------------------------------------------------- text to actions, observations
    # to text

    @property
    def _schema(self) -> Schema:
        schema: Schema = self.description["action"]
        return schema

    @property
    def _plays_tools(self) -> bool:
        """Whether an action is a call of one of the server's tools (MCP), which some schemas leave
        open."""
        entries = set(self._schema.get("properties") or ()) - {"metadata"}
        return not entries or {"tool_name", "arguments"} <= entries

    def _tool_calls(self, text: str) -> list[dict[str, Any]]:
        _, calls = read_tool_calls(text)
        if not calls:
            raise RefusedActionError("call a tool: <tool_call>{...}</tool_call>")
        return [
            {
                "type": "call_tool",
                "tool_name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
            for call in calls
        ]

    def _action(self, text: str) -> dict[str, Any]:
        entries = [
            name
            for name in self._schema.get("properties") or ()
            if name not in ("metadata", *self._fixed)
        ]
        needed = [name for name in self._schema.get("required") or () if name in entries]
        action = _last_object(text)
        if action and set(action) <= set(entries):
            return {**self._fixed, **action}
        field = self.settings.get("action_field")
        if not field:
            alone = needed if len(needed) == 1 else entries
            if len(alone) != 1:
                raise RefusedActionError(f"answer with a JSON object of: {', '.join(entries)}")
            [field] = alone
        if field not in entries:
            raise UserError(unknown(f"action_field of {self.url}", field, entries))
        return {**self._fixed, field: _value(text, self._entry(field))}

    def _entry(self, name: str) -> Schema:
        """The schema of an entry, without references and alternatives to null."""
        entry: Schema = self._schema["properties"][name]
        for _ in range(8):
            several = entry.get("anyOf") or entry.get("allOf") or entry.get("oneOf") or ()
            if several:
                entry = next((schema for schema in several if schema.get("type") != "null"), {})
            elif "$ref" in entry:
                entry = (self._schema.get("$defs") or {}).get(
                    str(entry["$ref"]).rpartition("/")[2], {}
                )
        return entry

    def _text(self, observation: Mapping[str, Any]) -> str:
        """The observation as the model reads it: its only entry, or a line for each."""
        show = self.settings.get("show")
        if show:
            missing = [name for name in show if name not in observation]
            if missing:
                raise UserError(unknown(f"entry of show, of {self.url}", missing[0], observation))
            entries = {name: observation[name] for name in show}
        else:
            error = observation.get("error")
            hidden = {"done", "reward", "metadata", *(("tool_name",) if self._plays_tools else ())}
            entries = {
                n: v
                for n, v in observation.items()
                if n not in hidden and v not in (None, "", [], {})
            }
            if self._plays_tools and error:
                return f"error: {error.get('message') if isinstance(error, Mapping) else error}"
            if (
                isinstance(result := entries.get("result"), Mapping) and "content" in result
            ):  # MCP's form of a result
                if isinstance(result["content"], list):
                    lines = result["content"]
                else:
                    lines = []
                return "\n".join(
                    str(part.get("text", part)) for part in lines if isinstance(part, Mapping)
                )
            if not entries and isinstance(extra := observation.get("metadata"), Mapping):
                entries = dict(extra)
        values = {n: v if isinstance(v, str) else json.dumps(v) for n, v in entries.items()}
        if len(values) == 1:
            return next(iter(values.values()))
        return "\n".join(f"{n}: {v}" for n, v in values.items())


def _what_is_wrong(data: Mapping[str, Any]) -> str:
    problems = [
        f"{'.'.join(map(str, problem.get('loc') or ()))}: {problem.get('msg')}"
        for problem in data.get("errors") or ()
        if isinstance(problem, Mapping)
    ]
    return "; ".join(problems)[:500] or str(data.get("message"))[:500]


def _last_object(text: str) -> dict[str, Any] | None:
    """The last JSON object in a text that is not part of another, if it has one."""
    end = text.rfind("}") + 1
    decoder = json.JSONDecoder()
    start = text.find("{")
    for _ in range(64):  # a model may write any number of brackets
        if start < 0:
            return None
        try:
            parsed, stop = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
            continue
        if stop == end and isinstance(parsed, dict):
            return parsed
        start = text.find("{", stop)
    return None


def _value(text: str, entry: Schema) -> object:
    """The value of an action's entry that a response names."""
    names = {str(name).lower(): name for name in entry.get("enum") or ()}
    if names:
        named = [names[word] for word in re.findall(r"[\w.+-]+", text.lower()) if word in names]
        if not named:
            raise RefusedActionError(f"answer with one of: {', '.join(map(str, names.values()))}")
        return named[-1]
    match entry.get("type"):
        case "integer" | "number" as kind:
            digits = re.findall(r"-?\d+" if kind == "integer" else r"-?\d+(?:\.\d+)?", text)
            if not digits or len(digits[-1]) > 18:
                raise RefusedActionError("answer with a number")
            if kind == "integer":
                return int(digits[-1])
            return float(digits[-1])
        case "boolean":
            return _value(text, {"enum": ["true", "false"]}) == "true"
        case "string" | None:
            return text.strip()
        case "array":
            return [_value(text, entry.get("items") or {})]
        case _:
            raise RefusedActionError("answer with a JSON object")

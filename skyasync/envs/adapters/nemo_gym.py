"""NeMo Gym's resources servers, over HTTP; written against nemo-gym 0.7.

The rows are those of the server's data: ``responses_create_params`` (the conversation and its
tools) and the columns that the server needs for the reward. There are two types of servers:

| serves               | an episode                                                                            |
|----------------------|---------------------------------------------------------------------------------------|
| ``/verify``          | ``/seed_session``; a POST for each tool call; ``/verify`` with all items: the reward  |
| ``/reset``, ``/step``| ``/reset``; ``/step`` with each response: observation, reward, end                    |

Invariant: the model calls only the tools that its row names. ``/verify`` is asked once with an
answer; a tool is called once for each call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from skyasync.envs import ENVS
from skyasync.envs.adapters.served import Answer, ServedEnv, about_tools, numbers
from skyasync.envs.base import (
    BaseTextEnvStepOutput,
    Conversation,
    EnvConfig,
    InvalidEnvOutputError,
    Row,
)
from skyasync.envs.tools import read_tool_calls
from skyasync.errors import unknown

Item = dict[str, Any]  # of a response, in the form of OpenAI's Responses API
SHOWN = ("name", "description", "parameters")  # entries of a tool's schema that the model sees


@ENVS.register("nemo_gym")
class NemoGymEnv(ServedEnv):
    """A resources server's environment, with the settings of ``ServedEnv``.

    Numbers that the server adds to the row in its answer are metrics, by their names. An episode
    that the server marks as not measured (``mask_sample``) fails.
    """

    hub = "nemo_gym"
    description_path = "/openapi.json"
    not_served = (
        "it is not a resources server of NeMo Gym (agents and models have separate servers)"
    )

    @classmethod
    def is_described_by(cls, description: Answer) -> bool:
        if not isinstance(description, Mapping):
            return False
        paths = description.get("paths")
        if not isinstance(paths, Mapping):
            return False
        return "/verify" in paths or {"/reset", "/step"} <= set(paths)

    def __init__(self, env_config: EnvConfig | None = None, extras: Row | None = None) -> None:
        super().__init__(env_config, extras)
        # Without the settings of ``ServedEnv``, which the server does not know.
        self._row = dict(self.extras)
        self._row.pop("max_steps", None)
        self._row.pop("max_turns", None)
        params = self._row.setdefault("responses_create_params", {"input": []})
        self._tools: list[dict[str, Any]] = []
        for tool in params.get("tools") or ():
            if tool.get("type") == "function":
                self._tools.append(tool)
        self._items_so_far: list[Item] = []
        self._info: Mapping[str, Any] = {}
        self._unverified = False  # /verify was sent, and its answer has not come

    @property
    def _verifies(self) -> bool:
        return "/verify" in self.description["paths"]

    async def start(self) -> tuple[Conversation, str]:
        schemas = []
        for tool in self._tools:
            function = {name: value for name, value in tool.items() if name in SHOWN}
            schemas.append({"type": "function", "function": function})
        tools = about_tools(schemas) if schemas else ""
        if self._verifies:
            await self.request("POST", "/seed_session", self._row, repeatable=True)
            return [], tools
        answer = await self._result("/reset", repeatable=True)
        self._info = answer.get("info") or {}
        observation = answer.get("observation")
        if not observation:
            return [], tools
        return [{"role": "user", "content": str(observation)}], tools

    async def play(self, action: str) -> BaseTextEnvStepOutput:
        if self._unverified:  # the answer was lost, and the step is repeated
            self.turns -= 1  # which ``step`` has counted again
            return await self._verify()
        items, calls = self._items(action)
        if not self._verifies:
            return await self._step(items)
        self._items_so_far += items
        messages = [await self._call(call) for call in calls]
        if calls and self.turns != self.max_steps:
            return {"observations": messages, "reward": 0.0, "done": False, "metadata": {}}
        return await self._verify()

    async def close(self) -> None:
        try:
            if self._info.get("supports_explicit_close") is True and not self._failed:
                await self.exchange("POST", "/close", {})
        finally:
            await super().close()

    def _items(self, action: str) -> tuple[list[Item], list[Item]]:
        """A response as items, and those of them that are calls."""
        thoughts, end_of_thoughts, text = action.rpartition("</think>")
        items: list[Item] = []
        if end_of_thoughts:
            thought = {"type": "summary_text", "text": thoughts.replace("<think>", "").strip()}
            items.append({"type": "reasoning", "id": f"rs_{self.turns}", "summary": [thought]})
        message_text, functions = read_tool_calls(text)
        calls: list[Item] = []
        for number, call in enumerate(functions):
            calls.append(
                {
                    "type": "function_call",
                    "id": f"fc_{self.turns}_{number}",
                    "call_id": f"call_{self.turns}_{number}",
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"]),
                    "status": "completed",
                }
            )
        if message_text or not calls:
            items.append(
                {
                    "type": "message",
                    "id": f"msg_{self.turns}",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": message_text, "annotations": []}],
                }
            )
        return items + calls, calls

    async def _call(self, call: Item) -> dict[str, str]:
        """The tool's answer as a message; an error of the tool is an answer too."""
        names = [tool.get("name") for tool in self._tools]
        if call["name"] in names:
            # Quoted: the name comes from the model's text, and "../verify" is not a tool.
            path = f"/{quote(call['name'], safe='')}"
            _, content = await self.exchange("POST", path, json.loads(call["arguments"]))
            output = content.decode(errors="replace")
        else:
            output = json.dumps({"error": unknown("tool", call["name"], map(str, names))})
        self._items_so_far.append(
            {"type": "function_call_output", "call_id": call["call_id"], "output": output}
        )
        return {"role": "tool", "name": call["name"], "content": output}

    async def _verify(self) -> BaseTextEnvStepOutput:
        self._unverified = True
        answer = await self._result("/verify", self._items_so_far, repeatable=True)
        self._unverified = False
        if answer.get("mask_sample") is True:
            reason = answer.get("failure_reason") or answer.get("failure_kind") or "mask_sample"
            raise RuntimeError(f"{self.url} could not judge the episode: {str(reason)[:300]}")
        self.metrics = {}
        for name, value in numbers(answer).items():
            if name not in self._row and name not in ("reward", "mask_sample"):
                self.metrics[name] = value
        for name, value in numbers(answer.get("reward_components")).items():
            self.metrics[f"reward/{name}"] = value
        return {
            "observations": [],
            "reward": answer.get("reward", 0.0),
            "done": True,
            "metadata": {},
        }

    async def _step(self, items: list[Item]) -> BaseTextEnvStepOutput:
        answer = await self._result("/step", items)
        info = answer.get("info") or {}
        self.metrics = numbers(info)
        names = {item["call_id"]: item["name"] for item in items if item["type"] == "function_call"}
        messages: list[dict[str, str]] = []
        for output in info.get("tool_outputs") or ():
            name = names.get(output.get("call_id"), "")
            messages.append({"role": "tool", "name": name, "content": str(output.get("output"))})
        if answer.get("observation"):
            messages.append({"role": "user", "content": str(answer["observation"])})
        done = bool(answer.get("terminated")) or bool(answer.get("truncated"))
        return {
            "observations": messages,
            "reward": answer.get("reward", 0.0),
            "done": done,
            "metadata": {},
        }

    async def _result(
        self, path: str, items: list[Item] | None = None, *, repeatable: bool = False
    ) -> Mapping[str, Any]:
        """The answer to the row, and to items as a response of OpenAI's Responses API."""
        body = dict(self._row)
        if items is not None:
            body["response"] = {
                "id": "resp_0",
                "object": "response",
                "created_at": 0,
                "model": "policy",
                "output": items,
                "parallel_tool_calls": True,
                "tool_choice": "auto",
                "tools": self._tools,
            }
        answer = await self.request("POST", path, body, repeatable=repeatable)
        if not isinstance(answer, Mapping) or not isinstance(answer.get("info") or {}, Mapping):
            raise InvalidEnvOutputError(
                f"{self.url}{path} answered {str(answer)[:80]!r}, which is not a result"
            )
        return answer

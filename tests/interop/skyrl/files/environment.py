"""A multi-turn environment with a tool group, settings by attribute, and metrics of every kind."""

import re
from typing import Any

from skyasync.interop.skyrl import BaseTextEnv, BaseTextEnvStepOutput, ToolGroup, register, tool


class Counter(ToolGroup):
    """Counts the calls of all its tools together."""

    def __init__(self, start: int):
        self.calls = start
        super().__init__(name="Counter")

    @tool
    def length(self, text: str) -> str:
        self.calls += 1
        return f"{len(text)} characters"


class Measure(BaseTextEnv):
    def __init__(self, env_config: Any, extras: dict[str, Any], bonus: float = 0.0):
        super().__init__()
        assert "ground_truth" in extras["reward_spec"]
        self.truth = extras["reward_spec"]["ground_truth"]
        self.max_turns = extras.get("max_turns", 3)
        self.bonus, self.scale = bonus, env_config.reward.scale
        self.counter = Counter(env_config.start)
        self.init_tool_groups([self.counter])
        self.said = ""

    def _parse_action(self, action: str) -> tuple[str, str, list[str]]:
        found = re.search(r"<length>(.*?)</length>", f"<length>{action}</length>", re.DOTALL)
        return self.tool_to_toolgroup["length"], "length", [found.group(1)]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        group, name, arguments = self._parse_action(action)
        answer = self._execute_tool(group, name, arguments)
        self.said = action
        reward = self.bonus + self.scale * (sum(map(ord, action)) % 2)
        done = self.turns >= self.max_turns
        observations = [] if done else [{"role": "user", "content": answer}]
        metadata = {"truth": self.truth}
        return BaseTextEnvStepOutput(
            observations=observations, reward=reward, done=done, metadata=metadata
        )

    def get_metrics(self) -> dict[str, Any]:
        return {"calls": self.counter.calls, "long": len(self.said) > 2, "last_words": self.said}


register(id="measure", entry_point=f"{__file__}:Measure", kwargs={"bonus": 2.0})

"""TRL's reward functions. Source: ``docs/source/grpo_trainer.md``."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter
from typing import Any

from skyasync.rewards.signature import CONVERSATION, SEEN, Signature, single_value


class TrlSignature(Signature):
    """``(prompts, completions, completion_ids, every column, log_metric, log_extra)`` give one
    number per completion.

    All are lists, of one entry here; prompts and completions are lists of messages if the row's
    prompt is one, and text otherwise. None is the answer for a row without a reward by this
    function.
    """

    name = "trl"
    shown = frozenset({"prompts"})
    may_abstain = True

    def matches(self, parameters: Mapping[str, Parameter]) -> bool:
        if "completions" not in parameters or parameters.keys() & {"response", "queries", "prompt"}:
            return False
        return parameters["completions"].annotation not in (str, "str")

    def arguments(self, known: Mapping[str, Any]) -> Mapping[str, Any]:
        values = {
            name: value
            for name, value in known.items()
            if name not in SEEN | {CONVERSATION, "messages"}
        }
        values |= {name: known[name] for name in ("prompt_ids", "completion_ids") if name in known}
        prompt = known.get("prompt")
        response = known.get("response")
        if known.get(CONVERSATION):
            prompt = known.get("messages")
            response = [{"role": "assistant", "content": response}]
        values |= {"prompts": prompt, "completions": response}
        return {"log_metric": None, "log_extra": None} | {
            name: [value] for name, value in values.items()
        }

    def with_logs(self, arguments: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, float]]:
        metrics: dict[str, float] = {}
        logs = {"log_metric": metrics.__setitem__, "log_extra": lambda column, values: None}
        return {
            **arguments,
            **{name: logs[name] for name in logs.keys() & arguments.keys()},
        }, metrics

    def answer(self, returned: object) -> object:
        return single_value(returned)

"""TRL's reward functions. Source: ``docs/source/grpo_trainer.md``."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter
from typing import Any

from skyasync.rewards.signature import CONVERSATION, SEEN, Signature, single_value


class TrlSignature(Signature):
    """``(prompts, completions, completion_ids, each column, log_metric, log_extra)``.

    The function returns one number per completion. All arguments are lists, with one entry here;
    prompts and completions are lists of messages if the row's prompt is one, and text by default.
    It returns None for a row without a reward by this function.
    """

    name = "trl"
    shown = frozenset({"prompts"})
    may_abstain = True

    def matches(self, parameters: Mapping[str, Parameter]) -> bool:
        if "completions" not in parameters or parameters.keys() & {"response", "queries", "prompt"}:
            return False
        return parameters["completions"].annotation not in (str, "str")

    def arguments(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        response = inputs.get("response")
        arguments: dict[str, Any] = {"log_metric": None, "log_extra": None}
        for name, value in inputs.items():
            # TRL passes columns and tokens; the other inputs have names of their own there.
            if name not in SEEN | {CONVERSATION, "messages"}:
                arguments[name] = [value]
        for name in ("prompt_ids", "completion_ids"):
            if name in inputs:
                arguments[name] = [inputs[name]]
        if inputs.get(CONVERSATION):
            arguments["prompts"] = [inputs.get("messages")]
            arguments["completions"] = [[{"role": "assistant", "content": response}]]
        else:
            arguments["prompts"] = [inputs.get("prompt")]
            arguments["completions"] = [response]
        return arguments

    def with_logs(self, arguments: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, float]]:
        metrics: dict[str, float] = {}
        # log_extra is for a table of completions, which there is not: its calls have no effect.
        logs = {"log_metric": metrics.__setitem__, "log_extra": lambda column, values: None}
        with_logs = dict(arguments)
        for name, function in logs.items():
            if name in arguments:
                with_logs[name] = function
        return with_logs, metrics

    def answer(self, returned: object) -> object:
        return single_value(returned)

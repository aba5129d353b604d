"""AReaL's reward functions. Source: ``areal/api/reward_api.py``."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter
from typing import Any

from skyasync.rewards.signature import Signature


class ArealSignature(Signature):
    """``(prompt, completions, prompt_ids, completion_ids, answer)`` give a number.

    ``prompt`` is all that the model read, ``completions`` the response, ``answer`` the row's column, or else its label.
    """

    name = "areal"
    needs_tokens = True

    def matches(self, parameters: Mapping[str, Parameter]) -> bool:
        if "completions" not in parameters or parameters.keys() & {"response", "queries"}:
            return False
        return "prompt" in parameters or parameters["completions"].annotation in (str, "str")

    def arguments(self, known: Mapping[str, Any]) -> Mapping[str, Any]:
        prompts = known.get("prompts")
        prompt = prompts[0] if isinstance(prompts, list) else known.get("prompt")
        return {"answer": known.get("label"), **known, "prompt": prompt, "completions": known.get("response")}

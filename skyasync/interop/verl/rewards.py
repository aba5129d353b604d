"""verl's reward functions. Source: ``verl/utils/reward_score``."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter
from numbers import Real
from typing import Any

from skyasync.rewards.signature import Signature, single_value


class VerlSignature(Signature):
    """``(data_source, solution_str, ground_truth, extra_info)`` give a number, or a dictionary with
    ``score``."""

    name = "verl"

    def matches(self, parameters: Mapping[str, Parameter]) -> bool:
        return "solution_str" in parameters and not parameters.keys() & {
            "response",
            "completions",
            "queries",
        }

    def arguments(self, known: Mapping[str, Any]) -> Mapping[str, Any]:
        usual: dict[str, Any] = {
            "data_source": None,
            "ground_truth": known.get("label"),
            "extra_info": {},
        }
        return usual | dict(known) | {"solution_str": known.get("response")}

    def answer(self, returned: object) -> object:
        if not isinstance(returned, Mapping):
            return single_value(returned)
        values = {name: single_value(value) for name, value in returned.items()}
        # verl allows values besides the score that are no numbers: they are left out
        return {
            name: value
            for name, value in values.items()
            if isinstance(value, Real) or name == "score"
        }

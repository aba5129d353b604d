"""verl's reward functions. Source: ``verl/utils/reward_score``."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter
from numbers import Real
from typing import Any

from skyasync.rewards.signature import Signature, single_value


class VerlSignature(Signature):
    """``(data_source, solution_str, ground_truth, extra_info)``.

    The function returns a number, or a dictionary with ``score``.
    """

    name = "verl"

    def matches(self, parameters: Mapping[str, Parameter]) -> bool:
        # These parameters are of other frameworks' functions.
        other_names = {"response", "completions", "queries"}
        return "solution_str" in parameters and other_names.isdisjoint(parameters)

    def arguments(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "data_source": None,
            "ground_truth": inputs.get("label"),
            "extra_info": {},
            **inputs,
            "solution_str": inputs.get("response"),
        }

    def answer(self, returned: object) -> object:
        if not isinstance(returned, Mapping):
            return single_value(returned)
        values = {}
        for name, entry in returned.items():
            value = single_value(entry)
            # verl allows values besides the score that are no numbers: they are left out.
            if isinstance(value, Real) or name == "score":
                values[name] = value
        return values

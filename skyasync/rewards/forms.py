"""Reward functions in the signatures of other systems.

| system   | recognised by              | called with                                      | returns                  |
|----------|----------------------------|--------------------------------------------------|--------------------------|
| OpenRLHF | ``queries``                | lists: ``queries`` (all text), ``prompts``,      | one entry per query,     |
|          |                            | ``labels``                                       | or a dictionary of it    |
| AReaL    | ``completions``, ``prompt``| ``prompt`` (all that was read), ``completions``, | a number                 |
|          |                            | ``prompt_ids``, ``completion_ids``, ``answer``   |                          |
| TRL      | ``completions``, no        | lists: ``prompts``, ``completions``,             | one number or None per   |
|          | ``prompt``                 | ``completion_ids``, every column; ``log_metric`` | completion               |
| verl     | ``solution_str``           | ``data_source``, ``solution_str``,               | a number, or a dictionary|
|          |                            | ``ground_truth``, ``extra_info``                 | with ``score``           |

Lists have one entry: a response is judged when its episode ends. TRL's ``prompts`` and ``completions`` are lists of
messages if the row's prompt is one, and text otherwise. A function that takes ``response`` is one of this library.

Invariant: a function's own signature decides; what it is given was read and written by the engine, tokens included, and
not made again from text. Sources: OpenRLHF ``examples/python/reward_func.py``, AReaL ``areal/api/reward_api.py``, TRL
``docs/source/grpo_trainer.md``, verl ``verl/utils/reward_score``.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from numbers import Real
from typing import Any

SEEN = frozenset({"queries", "prompts", "labels", "prompt_ids", "completion_ids"})  # known where tokens are
CODE_SANDBOX = "code_sandbox"  # environment.code_sandbox
CONVERSATION = "prompt_is_conversation"  # the column that a row has whose prompt is a list of messages
BY_NAME = SEEN | {CODE_SANDBOX, CONVERSATION}  # what a function that takes everything is not given


def parameter_names(function: Callable[..., object]) -> frozenset[str]:
    """What it takes by name."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds)


def wrong_return(function: Callable[..., object]) -> str:
    """What every way out of it returns, if that is nothing (as the way past its last line does) or a tuple; else ""."""
    code = getattr(function, "__code__", None)
    steps = list(dis.get_instructions(code)) if code else []
    ends = [place for place, step in enumerate(steps) if step.opname in ("RETURN_VALUE", "RETURN_CONST")]
    values = [steps[end] if steps[end].opname == "RETURN_CONST" else steps[end - 1] for end in ends]
    constants = [step.argval if step.opname.endswith("_CONST") else ... for step in values]
    if values and all(constant is None for constant in constants):
        return "nothing"
    tuples = [s.opname == "BUILD_TUPLE" or isinstance(c, tuple) for s, c in zip(values, constants, strict=True)]
    return "a tuple" if tuples and all(tuples) else ""


@cache
def form_of(function: Callable[..., object]) -> str:
    """The system whose signature this is; "" for this library's."""
    names = parameter_names(function)
    if "queries" in names:
        return "openrlhf"
    if "response" in names:
        return ""
    if "completions" in names:
        one = inspect.signature(function).parameters["completions"].annotation in (str, "str")
        return "areal" if one or "prompt" in names else "trl"
    return "verl" if "solution_str" in names else ""


def seen(read: str, wrote: str, prompt_ids: list[int], completion_ids: list[int], label: object) -> dict[str, object]:
    """What is known of a turn whose tokens are."""
    return {
        "queries": [read + wrote], "prompts": [read], "labels": [label],
        "prompt_ids": prompt_ids, "completion_ids": completion_ids,
    }  # fmt: skip


def as_known_to(form: str, known: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values that a function of this form may ask for, by the names that it has for them."""
    if form == "areal":  # the prompt is all that the model read, and the answer the row's column, or else its label
        prompts = known.get("prompts")
        prompt = prompts[0] if isinstance(prompts, list) else known.get("prompt")
        return {"answer": known.get("label"), **known, "prompt": prompt, "completions": known.get("response")}
    if form == "verl":
        usual: dict[str, Any] = {"data_source": None, "ground_truth": known.get("label"), "extra_info": {}}
        return usual | dict(known) | {"solution_str": known.get("response")}
    if form == "trl":
        return {"log_metric": None, "log_extra": None} | {name: [value] for name, value in _in_trl(known).items()}
    return known


def _in_trl(known: Mapping[str, Any]) -> dict[str, Any]:
    columns = {name: value for name, value in known.items() if name not in SEEN | {CONVERSATION, "messages"}}
    tokens = {name: known[name] for name in ("prompt_ids", "completion_ids") if name in known}
    prompt, response = known.get("prompt"), known.get("response")
    if known.get(CONVERSATION):
        prompt, response = known.get("messages"), [{"role": "assistant", "content": response}]
    return columns | tokens | {"prompts": prompt, "completions": response}


def with_logs(form: str, arguments: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, float]]:
    """The arguments with what TRL's functions log by, and where the metrics arrive that they log."""
    metrics: dict[str, float] = {}
    logs = {"log_metric": metrics.__setitem__, "log_extra": lambda column, values: None}
    return {**arguments, **{name: logs[name] for name in logs.keys() & arguments.keys() if form == "trl"}}, metrics


def answer_of(form: str, returned: object) -> object:
    """What a function of this form returned, in the form of ``skyasync.rewards.score``; None: it does not apply."""
    if form == "openrlhf":
        return unbatched(returned)
    if form == "trl":
        return _only(returned)
    if form == "verl":
        if isinstance(returned, Mapping):  # what verl keeps besides is not only numbers
            numbers = {name: _only(value) for name, value in returned.items()}
            return {name: value for name, value in numbers.items() if isinstance(value, Real) or name == "score"}
        return _only(returned)
    return returned


def unbatched(returned: object) -> object:
    """The one entry of an answer for a list of one query, in the form of ``skyasync.rewards.score``.

    ``rewards`` is the reward, ``scores`` the metric ``score``, and each number in ``extra_logs`` a metric.
    """
    if not isinstance(returned, Mapping):
        return _only(returned)
    if "rewards" not in returned:
        return returned  # for the error that names what is missing
    found = {"reward": _only(returned["rewards"])}
    if returned.get("scores") is not None:
        found["score"] = _only(returned["scores"])
    logs = returned.get("extra_logs") or {}
    found |= {str(name): value for name, log in logs.items() if isinstance(value := _only(log), int | float)}
    return found


def _only(value: object) -> object:
    """A number for a tensor, array or list of one; anything else as it is, to be refused where all scores are."""
    if hasattr(value, "tolist"):  # tensors and arrays, whatever their library
        value = value.tolist()
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    return float(value) if isinstance(value, bool | int) else value

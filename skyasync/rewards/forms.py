"""Reward functions in the forms that other systems call them in.

| form     | told by the parameter | called with                                     | returns                |
|----------|-----------------------|-------------------------------------------------|------------------------|
| OpenRLHF | ``queries``           | lists: ``queries`` (all text), ``prompts``,     | one entry per query,   |
|          |                       | ``labels``                                      | or a dictionary of it  |
| AReaL    | ``completions``, no   | ``prompt`` (all that was read), ``completions``,| a number               |
|          | ``prompts``           | ``prompt_ids``, ``completion_ids``, ``answer``  |                        |

Invariant: a function's own signature decides; what it is given was read and written by the engine, tokens included, and
not made again from text. Sources: OpenRLHF ``examples/python/reward_func.py``, AReaL ``areal/api/reward_api.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import cache

SEEN = frozenset({"queries", "prompts", "labels", "prompt_ids", "completion_ids"})  # known where tokens are
CODE_SANDBOX = "code_sandbox"  # environment.code_sandbox
BY_NAME = SEEN | {CODE_SANDBOX}  # what a function that takes everything is not given


def parameter_names(function: Callable[..., object]) -> frozenset[str]:
    """What it takes by name."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds)


@cache
def in_batches(function: Callable[..., object]) -> bool:
    """Whether it judges lists of queries, and so returns lists (OpenRLHF's form)."""
    return "queries" in parameter_names(function)


def of_areal(names: Collection[str]) -> bool:
    return "completions" in names and not {"prompts", "queries"} & set(names)


def looks_at_tokens(names: Collection[str]) -> bool:
    """Whether a function with these parameters needs what the engine read and wrote."""
    return of_areal(names) or "queries" in names or bool({"prompt_ids", "completion_ids"} & set(names))


def seen(read: str, wrote: str, prompt_ids: list[int], completion_ids: list[int], label: object) -> dict[str, object]:
    """What is known of a turn whose tokens are."""
    return {
        "queries": [read + wrote], "prompts": [read], "labels": [label],
        "prompt_ids": prompt_ids, "completion_ids": completion_ids,
    }  # fmt: skip


def as_areal_knows(known: Mapping[str, object]) -> dict[str, object]:
    """AReaL's ``prompt`` is all that the model read, and ``answer`` the row's column, or else its label."""
    prompts = known.get("prompts")
    prompt = prompts[0] if isinstance(prompts, list) else known.get("prompt")
    return {"answer": known.get("label"), **known, "prompt": prompt, "completions": known.get("response")}


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

"""The names of ``openrlhf.utils`` that users' files import, where OpenRLHF is not installed.

Invariant: the stand-ins are in ``sys.modules`` while such a file is loaded, and at no other time; whoever has OpenRLHF
gets OpenRLHF. What they do is in our words; what they promise is in OpenRLHF's documentation.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_ROOT = "openrlhf"
_LOCK = threading.RLock()  # one file at a time; a file may load another


@contextmanager
def stand_ins(**more: dict[str, Any]) -> Iterator[None]:
    """While the block runs, ``openrlhf.utils`` can be imported.

    Args:
        more: module below ``openrlhf.utils`` -> its names, besides those of reward files.
    """
    if _installed():
        yield
        return
    with _LOCK:
        before = _loaded()
        sys.modules.update(_modules(more))
        try:
            yield
        finally:
            for name in _loaded():
                del sys.modules[name]
            sys.modules.update(before)


def _loaded() -> dict[str, ModuleType]:
    """The modules under this name; of a copy, as other threads import while this one looks."""
    return {name: module for name, module in sys.modules.copy().items() if name.partition(".")[0] == _ROOT}


def extract_boxed_answer(text: str) -> str | None:
    r"""What stands in the last ``\boxed{...}``, braces inside it included; None if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for place in range(begin - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[begin:place].strip()
    return None


def grade_answer(given: str | None, truth: str | None) -> bool:
    """Whether two answers are the same text, number or, with math-verify installed, expression."""
    if given is None or truth is None:
        return False
    if _plain(given) == _plain(truth):
        return True
    try:
        return float(_plain(given)) == float(_plain(truth))
    except ValueError:
        pass
    if importlib.util.find_spec("math_verify") is None:
        return False
    from skyasync.rewards.answer_match import math_verify

    try:
        return bool(math_verify(f"${given}$", truth))
    except Exception:
        return False  # what is no expression equals none


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def _plain(answer: str) -> str:
    return re.sub(r"[\s$,]|\\left|\\right|\\!", "", answer).rstrip(".").lower()


def _installed() -> bool:
    """A package, not a folder of this name that happens to lie beside the user's files."""
    known = sys.modules.get(_ROOT)
    spec = known.__spec__ if known is not None else importlib.util.find_spec(_ROOT)
    return spec is not None and spec.origin is not None


def _modules(more: dict[str, dict[str, Any]]) -> dict[str, ModuleType]:
    graders = {"extract_boxed_answer": extract_boxed_answer, "grade_answer": grade_answer}
    names: dict[str, dict[str, Any]] = {
        _ROOT: {},
        f"{_ROOT}.utils": graders,
        f"{_ROOT}.utils.math_utils": graders,
        f"{_ROOT}.utils.logging_utils": {"init_logger": init_logger},
        **{f"{_ROOT}.utils.{name}": values for name, values in more.items()},
    }
    made = {}
    for name, values in names.items():
        module = made[name] = ModuleType(name)
        vars(module).update(values, __path__=[])
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    return made

"""Extensions of a run, which are not part of its plan: a list of ``RunExtension``.

The prompt ledger, the divergence guard and the profiler are in every trainer's list. The supervisor
of the engines (``skyasync.inference.supervisor``), the resource monitor
(``skyasync.run.resource_monitor``) and the user's callbacks join it in a real run.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING

from skyasync.callbacks import RunExtension
from skyasync.errors import UserError, nearest
from skyasync.observability.metric_names import entry_of

if TYPE_CHECKING:
    from skyasync.trainer.trainer import RayPPOTrainer

FILE = "extensions.json"  # of a checkpoint: name -> state


async def notify(trainer: RayPPOTrainer, event: str, *arguments: object) -> None:
    """Call the method ``event`` of every extension, in order, and await asynchronous ones.

    Raises:
        TimeoutError: if one takes longer than ``trainer.step_timeout_s``.
    """
    call = methodcaller(event, trainer, *arguments)
    for extension in list(trainer.extensions):  # a callback may append to the list
        result = call(extension)
        if inspect.isawaitable(result):
            async with trainer.context.phases.limited(f"{type(extension).__name__}.{event}"):
                await result


def nearest_metric(name: str, metrics: Mapping[str, float]) -> str:
    """The end of an error about a metric that does not exist: the nearest name."""
    close = nearest(name, metrics, count=1)
    if close:
        return f"did you mean {close[0]}?"
    return "metrics.jsonl has their names"


def is_documented(name: str) -> bool:
    """Whether the library has a metric of this name: not every step need have it.

    Other metrics come from losses, environments and evaluations, or are mistakes.
    """
    entry = entry_of(name)
    if entry is None:
        return False
    # Entries that stand for any name of a user prove nothing about this one.
    return "<n>" in entry.name or not entry.name.endswith(("<name>", "<statistic>"))


def save_states(extensions: Sequence[RunExtension], folder: Path) -> None:
    """Write the state of the extensions into a checkpoint; no file if none has a state.

    Raises:
        UserError: if JSON does not know what one of them returns.
    """
    states = {}
    for name, extension in _by_name(extensions).items():
        state = extension.state_dict()
        if state:
            try:
                states[name] = json.loads(json.dumps(state))
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"{type(extension).__name__}.state_dict() returns what a checkpoint cannot keep ({error}): "
                    f"it may hold numbers, strings, booleans, None, lists and mappings"
                ) from error
    if states:
        (folder / FILE).write_text(json.dumps(states, indent=2), encoding="utf-8")


def load_states(extensions: Sequence[RunExtension], folder: Path) -> None:
    """Give each extension its state in a checkpoint."""
    if (folder / FILE).exists():
        states = json.loads((folder / FILE).read_text(encoding="utf-8"))
        for name, extension in _by_name(extensions).items():
            if name in states:
                extension.load_state_dict(states[name])


def _by_name(extensions: Sequence[RunExtension]) -> dict[str, RunExtension]:
    """Name the extensions by their class; the second of a class is ``Name#2``."""
    by_name = {}
    counts: Counter[str] = Counter()
    for extension in extensions:
        name = type(extension).__name__
        counts[name] += 1
        if counts[name] > 1:
            name = f"{name}#{counts[name]}"
        by_name[name] = extension
    return by_name

"""The output of the run's processes: each has a file in the run's folder, and the lines for the
user are shown.

Invariant: every line that Ray brings to the driver is in a file. On the terminal are those of the
user's code (the controller, environments, agents, models), as they were printed. Loading bars,
warnings of libraries on standard error, and the lines of engines and of Ray itself are in the files
alone. An error that ends the run has its traceback, and the last lines of a process that failed
without one.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyasync.observability.lines import write_plainly

Show = Callable[[Sequence[str], bool], None]

HANDLER = "ray_print_logs"  # Ray's own, which prints; by this name Ray removes it when it ends
#: Classes of actors -> what users call them.
NAMES = {"_EngineActor": "engine", "RpcActor": "environment", "Controller": "controller"}
SILENT = {"engine", "ray"}
AUTOSCALER = "autoscaler"
_EVENT = ":event_summary:"
LAST_LINES = 40
# lines of one process that are shown at once, and from then on
BURST = 200
PER_S = 100
STRAGGLERS_S = 0.6  # Ray looks at its files twice as often

_BAR = re.compile(r"\d+%\|.*\||\[\d+:\d\d<.*(it/s|s/it)|\bLoading .*: +\d+%")
_LIBRARY = re.compile(
    r"^\S*/(site|dist)-packages/\S+:\d+: \w*Warning: |^/usr/lib/\S+:\d+: \w*Warning: "
)
_MODELS = re.compile(
    r"^Loading weights$|^Failed to load CPU gemm_4bit_forward "
)  # of transformers, of bitsandbytes
_RAY = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [A-Z] \d+ \d+\] |^\[W\d+ .*\.cpp:\d+\] ")
_FAILED = re.compile(
    r"Traceback|\b\w*(Error|Exception)\b|\bFatal\b|SIG[A-Z]{3,}|Segmentation|Aborted"
)


class ProcessLogs:
    """Takes batches of lines as Ray's log monitor makes them (its keys ``pid``, ``actor_name``,
    ``is_err``, ``lines``).

    Args:
        folder: has a file ``<name>-<pid>.log`` for each process.
        show: called with what the user is to see, and whether it came from standard error; by
            default it is written there.
        hide: removes secrets from a line.
    """

    def __init__(
        self,
        folder: Path,
        show: Show | None = None,
        *,
        hide: Callable[[str], str] = lambda line: line,
    ) -> None:
        self.folder = folder
        self.show = write_plainly if show is None else show
        self._hide = hide
        self._budgets: defaultdict[str, _LineBudget] = defaultdict(_LineBudget)
        self._warned: set[str] = (
            set()
        )  # processes whose last line was a library's warning: its source follows

    def __call__(self, data: Mapping[str, Any]) -> None:
        """Write and show a batch. Never raises: it is called in Ray's thread."""
        lines = [self._hide(str(line)) for line in data.get("lines", ())]
        error = bool(data.get("is_err"))
        name, key = _names(data)
        if name == AUTOSCALER:  # whose log has pages of its state, every few seconds
            lines = [line.partition(_EVENT)[2].strip() for line in lines if _EVENT in line]
        if not lines:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"{key}.log").open("a", encoding="utf-8", errors="replace") as file:
                file.write("".join(f"{line}\n" for line in lines))
        except OSError:  # no space for the file
            self.show(lines, error)
            return
        if name in SILENT:
            return
        shown = self._without_noise(key, lines) if error else lines
        if not shown:
            return
        budget = self._budgets[key]
        allowed = budget.take(len(shown))
        too_many = len(shown) > allowed
        shown = shown[:allowed]
        if too_many and not budget.reported:
            shown.append(
                f"(more than {PER_S} lines per second: the rest is in {self.folder / key}.log)"
            )
        budget.reported = too_many
        if shown:
            self.show(shown, error)

    def _without_noise(self, key: str, lines: list[str]) -> list[str]:
        """Lines of standard error without bars, and without libraries' warnings and their
        sources."""
        shown = []
        for line in lines:
            source = key in self._warned and line.startswith("  ")
            self._warned.discard(key)
            if _LIBRARY.search(line):
                self._warned.add(key)
            elif not source and not any(noise.search(line) for noise in (_BAR, _MODELS, _RAY)):
                shown.append(line)
        return shown

    @contextmanager
    def shown_by(self, show: Show) -> Iterator[None]:
        """Inside the block lines are shown by this function."""
        former = self.show
        self.show = show
        try:
            yield
        finally:
            self.show = former


@dataclass
class _LineBudget:
    """How many lines of a process may be shown now."""

    reported: bool = False
    _left: float = BURST
    _at: float = field(default_factory=time.monotonic)

    def take(self, lines: int) -> int:
        now = time.monotonic()
        self._left = min(BURST, self._left + PER_S * (now - self._at))
        self._at = now
        taken = min(lines, int(self._left))
        self._left -= taken
        return taken


def bring_to(logs: ProcessLogs) -> Callable[[], None]:
    """Send what Ray would print to ``logs``; nothing comes if Ray's ``log_to_driver`` is off.

    Ray's own reports of failures (pages of a raylet's state, for one) go to the file ``ray.log``
    alone.

    Returns:
        a function that undoes it, also after Ray has ended.
    """
    import ray
    from ray._private import worker
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    former = [handler for name, handler in dispatcher.handlers if name == HANDLER]
    dispatcher.remove_handler(HANDLER)
    if former:
        dispatcher.add_handler(HANDLER, logs)
    ray_worker: Any = worker
    prints = ray_worker.print_to_stdstream  # which Ray calls by this name with a failure of its own
    ray_worker.print_to_stdstream = lambda data, **_: logs(data)

    def undo() -> None:
        ray_worker.print_to_stdstream = prints
        dispatcher.remove_handler(HANDLER)
        for handler in former if ray.is_initialized() else ():
            dispatcher.add_handler(HANDLER, handler)

    return undo


def last_words(logs: ProcessLogs, error: BaseException) -> str:
    """The last lines of processes that speak of errors, and of the process that ``error`` names.

    Some fail without a traceback that Python knows of.
    """
    time.sleep(STRAGGLERS_S)
    named = re.search(r"\bpid: (\d+)", str(error))
    text = ""
    for file in sorted(logs.folder.glob("*.log")):
        is_of_actor = named is not None and file.stem.endswith(f"-{named[1]}")
        if not is_of_actor and file.stem.partition("-")[0] in ("controller", "driver", "ray"):
            continue
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        if lines and (is_of_actor or any(map(_FAILED.search, lines))):
            text += f"\n\nThe last lines of logs/{file.name}:\n" + "\n".join(lines)
    return text


def _names(data: Mapping[str, Any]) -> tuple[str, str]:
    """The name of a process for users, and the name of its file, with the address if it is on
    another machine."""
    process = str(data.get("pid"))
    if data.get("ip") in (None, "", data.get("localhost")):
        place = ""
    else:
        place = f"-{data['ip']}"
    if not process.isdigit():  # raylet, autoscaler, gcs_server
        name = AUTOSCALER if process == AUTOSCALER else "ray"
        return name, f"{name}{place}"
    actor = str(data.get("actor_name") or data.get("task_name") or "process")
    name = (
        NAMES.get(actor)
        or re.sub(r"\W+", "_", actor).strip("_").removesuffix("Worker").lower()
        or "process"
    )
    return name, f"{name}{place}-{process}"

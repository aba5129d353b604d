"""The output of the run's processes: a file for each in the run's folder, and the terminal.

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

HANDLER = "ray_print_logs"  # the name of Ray's handler, which prints; Ray removes it at its end
#: Classes of actors -> their names for users.
NAMES = {"_EngineActor": "engine", "RpcActor": "environment", "Controller": "controller"}
SILENT = {"engine", "ray"}  # their lines are in files alone
AUTOSCALER = "autoscaler"
_EVENT = ":event_summary:"
LAST_LINES = 40  # of a failed process: a traceback and some lines before it
# Lines of one process on the terminal: at once, and per second after that.
BURST = 200
PER_S = 100
STRAGGLERS_S = 0.6  # for the last lines: Ray reads its files every 0.3 s

_BAR = re.compile(r"\d+%\|.*\||\[\d+:\d\d<.*(it/s|s/it)|\bLoading .*: +\d+%")
_LIBRARY = re.compile(
    r"^\S*/(site|dist)-packages/\S+:\d+: \w*Warning: |^/usr/lib/\S+:\d+: \w*Warning: "
)
# Of transformers, and of bitsandbytes.
_MODELS = re.compile(r"^Loading weights$|^Failed to load CPU gemm_4bit_forward ")
_RAY = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [A-Z] \d+ \d+\] |^\[W\d+ .*\.cpp:\d+\] ")
_FAILED = re.compile(
    r"Traceback|\b\w*(Error|Exception)\b|\bFatal\b|SIG[A-Z]{3,}|Segmentation|Aborted"
)


class ProcessLogs:
    """Writes and shows batches of lines of Ray's log monitor.

    A batch is a mapping with the keys ``pid``, ``actor_name``, ``is_err`` and ``lines``.

    Args:
        folder: gets a file ``<name>-<pid>.log`` for each process.
        show: called with the lines for the terminal, and whether they came from standard error; by
            default it writes them there.
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
        # Processes whose last line was a library's warning: the line of its source follows.
        self._warned: set[str] = set()

    def __call__(self, data: Mapping[str, Any]) -> None:
        """Write and show a batch. Never raises: it is called in Ray's thread."""
        lines = [self._hide(str(line)) for line in data.get("lines", ())]
        error = bool(data.get("is_err"))
        name, key = _names(data)
        if name == AUTOSCALER:  # its log has pages of its state, every few seconds
            events = [line.partition(_EVENT)[2] for line in lines if _EVENT in line]
            lines = [event.strip() for event in events]
        if not lines:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"{key}.log").open("a", encoding="utf-8", errors="replace") as file:
                file.write("".join(f"{line}\n" for line in lines))
        except OSError:  # no space for the file: at least the terminal has the lines
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
        if too_many and not budget.reported:  # once, until it prints less
            shown.append(
                f"(more than {PER_S} lines per second: the rest is in {self.folder / key}.log)"
            )
        budget.reported = too_many
        if shown:
            self.show(shown, error)

    def _without_noise(self, key: str, lines: list[str]) -> list[str]:
        """Lines of standard error without bars, and libraries' warnings with their sources."""
        shown = []
        for line in lines:
            # Python prints the source of a warning, indented, in the next line.
            is_source = key in self._warned and line.startswith("  ")
            self._warned.discard(key)
            if _LIBRARY.search(line):
                self._warned.add(key)
            elif not is_source and not any(noise.search(line) for noise in (_BAR, _MODELS, _RAY)):
                shown.append(line)
        return shown

    @contextmanager
    def shown_by(self, show: Show) -> Iterator[None]:
        """Show lines by this function inside the block."""
        former = self.show
        self.show = show
        try:
            yield
        finally:
            self.show = former


@dataclass
class _LineBudget:
    """The number of lines of a process that may be shown now (a token bucket)."""

    reported: bool = False  # the user knows that lines are left out
    _available: float = BURST
    _updated_s: float = field(default_factory=time.monotonic)

    def take(self, lines: int) -> int:
        """Take as many of these lines as may be shown; returns their number."""
        now = time.monotonic()
        self._available = min(BURST, self._available + PER_S * (now - self._updated_s))
        self._updated_s = now
        allowed = min(lines, int(self._available))
        self._available -= allowed
        return allowed


def bring_to(logs: ProcessLogs) -> Callable[[], None]:
    """Send the lines that Ray would print to ``logs``; none come without Ray's ``log_to_driver``.

    Ray's reports of failures, such as pages of a raylet's state, go to the file ``ray.log`` alone.

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
    # Ray calls this function by its name, past the handlers, with a failure of its own.
    ray_worker: Any = worker
    former_print = ray_worker.print_to_stdstream
    ray_worker.print_to_stdstream = lambda data, **_: logs(data)

    def undo() -> None:
        ray_worker.print_to_stdstream = former_print
        dispatcher.remove_handler(HANDLER)
        if ray.is_initialized():
            for handler in former:
                dispatcher.add_handler(HANDLER, handler)

    return undo


def last_words(logs: ProcessLogs, error: BaseException) -> str:
    """The last lines of processes with errors in them, and of the process that ``error`` names.

    Some processes fail without a Python traceback.
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
    """The name of a process for users, and the name of its file without suffix."""
    process = str(data.get("pid"))
    address = ""
    if data.get("ip") not in (None, "", data.get("localhost")):  # on another machine
        address = f"-{data['ip']}"
    if not process.isdigit():  # raylet, autoscaler, gcs_server
        name = AUTOSCALER if process == AUTOSCALER else "ray"
        return name, f"{name}{address}"
    actor = str(data.get("actor_name") or data.get("task_name") or "process")
    name = NAMES.get(actor, "")
    if not name:  # PolicyWorker is "policy"
        identifier = re.sub(r"\W+", "_", actor).strip("_")
        name = identifier.removesuffix("Worker").lower() or "process"
    return name, f"{name}{address}-{process}"

"""What the run's processes print: each has a file in the run's folder, and what is meant for the user is shown.

Invariant: every line that Ray brings to the driver is in a file; on the terminal are those of the user's code (the
controller, environments, agents, models), as they were printed. Loading bars and warnings of libraries on standard
error, and what engines and Ray itself have to say, are in the files alone. An error ends the run with its traceback as
before, with the last lines of a process that died without one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skyasync.observability.lines import write_plainly

Show = Callable[[Sequence[str], bool], None]

HANDLER = "ray_print_logs"  # Ray's own, which prints; by this name Ray removes it when it ends
#: Classes of actors -> what users call them.
NAMES = {"_EngineActor": "engine", "RpcActor": "environment", "Controller": "controller"}
SILENT = {"engine", "ray"}
AUTOSCALER, _EVENT = "autoscaler", ":event_summary:"
TAIL = 40  # lines
BURST, PER_S = 200, 100  # lines of one process that are shown at once, and from then on
STRAGGLERS_S = 0.6  # Ray looks at its files twice as often

_BAR = re.compile(r"\d+%\|.*\||\[\d+:\d\d<.*(it/s|s/it)|\bLoading .*: +\d+%")
_LIBRARY = re.compile(r"^\S*/(site|dist)-packages/\S+:\d+: \w*Warning: |^/usr/lib/\S+:\d+: \w*Warning: ")
_MODELS = re.compile(r"^Loading weights$|^Failed to load CPU gemm_4bit_forward ")  # of transformers, of bitsandbytes
_RAY = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [A-Z] \d+ \d+\] |^\[W\d+ .*\.cpp:\d+\] ")
_FAILED = re.compile(r"Traceback|\b\w*(Error|Exception)\b|\bFatal\b|SIG[A-Z]{3,}|Segmentation|Aborted")


class ProcessLogs:
    """Takes batches of lines as Ray's log monitor makes them (its keys ``pid``, ``actor_name``, ``is_err``, ``lines``).

    Args:
        folder: has a file ``<name>-<pid>.log`` for each process.
        show: called with what the user is to see, and whether it came from standard error; by default it is written
            there.
        hide: removes secrets from a line.
    """

    def __init__(
        self, folder: Path, show: Show | None = None, *, hide: Callable[[str], str] = lambda line: line
    ) -> None:
        self.folder, self.show, self._hide = folder, write_plainly if show is None else show, hide
        self._shown: dict[str, _LineBudget] = {}
        self._warned: set[str] = set()  # processes whose last line was a library's warning: its source follows

    def __call__(self, data: Mapping[str, Any]) -> None:
        """Never raises: it is called in Ray's thread."""
        try:
            self._take(data)
        except OSError:
            self.show(
                [self._hide(str(line)) for line in data.get("lines", ())], bool(data.get("is_err"))
            )  # no room for the file

    @contextmanager
    def shown_by(self, show: Show) -> Iterator[None]:
        """Inside it is this one that shows."""
        former, self.show = self.show, show
        try:
            yield
        finally:
            self.show = former

    def tail(self, process: int | None = None) -> dict[str, list[str]]:
        """The last lines of processes that speak of errors, by the file's name; of the one with this number in any
        case."""
        found = {}
        for file in sorted(self.folder.glob("*.log")):
            own = process is not None and file.stem.endswith(f"-{process}")
            if not own and file.stem.partition("-")[0] in ("controller", "driver", "ray"):
                continue
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
            if lines and (own or any(map(_FAILED.search, lines))):
                found[file.name] = lines
        return found

    def _take(self, data: Mapping[str, Any]) -> None:
        lines, error = [self._hide(str(line)) for line in data.get("lines", ())], bool(data.get("is_err"))
        name, key = _name(data), _key(data)
        if name == AUTOSCALER:  # whose log has pages of its state, every few seconds
            lines = [line.partition(_EVENT)[2].strip() for line in lines if _EVENT in line]
        if not lines:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{key}.log").open("a", encoding="utf-8", errors="replace") as file:
            file.write("".join(f"{line}\n" for line in lines))
        if name in SILENT:
            return
        meant = self._meant(key, lines) if error else lines
        if meant:
            self._show(key, meant, error)

    def _meant(self, key: str, lines: Sequence[str]) -> list[str]:
        """What somebody wrote for the user to read."""
        kept = []
        for line in lines:
            source = key in self._warned and line.startswith("  ")
            self._warned.discard(key)
            if _LIBRARY.search(line):
                self._warned.add(key)
            elif not source and not any(noise.search(line) for noise in (_BAR, _MODELS, _RAY)):
                kept.append(line)
        return kept

    def _show(self, key: str, lines: list[str], error: bool) -> None:
        allowance = self._shown.setdefault(key, _LineBudget())
        allowed = allowance.take(len(lines))
        shown, left = lines[:allowed], len(lines) - allowed
        if left and not allowance.reported:
            shown.append(f"(more than {PER_S} lines per second: the rest is in {self.folder / key}.log)")
        allowance.reported = left > 0
        if shown:
            self.show(shown, error)


class _LineBudget:
    """How many lines of a process may be shown now."""

    def __init__(self) -> None:
        self._left, self._at, self.reported = float(BURST), time.monotonic(), False

    def take(self, wanted: int) -> int:
        now = time.monotonic()
        self._left, self._at = min(BURST, self._left + PER_S * (now - self._at)), now
        taken = min(wanted, int(self._left))
        self._left -= taken
        return taken


def bring_to(logs: ProcessLogs) -> Callable[[], None]:
    """Send what Ray would print to ``logs``; nothing comes if Ray's ``log_to_driver`` is off.

    What Ray itself reports of failures (pages of a raylet's state, for one) goes to the file ``ray.log`` alone.

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
    """What processes that speak of errors have printed last: some die without a traceback that Python knows of."""
    time.sleep(STRAGGLERS_S)
    found = logs.tail(process_of(error)) if logs.folder.is_dir() else {}
    return "".join(f"\n\nThe last lines of logs/{name}:\n" + "\n".join(lines) for name, lines in found.items())


def process_of(error: BaseException) -> int | None:
    """The process whose death an error of Ray's tells of."""
    found = re.search(r"\bpid: (\d+)", str(error))
    return int(found[1]) if found else None


def _name(data: Mapping[str, Any]) -> str:
    if not str(data.get("pid")).isdigit():  # raylet, autoscaler, gcs_server
        return AUTOSCALER if data.get("pid") == AUTOSCALER else "ray"
    name = str(data.get("actor_name") or data.get("task_name") or "process")
    return NAMES.get(name) or re.sub(r"\W+", "_", name).strip("_").removesuffix("Worker").lower() or "process"


def _key(data: Mapping[str, Any]) -> str:
    """The file's name: processes of other machines have the machine's in it."""
    name, here = _name(data), data.get("ip") in (None, "", data.get("localhost"))
    place = "" if here else f"-{data['ip']}"
    return f"{name}{place}-{data['pid']}" if str(data.get("pid")).isdigit() else f"{name}{place}"

"""Run a training program as a child, and inject faults from outside until the time is over.

```
schedule ──▶ due ──▶ processes of the run (family) ──▶ SIGKILL, SIGSTOP
             └───▶ orders ──▶ its controller
metrics.jsonl ──▶ steps, with the time at which they were there
```

Invariant: signals are sent to descendants of the child only. When the child ends, the same command is started again,
unless it is done, its time is over, or it ends repeatedly without finishing a step. The schedule's clock stops from
each start of the command or its controller to the first finished step: a run that fails while it starts reports an
error and ends, so there would be nothing else to test.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from skyasync.observability.jsonl import read_rows
from skyasync.observability.run_dir import read_status
from tests.chaos.audit import Ending, Outcome, Seen, in_words
from tests.chaos.channel import MISSED_S, VARIABLE, Order, Orders
from tests.chaos.events import Event
from tests.chaos.process_tree import Process, family, parts

TICK_S = 0.1
LOOK_S = 1.0  # seconds between two scans of all processes
GONE_S = 30.0  # seconds in which the processes of a killed program have to end
MOST_ENDS = 4  # ends without a finished step in between, until the driver gives up
TERMINATED_S = 120.0
ERROR = re.compile(r"^[A-Za-z_][\w.]*(\(\w+\))?: .+$", re.MULTILINE)  # the end of a traceback
LONGEST = 400  # characters of the traceback
ENVIRONMENT = (
    VARIABLE,
    "TMPDIR",
    "RAY_TMPDIR",
)  # environment of the program: its scratch folder, which is also Ray's


def scratch_folder() -> Path:
    """A folder with a short name: the paths of Ray's sockets begin with it, and their length is limited."""
    return Path(tempfile.mkdtemp(prefix="chaos"))


@dataclass(frozen=True)
class Command:
    """Args: program: with its arguments. folder: the run's, by its name. scratch: for orders and temporary files."""

    program: Sequence[str]
    folder: Path
    scratch: Path


@dataclass
class FaultDriver:
    """One run with fault injection.

    Args:
        events: those of the schedule.
        seconds: how long events are injected; after that the run has ``grace_s`` to end.
        say: called with a message for every event.
    """

    command: Command
    events: Iterator[Event]
    seconds: float
    grace_s: float
    say: Callable[[str], None] = print
    seen: Seen = field(default_factory=Seen)
    known: dict[tuple[int, str], Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seen.began = time.time()
        self._orders, self._folder = Orders(self.command.scratch), self.command.folder
        self._next = next(self.events)
        self._due_events: list[Event] = []
        self._ordered: list[tuple[Event, float]] = []
        self._frozen: list[tuple[float, Process]] = []
        self._looked, self._size, self._ends = 0.0, -1, 0
        self._driver_hit = self._up = False
        self._controllers: set[Process] = set()
        self._clock, self._ticked = 0.0, 0.0  # the schedule's time, and when it was last updated

    def run(self) -> Seen:
        """Return when the program is done or its time is over."""
        self._start("the beginning")
        try:
            while not self._over():
                time.sleep(TICK_S)
                self._look()
                self._tick()
                self._thaw()
                self._strike()
        finally:
            self._thaw(all_of_them=True)
            self._finish()
        return self.seen

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.time() - self.seen.began

    # ---------------------------------------------------------------- the program

    def _start(self, why: str) -> None:
        environment = {**os.environ, **dict.fromkeys(ENVIRONMENT, str(self.command.scratch))}
        self.seen.starts.append((self.now, why))
        self._began = self.now
        self._child = subprocess.Popen(
            self.command.program, env=environment, start_new_session=True
        )
        self._driver_hit = self._up = False
        self._size = -1

    @property
    def folder(self) -> Path:
        """The folder of the run; if the name was taken, the folder's name ends with a number."""
        own = self.command.folder
        for folder in sorted(own.parent.glob(f"{own.name}*"), reverse=True):
            if read_status(folder).pid == self._child.pid:
                self._folder = folder
        return self._folder

    def _tick(self) -> None:
        now = self.now
        self._clock += (now - self._ticked) if self._up else 0.0
        self._ticked = now

    def _over(self) -> bool:
        """Whether the program is done or gives up. If it was killed or has failed, start it again."""
        status = self._child.poll()
        if status is None:
            return self._late()
        self._look(at_once=True)
        if status == 0:
            self.seen.ended = "the command was done"
            return True
        if self._driver_hit:
            why = "its driver was killed"
        else:
            ending = Ending(self._began, self.now, f"status {status}", self._error())
            self.seen.endings.append(ending)
            why = f"it had ended by itself, {ending}"
        self._ends = 0 if self._driver_hit else self._ends + 1
        if self._ends >= MOST_ENDS or self.now > self.seconds + self.grace_s:
            self.seen.ended = f"given up: {why}, {self._ends} times in a row without a step"
            return True
        took = self._await_gone(GONE_S)
        self._start(f"{why}; its processes were gone after {took:.1f} s")
        self.say(f"{self.now:7.1f} s  the same command again: {self.seen.starts[-1][1]}")
        return False

    def _late(self) -> bool:
        if self.now <= self.seconds + self.grace_s:
            return False
        self.seen.ended = "its time was over"
        return True

    def _error(self) -> str:
        """The last line of the traceback of the current start of the command; "" if there is none."""
        try:
            file = self._folder / "error.txt"
            fresh = file.stat().st_mtime >= self.seen.began + self._began
            text = file.read_text(encoding="utf-8", errors="replace") if fresh else ""
        except OSError:
            return ""
        lines = list(ERROR.finditer(text.partition("\n\nThe last lines of logs/")[0]))
        return lines[-1][0][:LONGEST] if lines else ""

    def _await_gone(self, patience_s: float) -> float:
        """Seconds until no process of the run is left: two commands at once would write to one folder."""
        began = time.time()
        while time.time() - began < patience_s and any(
            p.alive for ps in parts(self.known.values()).values() for p in ps
        ):
            time.sleep(TICK_S)
        return time.time() - began

    def _finish(self) -> None:
        asked = self._child.poll() is None
        if asked:
            self._child.terminate()
        try:
            status = self._child.wait(TERMINATED_S)
            how = (
                ""
                if not asked or status in (0, 128 + signal.SIGTERM, -signal.SIGTERM)
                else f"status {status}"
            )
        except subprocess.TimeoutExpired:
            how = f"still there {TERMINATED_S:g} s later"
            self._look(at_once=True)
            for process in self.known.values():
                process.send(signal.SIGKILL)
            self._child.wait()
        if how:
            self.seen.endings.append(
                Ending(self._began, self.now, f"at SIGTERM: {how}", self._error())
            )
        self._look(at_once=True)
        self._settle_orders(last=True)
        taken = self._orders.taken()  # more orders may have been reported since
        met = [
            replace(outcome, hit=taken.get(outcome.event.number, outcome.hit))
            for outcome in self.seen.outcomes
        ]
        self.seen.outcomes = sorted(met, key=lambda outcome: outcome.event.number)
        self.seen.seconds = self.now

    # ---------------------------------------------------------------- observation

    def _look(self, *, at_once: bool = False) -> None:
        metrics = self._folder / "metrics.jsonl"
        size = metrics.stat().st_size if metrics.exists() else -1
        if size != self._size:
            self._up |= self._size >= 0 and size >= 0
            self._size, before = size, len(self.seen.steps)
            rows = read_rows(metrics)
            self.seen.step(self.now, max((row["step"] for row in rows), default=0))
            self._ends = 0 if len(self.seen.steps) > before else self._ends
        if at_once or self.now - self._looked > LOOK_S:
            self._looked, former = self.now, self._folder
            self._size = self._size if self.folder == former else -1
            self._meet(family(self._child.pid))
            self._settle_orders()

    def _meet(self, processes: Sequence[Process]) -> None:
        """Remember processes by their current titles; the parts of a new controller have to start first."""
        controllers = {
            process for process in parts(processes).get("controller", []) if process.alive
        }
        self._up &= not controllers or controllers == self._controllers
        self._controllers = controllers or self._controllers
        self.known.update({(process.number, process.born): process for process in processes})

    def _settle_orders(self, *, last: bool = False) -> None:
        """Record the results of the orders that were given."""
        taken = self._orders.taken()
        for event, given in list(self._ordered):
            if event.number in taken or last or self.now > given + event.lasts + MISSED_S + 1:
                self._ordered.remove((event, given))
                self._note(event, given, taken.get(event.number, ""))

    # ---------------------------------------------------------------- faults

    def _strike(self) -> None:
        while self._next.at <= self._clock and self.now <= self.seconds:
            self._due_events.append(self._next)
            self._next = next(self.events)
        for event in list(self._due_events) if self._up else ():
            if self._do(event) or self._clock > event.at + MISSED_S:
                self._due_events.remove(event)

    def _do(self, event: Event) -> bool:
        """Whether the event is done; an event without a target is retried for a while."""
        if event.about.inside:
            until = time.time() + (event.lasts or 0.0) + MISSED_S * (event.lasts == 0)
            self._orders.give(Order(event.number, event.kind, until, event.lasts, event.pick))
            self._ordered.append((event, self.now))
            return True
        process = self._target(event)
        if process is None:
            if self._clock > event.at + MISSED_S:
                self._note(event, self.now, "")
            return False
        self._hit(event, process)
        return True

    def _target(self, event: Event) -> Process | None:
        own = family(self._child.pid)
        self._meet(own)
        if event.about.target == "driver":
            found = [
                process
                for process in own
                if process.number == self._child.pid and "controller" in parts(own)
            ]
        else:
            frozen = {process for _, process in self._frozen}
            found = [
                process
                for process in parts(own).get(event.about.target, [])
                if process not in frozen
            ]
        return found[int(event.pick * len(found))] if found else None

    def _hit(self, event: Event, process: Process) -> None:
        if event.about.deed == "kill":
            self._driver_hit |= event.about.target == "driver"
            done = process.send(signal.SIGKILL)
        else:
            done = process.send(signal.SIGSTOP)
            self._frozen.append((self.now + event.lasts, process))
        self._note(event, self.now, f"{event.about.target} {process.number}" if done else "")

    def _thaw(self, *, all_of_them: bool = False) -> None:
        for end, process in list(self._frozen):
            if self.now >= end or not process.alive or (all_of_them and end < float("inf")):
                self._frozen.remove((end, process))
                process.send(signal.SIGCONT)

    def _note(self, event: Event, at: float, hit: str) -> None:
        self.seen.outcomes.append(Outcome(event, at, hit))
        self.say(f"{at:7.1f} s  {in_words(event)}: {hit or 'nothing was there'}")

"""The state of every prompt of a run, who owns it, and how each one ended.

```
 (stream) ──start──▶ in flight ──finish──▶ finished ──close──▶ trained | rejected | given up
```

| state     | owned by                                  | what becomes of it when its owner fails                      |
|-----------|-------------------------------------------|--------------------------------------------------------------|
| (stream)  | the position in the prompt stream, until  | it is a number in every checkpoint                           |
|           | the plan admits it                        |                                                              |
| in flight | the generator's task                      | an engine or environment: another one continues it; a rank,  |
|           |                                           | the controller, the program: the resumed run has the tokens  |
|           |                                           | that the checkpoint holds, or generates it again             |
| finished  | this ledger, and the plan's buffer        | the checkpoint holds the group; the resumed run trains it    |
| closed    | the step that trained or rejected it      | a step half done is not counted: it is made again from the   |
|           |                                           | checkpoint before it                                         |

Pure: no asyncio, no I/O. Invariant: a prompt is open from its start to its close and is in one state at a time;
what a checkpoint keeps of the open ones is exactly what a resumed run is given back, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

G = TypeVar("G")  # what a finished prompt has become
End = Literal["trained", "rejected", "given_up"]
Line = dict[str, object]
UNDONE = "undone"  # in a line: prompts that earlier lines have as trained


@dataclass
class Ledger(Generic[G]):
    """The prompts of one run, by name (epoch and row).

    Attributes:
        versions: open prompt -> the policy version when it was started.
        finished: those of them whose group is complete, and the group.
    """

    versions: dict[str, int] = field(default_factory=dict)
    finished: dict[str, G] = field(default_factory=dict)
    _given_back: dict[str, G] = field(default_factory=dict)  # of a checkpoint, not requested yet
    _ended: dict[str, dict[str, str]] = field(default_factory=dict)  # since the last line: name -> why

    def start(self, name: str, version: int) -> G | None:
        """A prompt is requested. Its group, if the run before had finished it; else it is in flight from here on."""
        self.versions.setdefault(name, version)
        group = self._given_back.pop(name, None)
        if group is not None:
            self.finished[name] = group
        return group

    def finish(self, name: str, group: G) -> None:
        """Its group is complete."""
        if name in self.versions:
            self.finished[name] = group

    def close(self, names: Iterable[str], end: End, reason: str = "") -> None:
        """Note how they ended. One that was never started (a plan has it from another source) is counted too."""
        for name in names:
            self.versions.pop(name, None)
            self.finished.pop(name, None)
            self._ended.setdefault(end, {})[name] = reason

    def undo(self, names: Iterable[str], reason: str) -> None:
        """The steps that trained them have been undone, and their data is not trained another time."""
        self._ended.setdefault(UNDONE, {}).update(dict.fromkeys(names, reason))

    def line(self) -> Line:
        """The prompts that have ended since the last call, by end: their names, with a reason if one is known."""
        ended, self._ended = {end: names for end, names in self._ended.items() if names}, {}
        return {end: dict(names) if any(names.values()) else list(names) for end, names in ended.items()}

    def restore(self, versions: Mapping[str, int], finished: Mapping[str, G]) -> None:
        """Take over the open prompts of a checkpoint."""
        self.versions, self.finished, self._given_back = dict(versions), {}, dict(finished)


def audit(lines: Iterable[Mapping[str, object]]) -> dict[str, list[str]]:
    """Every prompt of a ``ledger.jsonl`` and how it ended, as ``end@step``; more than one entry is one too many."""
    outcomes: dict[str, list[str]] = {}
    for line in lines:
        names = {end: [str(n) for n in value] for end, value in line.items() if isinstance(value, Mapping | list)}
        for name in names.get(UNDONE, ()):
            outcomes[name] = [end for end in outcomes.get(name, []) if not end.startswith("trained@")]
            outcomes[name].append(f"given_up@{line['step']}")
        for end in ("trained", "rejected", "given_up"):
            for name in names.get(end, ()):
                outcomes.setdefault(name, []).append(f"{end}@{line['step']}")
    return outcomes


def trained_after(lines: Iterable[Mapping[str, object]], step: int) -> list[str]:
    """The prompts that steps after this one have trained, if that has not been undone."""
    by_name = ((name, outcome.partition("@")) for name, outcomes in audit(lines).items() for outcome in outcomes)
    return [name for name, (end, _, when) in by_name if end == "trained" and int(when) > step]

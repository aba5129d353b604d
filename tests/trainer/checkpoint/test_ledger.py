"""A prompt is open from its start to its close, and a resumed run gets back exactly the open prompts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from skyasync.trainer.extensions.prompt_ledger import Ledger, audit, trained_after


class AnyRun(RuleBasedStateMachine):
    """Prompts start, finish and end in any order, and the run is interrupted at any moment."""

    running = Bundle("running")
    ready = Bundle("ready")

    def __init__(self) -> None:
        super().__init__()
        self.ledger: Ledger[str] = Ledger()
        self.next = 0
        self.open: dict[str, int] = {}
        self.done: dict[str, str] = {}
        self.trained_in: dict[str, int] = {}
        self.lines: list[dict[str, object]] = []

    @rule(target=running)
    def start(self) -> str:
        self.next += 1
        name = f"e0-i{self.next}"
        self.open[name] = self.next // 3
        assert self.ledger.start(name, self.next // 3) is None
        return name

    @rule(target=ready, name=consumes(running))
    def finish(self, name: str) -> str:
        self.ledger.start(name, 99)  # again, after an interruption: it keeps its staleness
        self.ledger.finish(name, f"group of {name}")
        return name

    @rule(name=consumes(ready), end=st.sampled_from(["trained", "rejected", "given_up"]))
    def close(self, name: str, end: str) -> None:
        self.ledger.close([name], end, "why" if end == "given_up" else "")  # type: ignore[arg-type]
        del self.open[name]
        self.done[name] = end
        if end == "trained":
            self.trained_in[name] = len(self.lines) + 1

    @rule()
    def end_step(self) -> None:
        self.lines.append({"step": len(self.lines) + 1, **self.ledger.line()})

    @rule(back=st.integers(0, 5))
    def roll_back(self, back: int) -> None:
        """Restore the weights of an earlier step."""
        self.end_step()
        step = max(0, len(self.lines) - back)
        undone = sorted(name for name, when in self.trained_in.items() if when > step)
        assert sorted(trained_after(self.lines, step)) == undone
        self.ledger.undo(undone, "undone")
        for name in undone:
            del self.trained_in[name]
            self.done[name] = "given_up"
        self.end_step()

    @rule()
    def interrupt(self) -> None:
        self.end_step()
        versions, finished = dict(self.ledger.versions), dict(self.ledger.finished)
        for _ in range(2):  # the second time before any prompt is requested again
            saved = dict(self.ledger.versions), dict(self.ledger.finished)
            assert saved == (versions, finished)
            self.ledger = Ledger()
            self.ledger.restore(*saved)
        for name in versions:
            assert self.ledger.start(name, 99) == finished.get(name)
            assert self.ledger.start(name, 99) is None, "once"

    @invariant()
    def every_open_prompt_has_its_staleness(self) -> None:
        assert self.ledger.versions == self.open
        assert set(self.ledger.finished) <= set(self.open)

    def teardown(self) -> None:
        self.end_step()
        found = audit(self.lines)
        assert {name: ends[0].partition("@")[0] for name, ends in found.items()} == self.done
        assert all(len(ends) == 1 for ends in found.values())


TestAnyRun = AnyRun.TestCase


def test_a_prompt_that_no_step_started_is_counted_all_the_same() -> None:
    ledger: Ledger[str] = Ledger()
    ledger.finish("e0-i1", "brought along")
    ledger.close(["e0-i1"], "trained")
    assert ledger.line() == {"trained": ["e0-i1"]}
    assert ledger.line() == {}


@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=8))
def test_the_audit_tells_what_was_trained_twice(names: list[str]) -> None:
    lines = [{"step": step, "trained": [name]} for step, name in enumerate(names)]
    assert {name: len(ends) for name, ends in audit(lines).items()} == {
        name: names.count(name) for name in set(names)
    }


def test_a_reason_is_written_with_the_name() -> None:
    ledger: Ledger[str] = Ledger()
    ledger.close(["e0-i1"], "given_up", "TimeoutError")
    assert ledger.line() == {"given_up": {"e0-i1": "TimeoutError"}}


def test_what_was_trained_and_undone_is_given_up_and_no_more_trained() -> None:
    ledger: Ledger[str] = Ledger()
    lines = [{"step": 1, "trained": ["a"]}, {"step": 2, "trained": ["b"], "rejected": ["c"]}]
    assert trained_after(lines, 1) == ["b"] and trained_after(lines, 0) == ["a", "b"]
    ledger.undo(["b"], "why")
    lines.append({"step": 3, **ledger.line()})
    assert lines[-1] == {"step": 3, "undone": {"b": "why"}}
    assert audit(lines) == {"a": ["trained@1"], "b": ["given_up@3"], "c": ["rejected@2"]}
    assert trained_after(lines, 1) == [], "once"

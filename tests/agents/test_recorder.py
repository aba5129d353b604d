"""From calls to training sequences: every sampled token once, after exactly the tokens that the engine had read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from skyasync.agents.recorder import RecordedCall, Recorder, sequences
from skyasync.arrays import ints
from skyasync.rollout.types import Segment

TOKENS = st.lists(
    st.integers(0, 2), min_size=1, max_size=3
)  # few different tokens, so that prompts often begin alike


def call(prompt: list[int], reply: list[int], number: int = 0) -> RecordedCall:
    """Log-probabilities and versions distinguish the calls."""
    return RecordedCall(
        ints(prompt), Segment("action", reply, [-float(number)] * len(reply), [number] * len(reply))
    )


@st.composite
def episodes(draw: st.DrawFn) -> list[RecordedCall]:
    """Calls that start a conversation, extend an earlier one, repeat it, or edit their input."""
    calls: list[RecordedCall] = []
    for number in range(draw(st.integers(1, 8))):
        prompt = draw(TOKENS)
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls))
            kept = draw(st.sampled_from([earlier.tokens, earlier.prompt, earlier.tokens[1:]]))
            prompt = kept.tolist() + draw(st.sampled_from([prompt, []])) or prompt
        calls.append(call(prompt, draw(TOKENS), number))
    return calls


def read_and_written(sequence: list[Segment]) -> list[tuple[list[int], Segment]]:
    """Each action with all tokens before it."""
    found: list[tuple[list[int], Segment]] = []
    before: list[int] = []
    for segment in sequence:
        if segment.kind == "action":
            found.append((before, segment))
        before = before + segment.tokens.tolist()
    return found


@given(episodes())
def test_every_call_is_one_action_after_exactly_the_tokens_it_read(
    calls: list[RecordedCall],
) -> None:
    found = [pair for sequence in sequences(calls) for pair in read_and_written(sequence)]
    assert len(found) == len(calls)
    for c in calls:
        assert [before for before, action in found if action is c.action] == [c.prompt.tolist()]


@given(episodes())
def test_sequences_come_in_the_order_of_their_last_calls(calls: list[RecordedCall]) -> None:
    order = {id(c.action): number for number, c in enumerate(calls)}
    ends = [order[id(sequence[-1])] for sequence in sequences(calls)]
    assert ends == sorted(ends)
    assert ends[-1] == len(calls) - 1


@given(episodes())
def test_whatever_extends_the_end_of_a_sequence_goes_on_with_it(calls: list[RecordedCall]) -> None:
    """A sequence is appended to another only if that one ended before the sequence began."""
    order = {id(c.action): number for number, c in enumerate(calls)}
    found = sequences(calls)
    for late in found:
        first = calls[order[id(read_and_written(late)[0][1])]]
        for early in found:
            end = calls[order[id(early[-1])]]
            if order[id(end.action)] < order[id(first.action)]:
                assert first.prompt[: len(end.tokens)].tolist() != end.tokens.tolist()


@given(TOKENS, st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=6))
def test_a_conversation_is_one_sequence(
    prompt: list[int], turns: list[tuple[list[int], list[int]]]
) -> None:
    calls: list[RecordedCall] = []
    for reply, said in turns:
        calls.append(call(prompt, reply))
        prompt = calls[-1].tokens.tolist() + said
    (sequence,) = sequences(calls)
    assert [s.kind for s in sequence] == [
        "prompt",
        "action",
        *["observation", "action"] * (len(calls) - 1),
    ]


def test_a_second_reply_to_the_same_prompt_is_a_sequence_of_its_own() -> None:
    first, second, third = call([1], [2]), call([1], [3]), call([1, 2, 4], [5])
    found = [
        [s.tokens.tolist() for s in sequence] for sequence in sequences([first, second, third])
    ]
    assert found == [[[1], [3]], [[1], [2], [4], [5]]]


def test_an_action_is_context_where_it_was_only_read() -> None:
    asked = [call([1], [2]), call([1, 2, 3], [4]), call([1, 2, 9], [5])]
    edited = sequences(asked)[1]
    assert [(s.kind, s.tokens.tolist()) for s in edited] == [("prompt", [1, 2, 9]), ("action", [5])]


def test_a_conversation_is_found_by_its_longest_recorded_beginning() -> None:
    recorder = Recorder()
    first, second = call([1], [2]), call([1, 2, 3], [4])
    recorder.record(first, ["tools", "a", "b"])
    recorder.record(second, ["tools", "a", "b", "c", "d"])
    recorder.record(call([7], [8]))
    assert recorder.extended_by(["tools", "a", "b", "x"]) == (first, 3)
    assert recorder.extended_by(["tools", "a", "b", "c", "d", "e"]) == (second, 5)
    assert recorder.extended_by(["other tools", "a", "b"]) is None
    assert recorder.extended_by(["tools", "a"]) is None

"""Requests and outputs of engines: arrays from any source, and cheap to send."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.interface import (
    BACKENDS,
    ENGINES,
    REQUIRED,
    EngineConfig,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    InferenceEngine,
    NotSupportedError,
    SamplingParams,
)
from skyasync.inference.ray_engine import MESSAGE_TOKENS, RayEngine, messages
from tests.inference.output_lists import listed


def test_lists_become_arrays_and_arrays_stay_themselves():
    tokens = np.array([1, 2], dtype=np.int32)
    assert GenerationOutput("r", tokens, [-0.5, -0.25], [0, 0]).token_ids is tokens
    assert GenerationRequest("r", [1, 2], SamplingParams()).prompt_token_ids.dtype == np.int32
    assert listed(GenerationOutput("r", [1, 2], [-0.5, -0.25], [0, 1])).versions == [0, 1]


def test_an_answer_travels_as_it_is():
    for tokens in ([], [7, 2**31 - 1]):
        sent = GenerationOutput("r", tokens, [-0.1] * len(tokens), [3] * len(tokens), "length")
        assert listed(pickle.loads(pickle.dumps(sent))) == listed(sent)


def test_an_answer_weighs_little_more_than_its_twelve_bytes_per_token():
    answers = [GenerationOutput(f"r{i}", [1] * 16, [-0.5] * 16, [0] * 16) for i in range(100)]
    assert len(pickle.dumps(answers)) < 100 * (12 * 16 + 40)


def test_long_answers_travel_in_several_messages_in_order():
    long = np.zeros(MESSAGE_TOKENS // 2, np.int32)
    answers = [GenerationOutput(f"r{i}", long, long, long, "stop") for i in range(5)]
    found = list(messages(answers))
    assert [len(message) for message in found] == [2, 2, 1]
    assert [output for message in found for output in message] == answers
    assert list(messages([])) == []


#: By setting: values that no engine may receive, and values that all can execute.
NUMBERS: dict[str, tuple[list[Any], list[Any]]] = {
    "max_tokens": ([0, -1, 2**31, 10**400, 1.5, None, True], [1, 2**31 - 1, np.int64(3)]),
    "min_tokens": ([-1, 2**31], [0, 2**31 - 1]),
    "temperature": (
        [-1, -1e-9, 1e-300, 1e-40, 0.0099, 100.1, 1e39, 10**400, float("nan"), float("inf"), "1"],
        [0, 0.01, 100],
    ),
    "top_p": ([0, -0.1, 1.1, float("nan")], [1e-300, 1]),
    "top_k": ([-2, 2**31, 2**63, 10**30, 1.0], [-1, 0, 2**31 - 1]),
    "min_p": ([-1e-9, 1.1, float("nan")], [0, 1e-300, 1]),
    "presence_penalty": ([-2.1, 2.1, float("nan")], [-2, 2]),
    "frequency_penalty": ([-2.1, 2.1, float("inf")], [-2, 2]),
    "repetition_penalty": (
        [0, -1, 1e-40, 1e-300, 1e39, 1e300, float("nan"), float("inf")],
        [0.01, 100],
    ),
    "seed": ([-2, 2**63, 0.5], [None, 0, 2**62]),
    "stop_token_ids": ([[-1], [2**31], [2**63]], [[0, 2**31 - 1]]),
    "allowed_token_ids": ([[-1], [2**31]], [[0]]),
    "logit_bias": (
        [{-1: 1.0}, {2**31: 1.0}, {1: 101}, {1: float("nan")}, {1: float("-inf")}],
        [{1: -100, 2: 100}],
    ),
    "stop": (["\ud800", ["a", "\udfff"], [1]], ["a", ["a", "\0"]]),
    "bad_words": (["\ud800"], ["a"]),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (wrong, _) in NUMBERS.items() for value in wrong]
)
def test_a_setting_that_no_engine_could_hold_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (_, right) in NUMBERS.items() for value in right]
)
def test_the_last_number_within_its_bounds_is_taken(name: str, value: Any) -> None:
    SamplingParams(**{name: value})


async def test_what_a_backend_does_not_override_is_not_supported() -> None:
    engine = InferenceEngine(EngineConfig("m"))
    with pytest.raises(NotSupportedError, match="InferenceEngine does not support sleep"):
        await engine.sleep()
    with pytest.raises(NotSupportedError, match="does not support successor"):
        engine.successor()


async def test_a_class_of_a_user_gets_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine:
        def __init__(self, config: EngineConfig) -> None:
            self.made_with = config

        async def stats(self) -> EngineStats:
            return EngineStats(running=3)

    monkeypatch.setitem(ENGINES, "mine", Mine)
    config = EngineConfig("m")
    engine: Any = ENGINES.make("mine", config)
    assert (
        engine.made_with is config
        and isinstance(engine, InferenceEngine)
        and not engine.restartable
    )
    assert await engine.progress() == [] and (await engine.stats()).running == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_of_the_table_overrides_what_is_required_and_has_the_tables_capabilities(
    backend: str,
) -> None:
    engine = ENGINES.find(backend)
    assert issubclass(engine, InferenceEngine)
    assert all(getattr(engine, name) is not getattr(InferenceEngine, name) for name in REQUIRED)
    assert ENGINES.describe(engine) == ENGINES.builtins()[backend]


def test_an_engine_in_a_ray_actor_has_every_call_of_the_interface() -> None:
    calls = {
        n
        for n, m in vars(InferenceEngine).items()
        if inspect.iscoroutinefunction(m) or n == "generate"
    }
    assert calls <= vars(RayEngine).keys()


SEQUENCES = sorted(
    f.name for f in fields(SamplingParams) if isinstance(getattr(SamplingParams(), f.name), tuple)
)


def test_these_settings_are_sequences() -> None:
    assert SEQUENCES == ["allowed_token_ids", "bad_words", "stop", "stop_token_ids"]


@given(name=st.sampled_from(SEQUENCES), data=st.data())
def test_a_list_means_what_the_tuple_means_and_can_be_a_key(name: str, data: st.DataObject) -> None:
    members = st.integers(0, 9) if name.endswith("ids") else st.text(max_size=3)
    values = data.draw(st.lists(members, max_size=3))
    for said in (SamplingParams(**{name: values}), replace(SamplingParams(), **{name: values})):  # type: ignore[arg-type]
        assert said == SamplingParams(**{name: tuple(values)})  # type: ignore[arg-type]
        hash(getattr(said, name))


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_one_text_is_a_sequence_of_one(name: str) -> None:
    assert getattr(SamplingParams(**{name: "end"}), name) == ("end",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "none", ["stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias"]
)
def test_none_is_nothing(none: str) -> None:
    assert SamplingParams(**{none: None}) == SamplingParams()  # type: ignore[arg-type]


def test_a_bias_that_was_json_has_numbers_for_tokens() -> None:
    assert SamplingParams(logit_bias={"5": 2}).logit_bias == {5: 2.0}  # type: ignore[dict-item]


async def test_the_embedded_engine_takes_lists(tied_model: str) -> None:
    """From environments, and from requests that came as JSON."""
    engine = TransformersEngine(EngineConfig(tied_model, max_model_len=32, threads=1))
    await engine.start()
    try:
        said = SamplingParams(
            max_tokens=2, stop=["zz"], bad_words=["q"], stop_token_ids=[3], allowed_token_ids=[4, 5]
        )  # type: ignore[arg-type]
        answers = [
            o
            async for outputs in engine.generate([GenerationRequest("a", [1, 2], said)])
            for o in outputs
        ]
        assert set(answers[0].token_ids) <= {4, 5}
    finally:
        await engine.shutdown()

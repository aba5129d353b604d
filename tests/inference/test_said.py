"""What is said to engines: the same whoever says it."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.interface import EngineConfig, GenerationRequest, SamplingParams

SEQUENCES = sorted(f.name for f in fields(SamplingParams) if isinstance(getattr(SamplingParams(), f.name), tuple))


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


@pytest.mark.parametrize("none", ["stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias"])
def test_none_is_nothing(none: str) -> None:
    assert SamplingParams(**{none: None}) == SamplingParams()  # type: ignore[arg-type]


def test_a_bias_that_was_json_has_numbers_for_tokens() -> None:
    assert SamplingParams(logit_bias={"5": 2}).logit_bias == {5: 2.0}  # type: ignore[dict-item]


async def test_the_embedded_engine_takes_lists(tied_model: str) -> None:
    """As an environment returns them, or a request that came as JSON."""
    engine = TransformersEngine(EngineConfig(tied_model, max_model_len=32, threads=1))
    await engine.start()
    try:
        said = SamplingParams(max_tokens=2, stop=["zz"], bad_words=["q"], stop_token_ids=[3], allowed_token_ids=[4, 5])  # type: ignore[arg-type]
        answers = [o async for outputs in engine.generate([GenerationRequest("a", [1, 2], said)]) for o in outputs]
        assert set(answers[0].token_ids) <= {4, 5}
    finally:
        await engine.shutdown()

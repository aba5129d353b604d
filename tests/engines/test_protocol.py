"""What engines are asked and what they answer: arrays, whoever made them, and cheap to send."""

import pickle

import numpy as np

from skyasync.engines.protocol import GenerationOutput, GenerationRequest, SamplingParams
from skyasync.engines.ray_engine import MESSAGE_TOKENS, messages
from tests.engines.listed import listed


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

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skyasync.inference.backends.transformers.sampling import (
    BatchSampler,
    LogitEdits,
    draw,
    edits_logits,
    keep_likely,
    stream_key,
    tokenised,
    uniforms,
)
from skyasync.inference.interface import SamplingParams

CPU = torch.device("cpu")
NEVER = float("-inf")
LOGITS = torch.tensor([2.0, 0.0, -1.0, 1.0, 0.5])


@dataclass
class FakeRow:
    sampling: SamplingParams
    key: int = 0
    prompt: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    stop_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def edited(self) -> bool:
        return edits_logits(self.sampling) or bool(self.bad_words)


def sample(
    logits: torch.Tensor, *rows: FakeRow, position: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    return BatchSampler(rows, CPU)(logits.clone(), np.full(len(rows), position))


def candidates(top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    filtered = keep_likely(
        LOGITS[None], torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])
    )
    return filtered[0].isfinite().nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (2, 1.0, [0, 1]),
        (3, 1.0, [0, 1, 3]),
        (0, 0.49, [0, 1]),
        (0, 0.6, [0, 1, 3]),
        (3, 0.6, [0, 1]),
        (1, 0.1, [0]),
    ],
)
def test_of_equal_logits_exactly_as_many_are_kept_as_asked_for(
    top_k: int, top_p: float, kept: list[int]
) -> None:
    """Four equal logits of probability 0.249 each; those with lower ids come first."""
    logits = torch.tensor([[2.0, 2.0, -4.0, 2.0, 2.0]])
    filtered = keep_likely(
        logits, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([0.0])
    )
    assert filtered[0].isfinite().nonzero()[:, 0].tolist() == kept


def test_a_stream_is_splitmix64():
    """Reference outputs of SplitMix64 from state 1234567 (Rosetta Code), of which the upper 24 bits are used."""
    reference = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    drawn = uniforms(np.full(3, 1234567, dtype=np.uint64), np.arange(3))
    assert drawn.tolist() == [(r >> 40) / 2**24 for r in reference]


def test_streams_are_uniform_and_independent():
    keys = np.array([stream_key(None, 0, f"r{i}") for i in range(1000)], dtype=np.uint64)
    table = np.stack([uniforms(keys, np.full(1000, t)) for t in range(100)], axis=1)
    assert table.min() >= 0 and table.max() < 1
    counts = np.histogram(table, bins=100, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 149  # chi-square, 99 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.02


def test_a_seed_overrides_engine_and_request():
    assert stream_key(7, 0, "a") == stream_key(7, 1, "b")
    assert (
        len(
            {
                stream_key(7, 0, "a"),
                stream_key(8, 0, "a"),
                stream_key(None, 7, "a"),
                stream_key(None, 7, "b"),
            }
        )
        == 4
    )


def test_a_stream_goes_on_after_the_numbers_that_have_been_drawn():
    positions = np.arange(50)
    whole = uniforms(np.full(50, stream_key(7, 0, "a"), np.uint64), positions)
    rest = uniforms(np.full(40, stream_key(7, 0, "a+10", 10), np.uint64), positions[:40])
    assert rest.tolist() == whole[10:].tolist()


def test_draw_covers_each_token_by_its_probability_and_no_impossible_one():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-24])
    assert draw(probs.log().expand(6, 6), uniform).tolist() == [1, 1, 3, 3, 4, 4]


def test_filters_keep_what_they_say():
    assert candidates() == [0, 1, 2, 3, 4]
    assert candidates(top_k=2) == [0, 3]
    assert candidates(top_k=99) == [0, 1, 2, 3, 4]
    probs = LOGITS.softmax(0)  # in falling order: tokens 0, 3, 4, 1, 2
    assert candidates(top_p=float(probs[0] + probs[3]) + 1e-4) == [0, 3, 4]
    assert candidates(top_p=float(probs[0] + probs[3]) - 1e-4) == [0, 3]
    assert candidates(top_p=1e-6) == [0]
    assert candidates(min_p=float(probs[4] / probs[0]) - 1e-4) == [0, 3, 4]


def test_top_p_is_taken_of_what_top_k_leaves():
    probs = LOGITS.softmax(0)
    share = float(probs[0] / (probs[0] + probs[3]))
    assert candidates(top_k=2, top_p=share + 1e-4) == [0, 3]
    assert candidates(top_k=2, top_p=share - 1e-4) == [0]


def test_logprobs_are_those_of_the_distribution_sampled_from():
    row = FakeRow(SamplingParams(temperature=0.7, top_k=3))
    tokens, logprobs = sample(LOGITS[None], row)
    among = (LOGITS[[0, 3, 4]] / 0.7).log_softmax(0)
    assert logprobs[0] == pytest.approx(among[[0, 3, 4].index(int(tokens[0]))].item(), abs=1e-6)


def test_greedy_takes_the_likeliest_and_reports_it_untempered_and_unfiltered():
    tokens, logprobs = sample(LOGITS[None], FakeRow(SamplingParams(temperature=0.0, top_k=2)))
    assert tokens.tolist() == [0]
    assert logprobs[0] == pytest.approx(LOGITS.log_softmax(0)[0].item())


def test_frequencies_follow_the_distribution():
    rows = [
        FakeRow(SamplingParams(temperature=1.5, top_p=0.95), key=stream_key(i, 0, ""))
        for i in range(20_000)
    ]
    tokens, _ = sample(LOGITS.repeat(len(rows), 1), *rows)
    one = torch.ones(1)
    filtered = keep_likely(LOGITS[None] / 1.5, torch.tensor([0]), 0.95 * one, 0 * one)
    expected = filtered[0].softmax(0) * len(rows)
    counts = tokens.bincount(minlength=5)
    possible = expected > 0
    assert 1 < possible.sum() <= 5 and counts[~possible].sum() == 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 18.5  # at most 4 degrees of freedom, p = 0.001


def test_a_row_is_sampled_alike_whatever_its_neighbours_want():
    row = FakeRow(SamplingParams(), key=5)
    alone = sample(LOGITS[None], row, position=3)
    neighbours = [
        FakeRow(SamplingParams(temperature=0.5, top_k=2), key=6),
        FakeRow(SamplingParams(temperature=0.0)),
    ]
    among = sample(LOGITS.repeat(3, 1), neighbours[0], row, neighbours[1], position=3)
    assert (among[0][1], among[1][1]) == (alone[0][0], alone[1][0])


def test_repetition_penalty_weakens_tokens_of_prompt_and_response():
    row = FakeRow(
        SamplingParams(temperature=0.0, repetition_penalty=4.0), prompt=[0], token_ids=[2]
    )
    tokens, logprobs = sample(LOGITS[None], row)
    assert tokens.tolist() == [3]
    assert logprobs[0] == pytest.approx(
        torch.tensor([0.5, 0.0, -4.0, 1.0, 0.5]).log_softmax(0)[3].item()
    )


def test_min_tokens_forbids_stop_tokens_until_then():
    params = SamplingParams(temperature=0.0, min_tokens=2)
    stops = frozenset({0})
    assert sample(LOGITS[None], FakeRow(params, stop_ids=stops, token_ids=[1]), position=1)[
        0
    ].tolist() == [3]
    assert sample(LOGITS[None], FakeRow(params, stop_ids=stops, token_ids=[1, 1]), position=2)[
        0
    ].tolist() == [0]


def edited(
    token_ids: list[int] | None = None, bad_words: tuple[tuple[int, ...], ...] = (), **sampling: Any
) -> Tensor:
    """The edited ``LOGITS``, up to a constant, from the greedy log-probabilities of the five tokens."""
    row = FakeRow(
        SamplingParams(temperature=0.0, **sampling),
        prompt=[4],
        token_ids=token_ids or [],
        bad_words=bad_words,
    )
    logits = LOGITS[None].clone()
    LogitEdits([row], CPU)(logits, np.array([len(row.token_ids)]))
    return logits[0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"logit_bias": {1: 3.0, 2: -1.0}}, [2, 3, -2, 1, 0.5]),
        ({"allowed_token_ids": (3, 1)}, [NEVER, 0, NEVER, 1, NEVER]),
        ({"allowed_token_ids": (3, 1), "logit_bias": {1: 3.0}}, [NEVER, 3, NEVER, 1, NEVER]),
        ({"bad_words": ((3,), (0,))}, [NEVER, 0, -1, NEVER, 0.5]),
        ({"bad_words": ((1, 2, 3),), "token_ids": [0, 1, 2]}, [2, 0, -1, NEVER, 0.5]),
        ({"bad_words": ((1, 2, 3),), "token_ids": [0, 2]}, [2, 0, -1, 1, 0.5]),
        ({"presence_penalty": 0.5, "token_ids": [0, 0, 1]}, [1.5, -0.5, -1, 1, 0.5]),
        ({"frequency_penalty": 0.5, "token_ids": [0, 0, 1]}, [1, -0.5, -1, 1, 0.5]),
        (
            {"repetition_penalty": 2.0, "token_ids": [0, 2]},
            [1, 0, -2, 1, 0.25],
        ),  # 4 is in the prompt
        (
            {"repetition_penalty": 2.0, "presence_penalty": 1.0, "token_ids": [0]},
            [0, 0, -1, 1, 0.25],
        ),
        (
            {"repetition_penalty": 2.0, "logit_bias": {0: -4.0}, "token_ids": [0]},
            [-4, 0, -1, 1, 0.25],
        ),
    ],
)
def test_logits_are_edited_as_asked_in_vllms_order(
    settings: dict[str, Any], expected: list[float]
) -> None:
    assert edited(**settings).tolist() == pytest.approx(expected)


def test_penalties_count_the_tokens_sampled_since() -> None:
    rows = [
        FakeRow(SamplingParams(temperature=0.0, frequency_penalty=1.2)),
        FakeRow(SamplingParams(temperature=0.0)),
    ]
    sampler, found = BatchSampler(rows, CPU), []
    for position in range(5):
        tokens, _ = sampler(LOGITS.repeat(2, 1), np.full(2, position))
        found.append(tokens.tolist())
    assert found == [[0, 0], [3, 0], [0, 0], [4, 0], [1, 0]]


def test_a_bad_word_is_also_banned_after_a_space_if_that_has_as_many_tokens() -> None:
    tokens = {"no": [5], " no": [6], "never": [7, 8], " never": [9, 8], "x": [3], " x": [2, 3]}
    assert tokenised(["no", " never", "x"], tokens.__getitem__) == (
        (5,),
        (6,),
        (7, 8),
        (9, 8),
        (3,),
    )


def test_a_row_without_a_distribution_has_no_finite_logprob_and_the_others_are_as_ever() -> None:
    rows = [FakeRow(SamplingParams()), FakeRow(SamplingParams())]
    logits = torch.stack([torch.full((5,), torch.nan), torch.zeros(5)])
    _, logprobs = BatchSampler(rows, CPU)(logits, np.zeros(2, dtype=np.int64))
    assert logprobs.isfinite().tolist() == [False, True]

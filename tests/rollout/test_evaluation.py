"""The results of an evaluation: over all prompts and by set, with votes among answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skyasync import load_config
from skyasync.rollout.chat import LONG_TEXT_TOKENS
from skyasync.rollout.evaluation import Scoring, answer_reader, eval_metrics, eval_requests
from skyasync.rollout.types import Group
from tests.rollout.episodes import action, prompt, tokenizer, tokens_of, trajectory


def load(*overrides: str) -> Any:
    return load_config(["trainer.policy.model.path=a/b", *overrides])


def group(row: int, eval_set: str, *samples: tuple[str, float], stop: str = "stop") -> Group:
    played = [
        trajectory(action(tokens_of(text), reward), row=row, repetition=n, stop=stop)
        for n, (text, reward) in enumerate(samples)
    ]
    return Group(replace(prompt(row), eval_set=eval_set), played)


def metrics(*groups: Group, **scoring: Any) -> dict[str, float]:
    scored = Scoring(**{"answer": answer_reader("auto"), **scoring})
    return eval_metrics(groups, [scored.sampled(each, tokenizer()) for each in groups])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"), ("it is\n#### 1,234", "1234.0"),
        ("The answer is **12**.", "12.0"), ("Answer: B. Since", "b"), ("The answer is $0.50$", "0.5"),
        ("3 1 2", "312.0"), ("yes", "yes"), ("", None), ("a long way to say\nnothing at all", None),
        ("<think>answer: 3</think>answer: 4", "4.0"), ("<think>answer: 3", None), ("x" * 65, None),
    ],
)  # fmt: skip
def test_the_answer_of_a_response(text: str, answer: str | None) -> None:
    assert answer_reader("auto")(text) == answer


def test_an_answer_by_a_pattern_or_a_function(tmp_path: Any) -> None:
    assert answer_reader("<a>(.*?)</a>")("<a>1</a> <a> 02 </a>") == "2.0"
    assert answer_reader("<a>(.*?)</a>")("1") is None
    (tmp_path / "mine.py").write_text(
        "def last(text):\n    return text.split()[-1] if text else None\n"
    )
    assert answer_reader(f"{tmp_path}/mine.py:last")("one Two") == "two"


def test_sets_have_their_own_numbers_and_all_prompts_theirs() -> None:
    found = metrics(
        group(0, "", ("7", 1.0), ("8", 0.0)),
        group(1, "aime", ("7", 1.0), ("7", 1.0), ("8", 0.0), ("9", 0.0)),
        group(2, "aime", ("1", 0.0), ("1", 0.0), ("2", 1.0), ("x y", 0.0), stop="length"),
    )
    assert found["eval/aime/score"] == pytest.approx(3 / 8) and found[
        "eval/score"
    ] == pytest.approx(4 / 10)
    assert (
        found["eval/aime/pass@1"] == pytest.approx((0.5 + 0.25) / 2)
        and found["eval/aime/pass@4"] == 1.0
    )
    assert found["eval/aime/maj@4"] == 0.5
    assert (
        found["eval/aime/response_truncated"] == 0.5 and found["eval/aime/response_length_mean"] > 0
    )
    assert found["eval/pass@2"] and "eval/pass@4" not in found  # two samples of the first prompt


def test_the_reward_that_passes_and_the_k_are_settings() -> None:
    cfg = load(
        "trainer.eval_k=[2]", "trainer.eval_passing=0.5", "trainer.eval_answer=''", "data.val_data=x.jsonl",
        "generator.eval_n_samples_per_prompt=2", "generator.eval_sampling_params.temperature=null",
    )  # fmt: skip
    scoring = Scoring.of(cfg)
    found = scoring.sampled(group(0, "", ("7", 0.6), ("8", 0.4)), tokenizer())
    assert (found.passes, found.majorities) == ({2: 1.0}, {})


def test_a_program_without_a_tokenizer_has_no_votes() -> None:
    assert (
        Scoring(answer=answer_reader("auto"))
        .sampled(group(0, "", ("7", 1.0), ("7", 1.0)), None)
        .majorities
        == {}
    )


async def test_long_responses_are_read_in_a_thread_and_come_to_the_same() -> None:
    long = group(0, "", *[(f"{'so ' * 900}answer: {n % 2}", float(n % 2)) for n in range(6)])
    scoring = Scoring(answer=answer_reader("auto"))
    assert sum(each.response_length for each in long.trajectories) >= LONG_TEXT_TOKENS
    assert await scoring.sampled_in_turns(long, tokenizer()) == scoring.sampled(long, tokenizer())


def test_each_set_is_asked_for_its_number_of_samples() -> None:
    cfg = load(
        "data.val_data=x.jsonl", "data.val_sets.aime={data: y.jsonl, n_samples: 3}", "data.val_sets.plain=z.jsonl",
        "generator.eval_sampling_params.temperature=null", "trainer.eval_batch_size=2",
    )  # fmt: skip
    prompts = [
        replace(prompt(n), eval_set=name) for n, name in enumerate(["", "", "", "aime", "plain"])
    ]
    calls = [
        [request.id.prompt.row for request in requests] for requests in eval_requests(prompts, cfg)
    ]
    asked = [(list(dict.fromkeys(rows)), len(rows)) for rows in calls]
    assert asked == [([0, 1], 2), ([2], 1), ([3], 3), ([4], 1)]


GREEDY = "generator.eval_sampling_params.temperature"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["data.val_sets.aime=3"],
            r"data.val_sets.aime: expected a source as in data.val_data, .* found 3",
        ),
        (["data.val_sets.aime=[]"], "data.val_sets.aime: expected a source"),
        (
            ["data.val_sets.aime={n_samples: 2}"],
            "data.val_sets.aime.data: expected a source .* found None",
        ),
        (
            ["data.val_sets.aime={data: x.jsonl, samples: 2}"],
            "aime.samples: unknown entry 'samples': did you mean 'n_sa",
        ),
        (
            ["data.val_sets.aime={data: x.jsonl, n_samples: 0}"],
            "aime.n_samples: expected a whole number of at least 1",
        ),
        (["data.val_sets.score=x.jsonl"], "data.val_sets.score: eval/score is a metric's name"),
        (["data.val_sets={a/b: x.jsonl}"], "data.val_sets.a/b: a set's name has letters, digits"),
        (
            ["data.val_sets.aime={data: x.jsonl, n_samples: 4}"],
            f"val_sets.aime.n_samples=4 draws the same .* {GREEDY}=0",
        ),
        (
            ["data.val_data=x.jsonl", "trainer.eval_k=[1,8]"],
            "trainer.eval_k has 8, and no set has more than 1 samples",
        ),
        (["trainer.eval_answer='(x'"], r"trainer.eval_answer=\(x is not a regular expression"),
        (["trainer.eval_answer='(x)(y)'"], "has 2 groups: one, around the answer"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(overrides: list[str], line: str) -> None:
    from skyasync.config import ConfigError

    with pytest.raises(ConfigError, match=line) as raised:
        load(*overrides)
    assert len(raised.value.problems) == 1


def test_a_k_that_one_set_has_enough_samples_for() -> None:
    load("data.val_sets.aime={data: x.jsonl, n_samples: 8}", "data.val_data=y.jsonl", "trainer.eval_k=[1,8]",
         f"{GREEDY}=null")  # fmt: skip

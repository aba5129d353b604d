"""Evaluation: rollout metrics, pass@k and maj@n, over all prompts and for each held-out set.

Invariant: the metrics of a set (``eval/<set>/...``) are those of its prompts alone; without names
all is under ``eval/``.

``pass@k`` is 1 - C(n - c, k) / C(n, k) for c correct of n samples (Chen et al. 2021,
arXiv:2107.03374): the exact expectation over all ways of drawing k of the samples. A prompt with
fewer than k samples has none. ``maj@n`` tells whether the most frequent answer of all n samples is
correct (self-consistency, Wang et al. 2022, arXiv:2203.11171). Answers that are equally frequent
have equal chances, and samples without an answer have no vote.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import comb
from statistics import fmean
from typing import NamedTuple

from skyasync.config.schema import Config
from skyasync.config.schema.data import powers, samples_of
from skyasync.config.schema.judges import is_reference
from skyasync.registry import resolve_reference
from skyasync.rewards.answer_match import extract_boxed_answer
from skyasync.rewards.judge_prompts import without_thinking
from skyasync.rollout.chat import LONG_TEXT_TOKENS
from skyasync.rollout.generator_api import rollout_requests
from skyasync.rollout.metrics import eval_name, rollout_metrics
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import Group, Prompt, RolloutRequest

PASSING_REWARD = 1.0  # of a correct answer, by the library's reward functions
LAST_TOKENS = 2048  # of a response, where its answer stands: decoding more takes time
SHORT_ANSWER_CHARS = 64  # characters of a response that is an answer by itself
_AUTO = (  # in the order of their precision: GSM8K's marker, then a sentence
    re.compile(r"####[ \t]*(\S[^\n]*)"),
    re.compile(
        r"\banswer(?:\s+is|\s*:)[\s*]*([^\s*][^\n]{0,200}?)[\s*]*(?:[.!]?[ \t]*$|[.!]\s)",
        re.I | re.M,
    ),
)

AnswerReader = Callable[[str], str | None]
"""The answer of a response. Two responses agree if the texts are equal; None has no vote."""


class PromptScores(NamedTuple):
    """The scores of one prompt.

    Args:
        passes: pass@k by k.
        majorities: maj@n by the number of samples; empty without answers.
    """

    passes: Mapping[int, float]
    majorities: Mapping[int, float]


@dataclass(frozen=True)
class Scoring:
    """The settings ``trainer.eval_*``.

    Args:
        ks: of pass@k; empty: powers of two.
        passing: the lowest reward of a correct sample.
        answer: reads an answer; None: there is no maj@n.
    """

    ks: tuple[int, ...] = ()
    passing: float = PASSING_REWARD
    answer: AnswerReader | None = None

    @classmethod
    def of(cls, cfg: Config) -> Scoring:
        trainer = cfg.trainer
        if trainer.eval_answer:
            answer = answer_reader(trainer.eval_answer)
        else:
            answer = None
        return cls(tuple(trainer.eval_k), trainer.eval_passing, answer)

    async def sampled_in_turns(self, group: Group, tokenizer: Tokenizer | None) -> PromptScores:
        """``sampled`` on an event loop, where other tasks run in between."""
        if self.answer is not None:
            tokens = sum(min(t.response_length, LAST_TOKENS) for t in group.trajectories)
            if tokens >= LONG_TEXT_TOKENS:
                # The event loop would stop for milliseconds.
                return await asyncio.to_thread(self.sampled, group, tokenizer)
        await asyncio.sleep(0)
        return self.sampled(group, tokenizer)

    def sampled(self, group: Group, tokenizer: Tokenizer | None) -> PromptScores:
        """The scores of a group of samples."""
        played_trajectories = [
            trajectory for trajectory in group.trajectories if not trajectory.ended_early
        ]
        answers = None
        if self.answer is not None and tokenizer is not None and len(played_trajectories) > 1:
            answers = []
            for trajectory in played_trajectories:
                text = ""
                actions = trajectory.actions
                if actions and len(actions[-1].tokens):
                    tokens = actions[-1].tokens[-LAST_TOKENS:].tolist()
                    text = tokenizer.decode(tokens, skip_special_tokens=True)
                answers.append(self.answer(text))
        return prompt_scores(
            group, self.ks or powers(len(played_trajectories)), self.passing, answers
        )


def eval_requests(prompts: Sequence[Prompt], cfg: Config) -> Iterator[list[RolloutRequest]]:
    """At most ``trainer.eval_batch_size`` prompts at once, all with the same number of samples."""
    samples = {name: samples_of(cfg, name) for name in {prompt.eval_set for prompt in prompts}}
    size = cfg.trainer.eval_batch_size
    for count, same_count in groupby(prompts, key=lambda prompt: samples[prompt.eval_set]):
        set_prompts = list(same_count)
        for start in range(0, len(set_prompts), size):
            batch = set_prompts[start : start + size]
            yield rollout_requests(batch, cfg.generator, is_eval=True, samples=count)


def eval_metrics(groups: Sequence[Group], scores: Sequence[PromptScores]) -> dict[str, float]:
    """All metrics of an evaluation.

    Args:
        scores: of the groups, in their order.
    """
    metrics = _set_metrics(groups, scores, "eval/")
    sets: dict[str, tuple[list[Group], list[PromptScores]]] = {}
    for group, score in zip(groups, scores, strict=True):
        name = group.prompt.eval_set
        if name:
            set_groups, set_scores = sets.setdefault(name, ([], []))
            set_groups.append(group)
            set_scores.append(score)
    for name, (set_groups, set_scores) in sets.items():
        metrics |= _set_metrics(set_groups, set_scores, f"eval/{name}/")
    return metrics


def _set_metrics(
    groups: Sequence[Group], scores: Sequence[PromptScores], prefix: str
) -> dict[str, float]:
    metrics = {}
    for name, value in rollout_metrics(groups).items():
        metrics[prefix + eval_name(name).removeprefix("eval/")] = value
    for name, value in mean_scores([score for score in scores if score.passes]).items():
        metrics[prefix + name] = value
    return metrics


# ---------------------------------------------------------------- pass@k and maj@n


def prompt_scores(
    group: Group,
    ks: Iterable[int],
    passing: float = PASSING_REWARD,
    answers: Sequence[str | None] | None = None,
) -> PromptScores:
    """The scores of a group.

    Args:
        ks: those larger than the number of samples are left out.
        passing: the lowest reward of a correct sample.
        answers: of the samples that ended by themselves; without them there is no maj@n.
    """
    rewards = group.rewards
    passes: dict[int, float] = {}
    for k in sorted(set(ks)):
        if 1 <= k <= len(rewards):
            passes[k] = pass_at(k, rewards, passing)
    majorities: dict[int, float] = {}
    if answers is not None and len(answers) > 1:  # maj@1 would be pass@1
        correct = [reward >= passing for reward in rewards]
        majorities[len(answers)] = majority(answers, correct)
    return PromptScores(passes, majorities)


def mean_scores(scores: Sequence[PromptScores]) -> dict[str, float]:
    """``pass@k`` and ``maj@n`` over prompts, for the k and n that all of them have."""
    passes = _common_means([score.passes for score in scores], "pass")
    return passes | _common_means([score.majorities for score in scores], "maj")


def _common_means(tables: Sequence[Mapping[int, float]], name: str) -> dict[str, float]:
    """The means of the numbers that all tables have."""
    metrics: dict[str, float] = {}
    if tables:
        for number in tables[0]:
            if all(number in table for table in tables):
                metrics[f"{name}@{number}"] = fmean(table[number] for table in tables)
    return metrics


def pass_at(k: int, rewards: Sequence[float], passing: float = PASSING_REWARD) -> float:
    """The chance that one of ``k`` samples drawn from these without replacement passes.

    Raises:
        ValueError: if there are fewer than ``k``.
    """
    n = len(rewards)
    correct = sum(reward >= passing for reward in rewards)
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples: k is from 1 to their number")
    return 1.0 - comb(n - correct, k) / comb(n, k)


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """The chance that the most frequent answer is correct; 0 if there is no answer.

    An answer that is correct in some of its samples and wrong in others counts with its share of
    correct ones.
    """
    votes: dict[str, list[bool]] = {}
    for answer, passes in zip(answers, correct, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(passes)
    if not votes:
        return 0.0
    most_votes = max(map(len, votes.values()))
    return fmean(fmean(passes) for passes in votes.values() if len(passes) == most_votes)


# ---------------------------------------------------------------- answers


def answer_reader(spec: str) -> AnswerReader:
    r"""The reader for ``trainer.eval_answer``: ``auto``, a regular expression, or a function.

    ``auto`` is the last ``\boxed{}``, or what follows the last ``####``, or "answer is", or a short
    response itself.

    Raises:
        UserError: if there is no such function.
    """
    if is_reference(spec):
        return partial(_function_answer, resolve_reference(spec, kind="trainer.eval_answer"))
    if spec == "auto":
        return _auto_answer
    return partial(_match, re.compile(spec))


def _function_answer(function: Callable[[str], object], text: str) -> str | None:
    answer = function(text)
    if answer is None:
        return None
    return _normalized(str(answer))


def _match(pattern: re.Pattern[str], text: str) -> str | None:
    """The last match, as a solution may correct itself."""
    matches = pattern.findall(text)
    if matches:
        return _normalized(matches[-1])
    return None


def _auto_answer(text: str) -> str | None:
    text = without_thinking(text).strip()
    boxed_answer = extract_boxed_answer(text)
    if boxed_answer is not None:
        return _normalized(boxed_answer)
    for pattern in _AUTO:
        answer = _match(pattern, text)
        if answer is not None:
            return answer
    if 0 < len(text) <= SHORT_ANSWER_CHARS and "\n" not in text:
        return _normalized(text)
    return None


def _normalized(answer: str) -> str:
    """One text for the spellings of a number or a formula that differ in spaces, marks and case."""
    plain = re.sub(r"\\[!,;]|[\s$,]|\\left|\\right", "", answer).rstrip(".").lower()
    try:
        return repr(float(plain))  # 0.50 and .5 are one answer
    except (ValueError, OverflowError):
        return plain

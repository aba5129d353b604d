"""Evaluation: the metrics of rollouts, pass@k and maj@n, over all prompts and for each held-out
set.

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
from skyasync.rollout.chat import LONG
from skyasync.rollout.generator_api import rollout_requests
from skyasync.rollout.metrics import eval_name, rollout_metrics
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import Group, Prompt, RolloutRequest

PASSING = 1.0
LAST_TOKENS = 2048  # of a response, where its answer stands
SHORT = 64  # characters of a response that is an answer by itself
_AUTO = (
    re.compile(r"####[ \t]*(\S[^\n]*)"),
    re.compile(
        r"\banswer(?:\s+is|\s*:)[\s*]*([^\s*][^\n]{0,200}?)[\s*]*(?:[.!]?[ \t]*$|[.!]\s)",
        re.I | re.M,
    ),
)

AnswerReader = Callable[[str], str | None]
"""The answer that a response gives: two responses agree if and only if the texts are equal. None
has no vote."""


class PromptScores(NamedTuple):
    """One prompt's pass@k by k, and its maj@n by the number of samples; without answers the latter
    is empty."""

    passes: Mapping[int, float]
    majorities: Mapping[int, float]


@dataclass(frozen=True)
class Scoring:
    """``trainer.eval_*``: k (by default powers of two), the reward that passes, and how an answer
    is read, if it is."""

    ks: tuple[int, ...] = ()
    passing: float = PASSING
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
        """``sampled`` on an event loop, where other tasks run in between; a thread decodes long
        texts."""
        if (
            self.answer is not None
            and sum(min(t.response_length, LAST_TOKENS) for t in group.trajectories) >= LONG
        ):
            return await asyncio.to_thread(self.sampled, group, tokenizer)
        await asyncio.sleep(0)
        return self.sampled(group, tokenizer)

    def sampled(self, group: Group, tokenizer: Tokenizer | None) -> PromptScores:
        played = [each for each in group.trajectories if not each.ended_early]
        answers = None
        if self.answer is not None and tokenizer is not None and len(played) > 1:
            last = [
                each.actions[-1].tokens[-LAST_TOKENS:].tolist() if each.actions else []
                for each in played
            ]
            texts = [
                tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""
                for tokens in last
            ]
            answers = [self.answer(text) for text in texts]
        return prompt_scores(group, self.ks or powers(len(played)), self.passing, answers)


def eval_requests(prompts: Sequence[Prompt], cfg: Config) -> Iterator[list[RolloutRequest]]:
    """At most ``trainer.eval_batch_size`` prompts at once, all with the same number of samples."""
    samples = {name: samples_of(cfg, name) for name in {prompt.eval_set for prompt in prompts}}
    for count, same in groupby(prompts, key=lambda prompt: samples[prompt.eval_set]):
        alike = list(same)
        for start in range(0, len(alike), cfg.trainer.eval_batch_size):
            batch = alike[start : start + cfg.trainer.eval_batch_size]
            yield rollout_requests(batch, cfg.generator, is_eval=True, samples=count)


def eval_metrics(groups: Sequence[Group], scores: Sequence[PromptScores]) -> dict[str, float]:
    """All metrics of an evaluation; ``scores``: of the groups, in their order."""

    def metrics_of(chosen: Sequence[tuple[Group, PromptScores]], prefix: str) -> dict[str, float]:
        rollout = rollout_metrics([group for group, _ in chosen])
        metrics = {eval_name(name).removeprefix("eval/"): value for name, value in rollout.items()}
        metrics |= mean_scores([score for _, score in chosen if score.passes])
        return {f"{prefix}{name}": value for name, value in metrics.items()}

    pairs = list(zip(groups, scores, strict=True))
    metrics = metrics_of(pairs, "eval/")
    for name in dict.fromkeys(group.prompt.eval_set for group in groups if group.prompt.eval_set):
        metrics |= metrics_of(
            [pair for pair in pairs if pair[0].prompt.eval_set == name], f"eval/{name}/"
        )
    return metrics


# ---------------------------------------------------------------- pass@k and maj@n


def prompt_scores(
    group: Group,
    ks: Iterable[int],
    passing: float = PASSING,
    answers: Sequence[str | None] | None = None,
) -> PromptScores:
    """The scores of a group.

    Args:
        ks: those larger than the number of samples are left out.
        passing: the lowest reward of a correct sample.
        answers: of the samples that ended by themselves; without them there is no maj@n.
    """
    rewards = group.rewards
    possible = sorted({k for k in ks if 1 <= k <= len(rewards)})
    majorities: dict[int, float] = {}
    if answers is not None and len(answers) > 1:
        correct = [reward >= passing for reward in rewards]
        majorities[len(answers)] = majority(answers, correct)
    return PromptScores({k: pass_at(k, rewards, passing) for k in possible}, majorities)


def mean_scores(scores: Sequence[PromptScores]) -> dict[str, float]:
    """``pass@k`` and ``maj@n`` over prompts, for the k and n that all of them have."""
    metrics: dict[str, float] = {}
    for name, tables in (
        ("pass", [one.passes for one in scores]),
        ("maj", [one.majorities for one in scores]),
    ):
        for k in tables[0] if tables else ():
            if all(k in table for table in tables):
                metrics[f"{name}@{k}"] = fmean(table[k] for table in tables)
    return metrics


def pass_at(k: int, rewards: Sequence[float], passing: float = PASSING) -> float:
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
    r"""For ``trainer.eval_answer``: ``auto``, a regular expression, or a function of the user's.

    ``auto`` is the last ``\boxed{}``, or what follows the last ``####``, or "answer is", or a short
    response itself.

    Raises:
        UserError: if there is no such function.
    """
    if is_reference(spec):
        own: Callable[[str], object] = resolve_reference(spec, kind="trainer.eval_answer")
        return lambda text: None if (answer := own(text)) is None else _normalized(str(answer))
    patterns = _AUTO if spec == "auto" else (re.compile(spec),)

    def read(text: str) -> str | None:
        if spec == "auto":
            text = without_thinking(text).strip()
            boxed = extract_boxed_answer(text)
            if boxed is not None:
                return _normalized(boxed)
        for pattern in patterns:
            matches = pattern.findall(text)
            if matches:
                return _normalized(matches[-1])
        is_short = spec == "auto" and 0 < len(text) <= SHORT and "\n" not in text
        if is_short:
            return _normalized(text)
        return None

    return read


def _normalized(answer: str) -> str:
    """One text for the spellings of a number or a formula that differ in spaces, marks and case."""
    plain = re.sub(r"\\[!,;]|[\s$,]|\\left|\\right", "", answer).rstrip(".").lower()
    try:
        return repr(float(plain))
    except (ValueError, OverflowError):
        return plain

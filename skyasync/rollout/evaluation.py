"""What an evaluation comes to: the numbers of rollouts, pass@k and maj@k, over all prompts and for each set.

Invariant: a set's metrics are those of its prompts alone, ``eval/<set>/...``; without names all is under ``eval/``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from skyasync.arrays import joined
from skyasync.config.schema import Config
from skyasync.config.schema.data import powers, samples_of
from skyasync.rollout.answers import Answer, reader
from skyasync.rollout.chat import LONG
from skyasync.rollout.metrics import eval_name, rollout_metrics
from skyasync.rollout.requests import request_for
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import GeneratorInput, Group, Prompt, Trajectory
from skyasync.rollout.votes import PASSING, Sampled, means, sampled

LAST_TOKENS = 2048  # of a response, where its answer stands


@dataclass(frozen=True)
class Scoring:
    """``trainer.eval_*``: k (none: powers of two), the reward that passes, and how an answer is read, if it is."""

    ks: tuple[int, ...] = ()
    passing: float = PASSING
    answer: Answer | None = None

    @classmethod
    def of(cls, cfg: Config) -> Scoring:
        trainer = cfg.trainer
        answer = reader(trainer.eval_answer) if trainer.eval_answer else None
        return cls(tuple(trainer.eval_k), trainer.eval_passing, answer)

    async def sampled_in_turns(self, group: Group, tokenizer: Tokenizer | None) -> Sampled:
        """The same where an event loop runs, which has its turn in between; long texts are made in a thread."""
        if self.answer is not None and sum(min(t.response_length, LAST_TOKENS) for t in group.trajectories) >= LONG:
            return await asyncio.to_thread(self.sampled, group, tokenizer)
        await asyncio.sleep(0)
        return self.sampled(group, tokenizer)

    def sampled(self, group: Group, tokenizer: Tokenizer | None) -> Sampled:
        """One group's numbers."""
        played = [each for each in group.trajectories if not each.ended_early]
        answers = None
        if self.answer is not None and tokenizer is not None and len(played) > 1:
            answers = [self.answer(_text(each, tokenizer)) for each in played]
        return sampled(group, self.ks or powers(len(played)), self.passing, answers)


def eval_requests(prompts: Sequence[Prompt], cfg: Config) -> Iterator[tuple[Sequence[Prompt], GeneratorInput]]:
    """What a generator is asked for: at most ``trainer.eval_batch_size`` prompts at once, of one number of samples."""
    samples = {name: samples_of(cfg, name) for name in {prompt.eval_set for prompt in prompts}}
    start, counts = 0, [samples[prompt.eval_set] for prompt in prompts]
    while start < len(prompts):
        end = start
        while end < min(start + cfg.trainer.eval_batch_size, len(prompts)) and counts[end] == counts[start]:
            end += 1
        some = prompts[start:end]
        yield some, request_for(some, cfg.generator, is_eval=True, samples=counts[start])
        start = end


def eval_metrics(groups: Sequence[Group], numbers: Sequence[Sampled]) -> dict[str, float]:
    """All metrics of an evaluation; ``numbers`` are those of the groups, in their order."""
    metrics = _of(groups, numbers, "eval/")
    for name in dict.fromkeys(group.prompt.eval_set for group in groups if group.prompt.eval_set):
        own = [each for each in zip(groups, numbers, strict=True) if each[0].prompt.eval_set == name]
        metrics |= _of([group for group, _ in own], [number for _, number in own], f"eval/{name}/")
    return metrics


def _of(groups: Sequence[Group], numbers: Sequence[Sampled], where: str) -> dict[str, float]:
    metrics = {eval_name(name).removeprefix("eval/"): value for name, value in rollout_metrics(groups).items()}
    metrics |= means([number for number in numbers if number.passes])
    return {f"{where}{name}": value for name, value in metrics.items()}


def _text(trajectory: Trajectory, tokenizer: Tokenizer) -> str:
    """The end of what was said last."""
    said: Any = trajectory.actions[-1:] and joined(trajectory.actions[-1].tokens)
    return tokenizer.decode(said[-LAST_TOKENS:].tolist(), skip_special_tokens=True) if len(said) else ""

"""The generator interface: requests in, groups of trajectories out.

    library    RolloutRequest ──▶ generate_trajectories ─▶ trajectories (arrays) ──▶ groups
    users      GeneratorInput ──▶ roll_out ──────────────▶ trajectories (arrays) ──▶ groups
               GeneratorInput ──▶ generate ──────────────▶ parallel lists ─────────▶ groups

Invariant: each group has as many trajectories as requested, in the order requested, and every trajectory is complete: a
prompt to start from, as many finite log-probabilities and versions as generated tokens, no empty segment after the
prompt. What a user's generator returns is checked here, once, and errors name the prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from skyasync.arrays import TURN_TOKENS, floats, ints
from skyasync.config.schema import GeneratorConfig, SamplingConfig
from skyasync.config.schema.sampling import evaluation
from skyasync.errors import UserError
from skyasync.inference.interface import SamplingParams
from skyasync.rollout.types import (
    GeneratorInput,
    GeneratorOutput,
    Group,
    Prompt,
    PromptId,
    RolloutRequest,
    Segment,
    Trajectory,
    TrajectoryId,
)

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_PARALLEL = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons")
_OPTIONAL = ("rollout_logprobs", "rollout_versions", "trajectory_metrics")

Numbers = NDArray[Any]


class Generator(Protocol):
    """Anything that turns prompts into trajectories; override ``BasePPOExp.get_generator`` to use your own."""

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput: ...


class TrajectoryGenerator:
    """A generator that returns trajectories, so that nothing is copied into lists.

    The library's generators override ``generate_trajectories``. A subclass of yours may override any of the three
    methods: the one closest to the lists is called.
    """

    async def generate_trajectories(self, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        """One trajectory per request, in that order."""
        raise NotImplementedError

    async def roll_out(self, input_batch: GeneratorInput) -> list[Trajectory]:
        """The same for parallel lists of prompts."""
        return await self.generate_trajectories(requests_from_input(input_batch))

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """The same as parallel lists."""
        return generator_output(await self.roll_out(input_batch))

    async def begun(self) -> list[Trajectory]:
        """The trajectories in flight with their tokens so far, for a checkpoint. By default they start again."""
        return []

    def go_on_from(self, trajectories: Sequence[Trajectory]) -> None:
        """Continue what ``begun`` gave to the checkpoint from which the run resumes."""


# ---------------------------------------------------------------- requests


def rollout_requests(
    prompts: Sequence[Prompt], cfg: GeneratorConfig, *, is_eval: bool = False, samples: int = 0
) -> list[RolloutRequest]:
    """``n_samples_per_prompt`` requests per prompt (or those of an evaluation, or ``samples``), group by group."""
    count = samples or (cfg.eval_n_samples_per_prompt if is_eval else cfg.n_samples_per_prompt)
    sampling = sampling_params(evaluation(cfg) if is_eval else cfg.sampling_params)
    limits = {"max_turns": cfg.max_turns} if cfg.max_turns else {}  # environments count by it
    return [
        RolloutRequest(TrajectoryId(prompt.id, repetition), prompt, {**prompt.extras, **limits}, sampling, is_eval)
        for prompt in prompts
        for repetition in range(count)
    ]


def generator_input(requests: Sequence[RolloutRequest]) -> GeneratorInput:
    """What a user's generator is given."""
    return {
        "prompts": [request.prompt.messages for request in requests],
        "env_classes": [request.prompt.env_class for request in requests],
        "env_extras": [request.extras for request in requests],
        "sampling_params": requests[0].sampling,
        "trajectory_ids": [request.id for request in requests],
        "is_eval": requests[0].is_eval,
    }


def requests_from_input(input_batch: GeneratorInput) -> list[RolloutRequest]:
    """The inverse of ``generator_input``."""
    sampling, is_eval = input_batch["sampling_params"], input_batch["is_eval"]
    return [
        RolloutRequest(identity, Prompt(identity.prompt, messages, env_class, extras), extras, sampling, is_eval)
        for identity, messages, env_class, extras in zip(
            input_batch["trajectory_ids"],
            input_batch["prompts"],
            input_batch["env_classes"],
            input_batch["env_extras"],
            strict=True,
        )
    ]


def eval_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same prompts, marked as held out in their identity."""
    return [replace(p, id=PromptId(-1, p.id.row)) for p in prompts]


def sampling_params(cfg: SamplingConfig) -> SamplingParams:
    return SamplingParams(
        max_tokens=cfg.max_generate_length,
        min_tokens=cfg.min_tokens,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        min_p=cfg.min_p,
        presence_penalty=cfg.presence_penalty,
        frequency_penalty=cfg.frequency_penalty,
        repetition_penalty=cfg.repetition_penalty,
        stop=tuple(cfg.stop),
        stop_token_ids=tuple(cfg.stop_token_ids),
        include_stop_str_in_output=cfg.include_stop_str_in_output,
        ignore_eos=cfg.ignore_eos,
        bad_words=tuple(cfg.bad_words),
        logit_bias={int(token): float(bias) for token, bias in cfg.logit_bias.items()},
        allowed_token_ids=tuple(cfg.allowed_token_ids),
        skip_special_tokens=cfg.skip_special_tokens,
        seed=None if cfg.seed < 0 else cfg.seed,
        structured_outputs=dict(cfg.structured_outputs),
        repetition_detection=dict(cfg.repetition_detection),
    )


def request_seed(seed: int | None, request_id: str) -> int | None:
    """The seed of one request: samples of a prompt must differ, and each is the same in every run."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.blake2b(f"{seed} {request_id}".encode(), digest_size=7).digest(), "little")


# ---------------------------------------------------------------- from a generator to groups


async def run_generator(
    generator: Generator, requests: Sequence[RolloutRequest], version: int
) -> tuple[list[Group], dict[str, float]]:
    """One group per prompt of the requests, and the generator's own metrics. Without requests there is no call.

    Args:
        version: of all tokens, if a user's generator returns no ``rollout_versions``.

    Raises:
        UserError: naming the list or the trajectory that is wrong.
    """
    if not requests:
        return [], {}
    samples = [(prompt, len(list(same))) for prompt, same in groupby(requests, key=lambda request: request.prompt)]
    if not hands_over_trajectories(generator):
        output = await generator.generate(generator_input(requests))
        groups = await groups_in_turns(output, [prompt for prompt, _ in samples], version, samples[0][1])
        return groups, output.get("rollout_metrics") or {}
    if _overrides(generator, "roll_out"):
        trajectories = await generator.roll_out(generator_input(requests))
    else:
        trajectories = await generator.generate_trajectories(requests)
    _check_order([request.id for request in requests], [trajectory.id for trajectory in trajectories])
    done = 0
    for trajectory in trajectories:
        trajectory.branches = [_checked(sequence, trajectory.id) for sequence in trajectory.branches]
        trajectory.segments = _checked(trajectory.segments, trajectory.id)
        done += sum(len(segment.tokens) for segment in trajectory.segments)
        if done >= TURN_TOKENS:
            done = 0
            await asyncio.sleep(0)
    left = iter(trajectories)
    return [Group(prompt, [next(left) for _ in range(count)]) for prompt, count in samples], {}


def hands_over_trajectories(generator: Generator) -> TypeIs[TrajectoryGenerator]:
    """Whether the trajectories are taken, since no subclass or instance has replaced ``generate``."""
    return isinstance(generator, TrajectoryGenerator) and not _overrides(generator, "generate")


def _overrides(generator: TrajectoryGenerator, method: str) -> bool:
    return getattr(getattr(generator, method), "__func__", None) is not getattr(TrajectoryGenerator, method)


def _check_order(requested: list[TrajectoryId], returned: list[TrajectoryId]) -> None:
    if requested == returned:
        return
    differs = (n for n, (a, b) in enumerate(zip(requested, returned, strict=False)) if a != b)
    place = next(differs, min(len(requested), len(returned)))
    found = "".join(
        f", {word} {ids[place]}" for word, ids in (("expected", requested), ("got", returned)) if place < len(ids)
    )
    raise UserError(
        f"roll_out() must return one trajectory per entry of trajectory_ids, in that order: expected {len(requested)}, "
        f"got {len(returned)}; the first difference is at index {place}{found}"
    )


def _checked(sequence: list[Segment], identity: TrajectoryId) -> list[Segment]:
    """The sequence without empty segments."""
    first, *others = sequence
    if first.kind != "prompt" or not len(first.tokens):
        raise UserError(f"{identity}: the prompt has no tokens")
    if not all(np.isfinite(segment.logprobs).all() for segment in others):
        raise UserError(f"{identity}: log-probabilities of generated tokens must be finite")
    return [first, *(segment for segment in others if len(segment.tokens))]


# ---------------------------------------------------------------- parallel lists


def generator_output(trajectories: Sequence[Trajectory]) -> GeneratorOutput:
    """Finished trajectories as parallel lists, one row per sequence."""
    rows = [(trajectory, sequence) for trajectory in trajectories for sequence in trajectory.sequences]

    def per_token(values: Callable[[Segment], Numbers | float]) -> list[list[Any]]:
        """Of each row's response; one number stands for all tokens of a segment."""
        return [
            [value for s in response for value in np.broadcast_to(values(s), len(s.tokens)).tolist()]
            for _, (_, *response) in rows
        ]

    def rewards(segment: Segment) -> Numbers:
        found = np.zeros(len(segment.tokens))
        found[-1:] = segment.reward
        return found

    output: GeneratorOutput = {
        "prompt_token_ids": [sequence[0].tokens.tolist() for _, sequence in rows],
        "response_ids": per_token(lambda s: s.tokens),
        "rewards": per_token(rewards),
        "loss_masks": per_token(lambda s: int(s.kind == "action")),
        "stop_reasons": [trajectory.stop_reason for trajectory, _ in rows],
        "rollout_logprobs": per_token(lambda s: s.logprobs if s.kind == "action" else 0.0),
        "rollout_versions": per_token(lambda s: s.versions if s.kind == "action" else -1),
        "trajectory_metrics": [trajectory.metrics for trajectory, _ in rows],
    }
    if len(rows) > len(trajectories):
        output["trajectory_ids"] = [trajectory.id for trajectory, _ in rows]
    return output


def groups_from_output(output: GeneratorOutput, prompts: Sequence[Prompt], version: int, samples: int) -> list[Group]:
    """One group per prompt, of ``samples`` trajectories, in the order requested.

    Without ``rollout_logprobs`` the log-probabilities of actions are NaN. A reward on tokens that ``loss_masks`` leaves
    out stays there: it counts for the group, though no token learns from it.

    Args:
        version: of all tokens, if the generator returns no ``rollout_versions``.

    Raises:
        UserError: naming the list or the trajectory that is wrong.
    """
    reader = _OutputReader(output, prompts, version, samples)
    for _ in reader.read():
        pass
    return reader.groups


async def groups_in_turns(
    output: GeneratorOutput, prompts: Sequence[Prompt], version: int, samples: int
) -> list[Group]:
    """``groups_from_output`` that lets other tasks run in between."""
    reader = _OutputReader(output, prompts, version, samples)
    done = 0
    for tokens in reader.read():
        done += tokens
        if done >= TURN_TOKENS:
            done = 0
            await asyncio.sleep(0)
    return reader.groups


class _OutputReader:
    """Checks parallel lists, and turns their rows into trajectories."""

    def __init__(self, output: GeneratorOutput, prompts: Sequence[Prompt], version: int, samples: int) -> None:
        self._output, self._prompts, self._version = output, prompts, version
        ids = [[TrajectoryId(prompt.id, repetition) for repetition in range(samples)] for prompt in prompts]
        self._requested = ids
        self._trajectories: dict[TrajectoryId, Trajectory] = {}

    @property
    def groups(self) -> list[Group]:
        return [
            Group(prompt, [self._trajectories[identity] for identity in ids])
            for prompt, ids in zip(self._prompts, self._requested, strict=True)
        ]

    def read(self) -> Iterator[int]:
        """Read row by row; yields how many tokens each has."""
        for row, identity in enumerate(self._rows()):
            trajectory = self._trajectory(row, identity)
            if identity in self._trajectories:
                trajectory.branches = self._trajectories[identity].sequences
            self._trajectories[identity] = trajectory
            yield sum(len(segment.tokens) for segment in trajectory.segments)

    def _rows(self) -> list[TrajectoryId]:
        """The trajectory of each row; the lists have as many rows."""
        requested, given = [identity for ids in self._requested for identity in ids], dict[str, Any](self._output)
        rows: list[TrajectoryId] = requested if given.get("trajectory_ids") is None else given["trajectory_ids"]
        if set(rows) != set(requested):
            missing, foreign = set(requested) - set(rows), set(rows) - set(requested)
            problem = f"lack {min(missing)}" if missing else f"have {min(foreign)}, which was not asked for"
            raise UserError(f"the generator's trajectory_ids {problem}")
        if missing_lists := [name for name in _PARALLEL if given.get(name) is None]:
            raise UserError(f"the generator's output lacks {', '.join(missing_lists)}")
        lengths = {name: len(given[name]) for name in (*_PARALLEL, *_OPTIONAL) if given.get(name) is not None}
        if set(lengths.values()) != {len(rows)}:
            raise UserError(f"the generator was asked for {len(rows)} trajectories; its lists have {lengths}")
        return rows

    def _trajectory(self, row: int, identity: TrajectoryId) -> Trajectory:
        output = self._output
        prompt = ints(_numbers("prompt_token_ids", output["prompt_token_ids"][row], identity, whole=True))
        if not len(prompt):
            raise UserError(f"{identity}: the prompt has no tokens")
        tokens = ints(_numbers("response_ids", output["response_ids"][row], identity, whole=True))
        count = len(tokens)
        mask = _numbers("loss_masks", output["loss_masks"][row], identity, count) != 0
        logprobs = floats(np.full(count, math.nan))
        if known := output.get("rollout_logprobs"):
            logprobs = floats(_numbers("rollout_logprobs", known[row], identity, count))
            if not np.isfinite(logprobs[mask]).all():
                raise UserError(f"{identity}: rollout_logprobs of generated tokens must be finite")
        versions = ints(np.full(count, self._version))
        if stamps := output.get("rollout_versions"):
            versions = ints(_numbers("rollout_versions", stamps[row], identity, count, whole=True))
        rewards = _token_rewards(output["rewards"][row], mask, identity)
        edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), count] if count else []
        segments = [Segment("prompt", prompt)]
        for start, end in pairwise(edges):
            span, earned = slice(start, end), rewards[start:end]
            reward = sum(earned[earned != 0].tolist(), 0.0)
            if mask[start]:
                segments.append(Segment("action", tokens[span], logprobs[span], versions[span], reward))
            else:
                segments.append(Segment("observation", tokens[span], reward=reward))
        metrics = (output.get("trajectory_metrics") or {row: {}})[row]
        return Trajectory(identity, segments, output["stop_reasons"][row], metrics)


def _numbers(
    name: str, values: object, identity: TrajectoryId, count: int | None = None, *, whole: bool = False
) -> Numbers:
    """One row of a list as an array of ``count`` numbers.

    Raises:
        UserError: if the row is not that.
    """
    try:
        found = np.asarray(values)
        is_row = not found.size or (found.ndim == 1 and found.dtype.kind in "biuf")
        problem = "" if is_row else f"found {values!r:.60}"
    except (TypeError, ValueError, RuntimeError) as error:  # of values with lengths or devices of their own
        problem = str(error)
    if problem:
        raise UserError(f"{identity}: {name} must be numbers, one per token: {problem}")
    found = found if found.size else np.zeros(0, np.int64)
    if whole and found.dtype.kind == "f" and not (np.isfinite(found) & (found == np.floor(found))).all():
        raise UserError(f"{identity}: {name} must be whole numbers")
    if count is not None and len(found) != count:
        raise UserError(f"{identity}: {len(found)} {name} for {count} response tokens")
    return found


def _token_rewards(reward: object, mask: Numbers, identity: TrajectoryId) -> Numbers:
    """Per response token; one number for the whole trajectory goes to its last action token, or else to its last."""
    if not isinstance(reward, Real):
        return _numbers("rewards", reward, identity, len(mask)).astype(np.float64)
    values = np.zeros(len(mask))
    if len(mask):
        values[int(np.flatnonzero(mask)[-1]) if mask.any() else -1] = float(reward)
    return values

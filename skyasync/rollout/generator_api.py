"""The generator interface: requests in, groups of trajectories out.

    library    RolloutRequest ──▶ generate_trajectories ─▶ trajectories (arrays) ──▶ groups
    users      GeneratorInput ──▶ roll_out ──────────────▶ trajectories (arrays) ──▶ groups
               GeneratorInput ──▶ generate ──────────────▶ parallel lists ─────────▶ groups

Invariant: each group has as many trajectories as requested, in the order requested, and every
trajectory is complete: a prompt to start from, as many finite log-probabilities and versions as
generated tokens, no empty segment after the prompt. What a user's generator returns is checked
here, once, and errors name the prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import groupby, pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

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
    """Anything that turns prompts into trajectories; override ``BasePPOExp.get_generator`` to use
    your own."""

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """One row per trajectory of the input, in that order, or several rows with their
        ``trajectory_ids``."""
        ...


@runtime_checkable
class ClosableGenerator(Protocol):
    """A generator that holds connections, processes or requests: it is closed before the
    engines."""

    async def close(self) -> None: ...


class TrajectoryGenerator:
    """A generator that returns trajectories, so that nothing is copied into lists.

    The library's generators override ``generate_trajectories``. A subclass of yours may override
    any of the three methods: the one closest to the lists is called.
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

    async def partial_rollouts(self) -> list[Trajectory]:
        """The trajectories in flight with their tokens so far, for a checkpoint. By default they
        start again."""
        return []

    def resume_from(self, trajectories: Sequence[Trajectory]) -> None:
        """Continue what ``partial_rollouts`` gave to the checkpoint from which the run resumes."""


# ---------------------------------------------------------------- requests


def rollout_requests(
    prompts: Sequence[Prompt], cfg: GeneratorConfig, *, is_eval: bool = False, samples: int = 0
) -> list[RolloutRequest]:
    """``n_samples_per_prompt`` requests per prompt (or those of an evaluation, or ``samples``),
    group by group."""
    count = samples or (cfg.eval_n_samples_per_prompt if is_eval else cfg.n_samples_per_prompt)
    sampling = sampling_params(evaluation(cfg) if is_eval else cfg.sampling_params)
    # environments count by it
    if cfg.max_turns:
        limits = {"max_turns": cfg.max_turns}
    else:
        limits = {}
    return [
        RolloutRequest(
            TrajectoryId(prompt.id, repetition),
            prompt,
            {**prompt.extras, **limits},
            sampling,
            is_eval,
        )
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
    sampling = input_batch["sampling_params"]
    is_eval = input_batch["is_eval"]
    return [
        RolloutRequest(
            identity,
            Prompt(identity.prompt, messages, env_class, extras),
            extras,
            sampling,
            is_eval,
        )
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
    """The seed of one request: samples of a prompt must differ, and each is the same in every
    run."""
    if seed is None:
        return None
    return int.from_bytes(
        hashlib.blake2b(f"{seed} {request_id}".encode(), digest_size=7).digest(), "little"
    )


# ---------------------------------------------------------------- from a generator to groups


async def run_generator(
    generator: Generator, requests: Sequence[RolloutRequest], version: int
) -> tuple[list[Group], dict[str, float]]:
    """One group per prompt of the requests, and the generator's own metrics. Without requests there
    is no call.

    Other tasks run in between: many trajectories take a while to check.

    Args:
        version: of all tokens, if a user's generator returns no ``rollout_versions``.

    Raises:
        UserError: naming the list or the trajectory that is wrong.
    """
    if not requests:
        return [], {}
    requested = [request.id for request in requests]
    metrics = dict[str, float]()
    checked: Iterator[Trajectory]
    if not hands_over_trajectories(generator):
        output = await generator.generate(generator_input(requests))
        checked = _read_output(output, requested, version)
        metrics = output.get("rollout_metrics") or {}
    elif (
        "roll_out" in vars(generator)
        or type(generator).roll_out is not TrajectoryGenerator.roll_out
    ):
        checked = _checked(await generator.roll_out(generator_input(requests)), requested)
    else:
        checked = _checked(await generator.generate_trajectories(requests), requested)
    trajectories = dict[TrajectoryId, Trajectory]()
    tokens = 0
    for trajectory in checked:
        trajectories[trajectory.id] = trajectory
        tokens += sum(len(segment.tokens) for segment in trajectory.segments)
        if tokens >= TURN_TOKENS:
            tokens = 0
            await asyncio.sleep(0)
    groups = groupby(requests, key=lambda request: request.prompt)
    return [
        Group(prompt, [trajectories[request.id] for request in same]) for prompt, same in groups
    ], metrics


def hands_over_trajectories(generator: Generator) -> TypeIs[TrajectoryGenerator]:
    """Whether the trajectories are taken, since no subclass or instance has replaced
    ``generate``."""
    return (
        isinstance(generator, TrajectoryGenerator)
        and "generate" not in vars(generator)
        and type(generator).generate is TrajectoryGenerator.generate
    )


def _checked(
    trajectories: Sequence[Trajectory], requested: list[TrajectoryId]
) -> Iterator[Trajectory]:
    """The trajectories one after another, without empty segments."""
    returned = [trajectory.id for trajectory in trajectories]
    if requested != returned:
        differs = (n for n, (a, b) in enumerate(zip(requested, returned, strict=False)) if a != b)
        place = next(differs, min(len(requested), len(returned)))
        difference = "".join(
            f", {word} {ids[place]}"
            for word, ids in (("expected", requested), ("got", returned))
            if place < len(ids)
        )
        raise UserError(
            f"roll_out() must return one trajectory per entry of trajectory_ids, in that order: expected "
            f"{len(requested)}, got {len(returned)}; the first difference is at index {place}{difference}"
        )
    for trajectory in trajectories:
        for sequence in trajectory.sequences:
            first, *others = sequence
            if first.kind != "prompt" or not len(first.tokens):
                raise UserError(f"{trajectory.id}: the prompt has no tokens")
            if not all(np.isfinite(segment.logprobs).all() for segment in others):
                raise UserError(
                    f"{trajectory.id}: log-probabilities of generated tokens must be finite"
                )
            sequence[1:] = [segment for segment in others if len(segment.tokens)]
        yield trajectory


class RolloutGate:
    """Keeps new rollouts out while something needs the engines without them. It is open at first.

    Invariant: while ``closed`` is held no rollout is inside, and every rollout that waits outside
    is let in after it. An open gate is passed without giving up the turn of the event loop.

    | who waits          | for what                  | woken by                                  |
    |--------------------|---------------------------|-------------------------------------------|
    | a rollout entering | the gate to open          | the end of the last ``closed``            |
    | ``closed``         | rollouts inside to leave  | the last of them; it waits for no trainer |
    """

    def __init__(self) -> None:
        self._inside = 0
        self._holders = 0
        self._opened = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        while self._holders:
            await self._opened.wait()
        self._inside += 1
        self._emptied.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._emptied.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Let no rollout in, and wait until those inside have left."""
        self._holders += 1
        self._opened.clear()
        try:
            await self._emptied.wait()
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._opened.set()


# ---------------------------------------------------------------- parallel lists


def generator_output(trajectories: Sequence[Trajectory]) -> GeneratorOutput:
    """Finished trajectories as parallel lists, one row per sequence."""
    rows = [
        (trajectory, sequence) for trajectory in trajectories for sequence in trajectory.sequences
    ]
    tokens, rewards, masks, logprobs, versions = (
        [list[Any]() for _ in rows] for _ in range(5)
    )  # of the responses
    for row, (_, (_, *response)) in enumerate(rows):
        for segment in response:
            count = len(segment.tokens)
            is_action = segment.kind == "action"
            tokens[row] += segment.tokens.tolist()
            rewards[row] += [*[0.0] * (count - 1), float(segment.reward)][:count]
            masks[row] += [int(is_action)] * count
            logprobs[row] += segment.logprobs.tolist() if is_action else [0.0] * count
            versions[row] += segment.versions.tolist() if is_action else [-1] * count
    output: GeneratorOutput = {
        "prompt_token_ids": [sequence[0].tokens.tolist() for _, sequence in rows],
        "response_ids": tokens,
        "rewards": rewards,
        "loss_masks": masks,
        "stop_reasons": [trajectory.stop_reason for trajectory, _ in rows],
        "rollout_logprobs": logprobs,
        "rollout_versions": versions,
        "trajectory_metrics": [trajectory.metrics for trajectory, _ in rows],
    }
    if len(rows) > len(trajectories):
        output["trajectory_ids"] = [trajectory.id for trajectory, _ in rows]
    return output


def groups_from_output(
    output: GeneratorOutput, prompts: Sequence[Prompt], version: int, samples: int
) -> list[Group]:
    """One group per prompt, of ``samples`` trajectories, in the order requested.

    Without ``rollout_logprobs`` the log-probabilities of actions are NaN. A reward on tokens that
    ``loss_masks`` leaves out stays there: it counts for the group, though no token learns from it.

    Args:
        version: of all tokens, if the generator returns no ``rollout_versions``.

    Raises:
        UserError: naming the list or the trajectory that is wrong.
    """
    ids = [
        [TrajectoryId(prompt.id, repetition) for repetition in range(samples)] for prompt in prompts
    ]
    requested = [identity for of_prompt in ids for identity in of_prompt]
    trajectories = {
        trajectory.id: trajectory for trajectory in _read_output(output, requested, version)
    }
    return [
        Group(prompt, [trajectories[identity] for identity in of_prompt])
        for prompt, of_prompt in zip(prompts, ids, strict=True)
    ]


def _read_output(
    output: GeneratorOutput, requested: list[TrajectoryId], version: int
) -> Iterator[Trajectory]:
    """Check parallel lists, and turn each row into a trajectory; of rows with one id the last has
    all sequences."""
    given = dict[str, Any](output)
    rows: list[TrajectoryId] = (
        requested if given.get("trajectory_ids") is None else given["trajectory_ids"]
    )
    if set(rows) != set(requested):
        missing = set(requested) - set(rows)
        foreign = set(rows) - set(requested)
        if missing:
            problem = f"lack {min(missing)}"
        else:
            problem = f"have {min(foreign)}, which was not asked for"
        raise UserError(f"the generator's trajectory_ids {problem}")
    missing_lists = [name for name in _PARALLEL if given.get(name) is None]
    if missing_lists:
        raise UserError(f"the generator's output lacks {', '.join(missing_lists)}")
    lengths = {
        name: len(given[name]) for name in (*_PARALLEL, *_OPTIONAL) if given.get(name) is not None
    }
    if set(lengths.values()) != {len(rows)}:
        raise UserError(
            f"the generator was asked for {len(rows)} trajectories; its lists have {lengths}"
        )
    trajectories: dict[TrajectoryId, Trajectory] = {}
    for row, identity in enumerate(rows):
        prompt = ints(
            _numbers("prompt_token_ids", output["prompt_token_ids"][row], identity, whole=True)
        )
        if not len(prompt):
            raise UserError(f"{identity}: the prompt has no tokens")
        tokens = ints(_numbers("response_ids", output["response_ids"][row], identity, whole=True))
        count = len(tokens)
        mask = _numbers("loss_masks", output["loss_masks"][row], identity, count) != 0
        logprobs = floats(np.full(count, math.nan))
        versions = ints(np.full(count, version))
        all_logprobs = output.get("rollout_logprobs")
        if all_logprobs:
            logprobs = floats(_numbers("rollout_logprobs", all_logprobs[row], identity, count))
            if not np.isfinite(logprobs[mask]).all():
                raise UserError(f"{identity}: rollout_logprobs of generated tokens must be finite")
        all_versions = output.get("rollout_versions")
        if all_versions:
            versions = ints(
                _numbers("rollout_versions", all_versions[row], identity, count, whole=True)
            )
        reward = output["rewards"][row]
        if isinstance(
            reward, Real
        ):  # one number of the whole trajectory: on its last action token, or else its last
            rewards = np.zeros(count)
            if count:
                rewards[int(np.flatnonzero(mask)[-1]) if mask.any() else -1] = float(reward)
        else:
            rewards = _numbers("rewards", reward, identity, count).astype(np.float64)
        if count:
            edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), count]
        else:
            edges = []
        segments = [Segment("prompt", prompt)]
        for start, end in pairwise(edges):
            span = slice(start, end)
            earned = rewards[start:end]
            total = sum(earned[earned != 0].tolist(), 0.0)
            if mask[start]:
                segments.append(
                    Segment("action", tokens[span], logprobs[span], versions[span], total)
                )
            else:
                segments.append(Segment("observation", tokens[span], reward=total))
        if not count and isinstance(reward, Real):
            segments.append(Segment("action", tokens, logprobs, versions, float(reward)))
        metrics = (output.get("trajectory_metrics") or {row: {}})[row]
        trajectory = Trajectory(identity, segments, output["stop_reasons"][row], metrics)
        if identity in trajectories:
            trajectory.branches = trajectories[identity].sequences
        trajectories[identity] = trajectory
        yield trajectory


def _numbers(
    name: str,
    values: object,
    identity: TrajectoryId,
    count: int | None = None,
    *,
    whole: bool = False,
) -> Numbers:
    """One row of a list as an array of ``count`` numbers.

    Raises:
        UserError: if the row is not that.
    """
    try:
        row = np.asarray(values)
        is_row = not row.size or (row.ndim == 1 and row.dtype.kind in "biuf")
        problem = "" if is_row else f"found {values!r:.60}"
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # of values with lengths or devices of their own
        problem = str(error)
    if problem:
        raise UserError(f"{identity}: {name} must be numbers, one per token: {problem}")
    row = row if row.size else np.zeros(0, np.int64)
    if whole and row.dtype.kind == "f" and not (np.isfinite(row) & (row == np.floor(row))).all():
        raise UserError(f"{identity}: {name} must be whole numbers")
    if count is not None and len(row) != count:
        raise UserError(f"{identity}: {len(row)} {name} for {count} response tokens")
    return row

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
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

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
    """A user's generator of trajectories; override ``BasePPOExp.get_generator`` to use one."""

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """One row per trajectory of the input, in that order, or several with their ids."""
        ...


@runtime_checkable
class ClosableGenerator(Protocol):
    """A generator with connections, processes or requests: it is closed before the engines."""

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
        """One trajectory per entry of parallel lists of prompts."""
        return await self.generate_trajectories(requests_from_input(input_batch))

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """The trajectories as parallel lists."""
        return generator_output(await self.roll_out(input_batch))

    async def partial_rollouts(self) -> list[Trajectory]:
        """The trajectories in flight with their tokens so far, for a checkpoint.

        By default there are none, and they start again.
        """
        return []

    def resume_from(self, trajectories: Sequence[Trajectory]) -> None:
        """Continue the ``partial_rollouts`` of the checkpoint from which the run resumes."""


# ---------------------------------------------------------------- requests


def rollout_requests(
    prompts: Sequence[Prompt], cfg: GeneratorConfig, *, is_eval: bool = False, samples: int = 0
) -> list[RolloutRequest]:
    """Requests group by group.

    Args:
        samples: per prompt; 0: as many as the settings have.
    """
    if is_eval:
        count = samples or cfg.eval_n_samples_per_prompt
        sampling = sampling_params(evaluation(cfg))
    else:
        count = samples or cfg.n_samples_per_prompt
        sampling = sampling_params(cfg.sampling_params)
    limits = {"max_turns": cfg.max_turns} if cfg.max_turns else {}  # environments count by it
    requests = []
    for prompt in prompts:
        for repetition in range(count):
            name = TrajectoryId(prompt.id, repetition)
            # A copy for each sample, because environments may write to it.
            extras = {**prompt.extras, **limits}
            requests.append(RolloutRequest(name, prompt, extras, sampling, is_eval))
    return requests


def generator_input(requests: Sequence[RolloutRequest]) -> GeneratorInput:
    """The input of a user's generator."""
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
    rows = zip(
        input_batch["trajectory_ids"],
        input_batch["prompts"],
        input_batch["env_classes"],
        input_batch["env_extras"],
        strict=True,
    )
    requests = []
    for identity, messages, env_class, extras in rows:
        prompt = Prompt(identity.prompt, messages, env_class, extras)
        requests.append(RolloutRequest(identity, prompt, extras, sampling, is_eval))
    return requests


def eval_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same prompts with the epoch -1, by which their identities are of an evaluation."""
    return [replace(prompt, id=PromptId(-1, prompt.id.row)) for prompt in prompts]


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
    """The seed of one request: samples of a prompt differ, and each is the same in every run."""
    if seed is None:
        return None
    # Seven bytes: engines take signed 64-bit seeds.
    text = f"{seed} {request_id}"
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


# ---------------------------------------------------------------- from a generator to groups


async def run_generator(
    generator: Generator, requests: Sequence[RolloutRequest], version: int
) -> tuple[list[Group], dict[str, float]]:
    """One group per prompt of the requests, and the generator's own metrics.

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
    checked_trajectories: Iterator[Trajectory]
    if not hands_over_trajectories(generator):
        output = await generator.generate(generator_input(requests))
        checked_trajectories = _read_output(output, requested, version)
        metrics = output.get("rollout_metrics") or {}
    elif _is_replaced(generator, "roll_out"):
        checked_trajectories = _checked(
            await generator.roll_out(generator_input(requests)), requested
        )
    else:
        checked_trajectories = _checked(await generator.generate_trajectories(requests), requested)
    trajectories = dict[TrajectoryId, Trajectory]()
    tokens = 0
    # ``checked`` is an iterator: the checks run here, with pauses.
    for trajectory in checked_trajectories:
        trajectories[trajectory.id] = trajectory
        tokens += sum(len(segment.tokens) for segment in trajectory.segments)
        if tokens >= TURN_TOKENS:
            tokens = 0
            await asyncio.sleep(0)
    groups = []
    for prompt, samples in groupby(requests, key=attrgetter("prompt")):
        groups.append(Group(prompt, [trajectories[request.id] for request in samples]))
    return groups, metrics


def hands_over_trajectories(generator: Generator) -> TypeIs[TrajectoryGenerator]:
    """Whether trajectories are taken, since no subclass or instance has replaced ``generate``."""
    return isinstance(generator, TrajectoryGenerator) and not _is_replaced(generator, "generate")


def _is_replaced(generator: TrajectoryGenerator, method: str) -> bool:
    """Whether a subclass or the instance has replaced a method of ``TrajectoryGenerator``."""
    if method in vars(generator):
        return True
    return getattr(type(generator), method) is not getattr(TrajectoryGenerator, method)


def _checked(
    trajectories: Sequence[Trajectory], requested: list[TrajectoryId]
) -> Iterator[Trajectory]:
    """The trajectories one after another, without empty segments."""
    returned_ids = [trajectory.id for trajectory in trajectories]
    if requested != returned_ids:
        index = 0
        for expected, got in zip(requested, returned_ids, strict=False):
            if expected != got:
                break
            index += 1
        difference = f"the first difference is at index {index}"
        if index < len(requested):
            difference += f", expected {requested[index]}"
        if index < len(returned_ids):
            difference += f", got {returned_ids[index]}"
        raise UserError(
            f"roll_out() must return one trajectory per entry of trajectory_ids, in that order: "
            f"expected {len(requested)}, got {len(returned_ids)}; {difference}"
        )
    for trajectory in trajectories:
        for sequence in trajectory.sequences:
            prompt, *response = sequence
            if prompt.kind != "prompt" or not len(prompt.tokens):
                raise UserError(f"{trajectory.id}: the prompt has no tokens")
            if not all(np.isfinite(segment.logprobs).all() for segment in response):
                raise UserError(
                    f"{trajectory.id}: log-probabilities of generated tokens must be finite"
                )
            # In place: the list may be the trajectory's own or one of its branches.
            sequence[1:] = [segment for segment in response if len(segment.tokens)]
        yield trajectory


class RolloutGate:
    """Keeps new rollouts out while the engines are needed without them. It is open at first.

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
        """The context of a rollout."""
        # Again after a wait: another holder may have closed the gate before this task runs.
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
    names = (*_PARALLEL, *_OPTIONAL, "trajectory_ids")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for trajectory in trajectories:
        for prompt, *response in trajectory.sequences:
            tokens: list[int] = []
            rewards: list[float] = []
            mask: list[int] = []
            logprobs: list[float] = []
            versions: list[int] = []
            for segment in response:
                count = len(segment.tokens)
                tokens += segment.tokens.tolist()
                rewards += [0.0] * count
                if count:
                    rewards[-1] = float(segment.reward)
                if segment.kind == "action":
                    mask += [1] * count
                    logprobs += segment.logprobs.tolist()
                    versions += segment.versions.tolist()
                else:
                    mask += [0] * count
                    logprobs += [0.0] * count
                    versions += [-1] * count
            row = {
                "prompt_token_ids": prompt.tokens.tolist(),
                "response_ids": tokens,
                "rewards": rewards,
                "loss_masks": mask,
                "stop_reasons": trajectory.stop_reason,
                "rollout_logprobs": logprobs,
                "rollout_versions": versions,
                "trajectory_metrics": trajectory.metrics,
                "trajectory_ids": trajectory.id,
            }
            for name, value in row.items():
                columns[name].append(value)
    # With one row per trajectory the ids are those of the input.
    if len(columns["trajectory_ids"]) == len(trajectories):
        del columns["trajectory_ids"]
    return cast(GeneratorOutput, columns)


def _read_output(
    output: GeneratorOutput, requested: list[TrajectoryId], version: int
) -> Iterator[Trajectory]:
    """Check parallel lists, and turn each row into a trajectory.

    Of rows with one id the last has all sequences. Without ``rollout_logprobs`` the
    log-probabilities of actions are NaN. A reward on tokens that ``loss_masks`` leaves out stays
    there: it counts for the group, though no token learns from it.
    """
    # What a user's generator returned: names may be missing, or None.
    lists = dict[str, Any](output)
    rows: list[TrajectoryId] = requested
    if lists.get("trajectory_ids") is not None:
        rows = lists["trajectory_ids"]
    if set(rows) != set(requested):
        missing = set(requested) - set(rows)
        foreign = set(rows) - set(requested)
        if missing:
            problem = f"lack {min(missing)}"
        else:
            problem = f"have {min(foreign)}, which was not asked for"
        raise UserError(f"the generator's trajectory_ids {problem}")
    missing_lists = [name for name in _PARALLEL if lists.get(name) is None]
    if missing_lists:
        raise UserError(f"the generator's output lacks {', '.join(missing_lists)}")
    lengths = {}
    for name in (*_PARALLEL, *_OPTIONAL):
        if lists.get(name) is not None:
            lengths[name] = len(lists[name])
    if set(lengths.values()) != {len(rows)}:
        raise UserError(
            f"the generator was asked for {len(rows)} trajectories; its lists have {lengths}"
        )
    trajectories: dict[TrajectoryId, Trajectory] = {}
    for row, identity in enumerate(rows):
        prompt = ints(
            _numbers("prompt_token_ids", output["prompt_token_ids"][row], identity, integers=True)
        )
        if not len(prompt):
            raise UserError(f"{identity}: the prompt has no tokens")
        tokens = ints(
            _numbers("response_ids", output["response_ids"][row], identity, integers=True)
        )
        count = len(tokens)
        mask = _numbers("loss_masks", output["loss_masks"][row], identity, count) != 0
        # NaN stands for log-probabilities that the generator does not return.
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
                _numbers("rollout_versions", all_versions[row], identity, count, integers=True)
            )
        reward = output["rewards"][row]
        if isinstance(reward, Real):
            # One number of the trajectory: on its last action token, or else on its last token.
            rewards = np.zeros(count)
            if count:
                positions = np.flatnonzero(mask)
                position = positions[-1] if len(positions) else -1
                rewards[position] = float(reward)
        else:
            rewards = _numbers("rewards", reward, identity, count).astype(np.float64)
        edges: list[int] = []
        if count:
            # A segment begins where the mask changes.
            changes = np.flatnonzero(mask[1:] != mask[:-1]) + 1
            edges = [0, *changes.tolist(), count]
        segments = [Segment("prompt", prompt)]
        for start, end in pairwise(edges):
            span = slice(start, end)
            segment_rewards = rewards[start:end]
            total = sum(segment_rewards[segment_rewards != 0].tolist(), 0.0)
            if mask[start]:
                segments.append(
                    Segment("action", tokens[span], logprobs[span], versions[span], total)
                )
            else:
                segments.append(Segment("observation", tokens[span], reward=total))
        if not count and isinstance(reward, Real):
            # A response without tokens: an empty action carries the reward.
            segments.append(Segment("action", tokens, logprobs, versions, float(reward)))
        all_metrics = output.get("trajectory_metrics")
        metrics = all_metrics[row] if all_metrics else {}
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
    integers: bool = False,
) -> Numbers:
    """One row of a list as an array of ``count`` numbers.

    Raises:
        UserError: if the row is not that.
    """
    try:
        row = np.asarray(values)
        is_row = not row.size or (row.ndim == 1 and row.dtype.kind in "biuf")
        problem = "" if is_row else f"found {values!r:.60}"
    except (TypeError, ValueError, RuntimeError) as error:
        # Rows of unequal lengths, or tensors on a device.
        problem = str(error)
    if problem:
        raise UserError(f"{identity}: {name} must be numbers, one per token: {problem}")
    if not row.size:
        row = np.zeros(0, np.int64)  # NumPy makes an empty list a float array
    if integers and row.dtype.kind == "f":
        are_integers = np.isfinite(row) & (row == np.floor(row))
        if not are_integers.all():
            raise UserError(f"{identity}: {name} must be whole numbers")
    if count is not None and len(row) != count:
        raise UserError(f"{identity}: {len(row)} {name} for {count} response tokens")
    return row

"""Episodes: the engine writes, the environment answers, until it is done; then judges grade.

The samples of a prompt are one task, one request and one timer for as long as nothing tells them
apart: in the first turn, if their environments open with the prompt as it is. Then an environment
that answers at once is called for all samples that the engine has answered; any other one is waited
for by a task per episode.

Invariant: every trajectory requested comes back, in the order requested, with exactly the tokens
that the engine read and wrote. If one episode fails, the others are cancelled and its error is
raised. If its environment failed and ``environment.on_error`` allows it, only that episode ends,
and is counted (``env/given_up``). The reward of a finished episode includes the grades of its
judges before its group is complete; waiting for a grade holds up no other episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, groupby
from operator import attrgetter
from typing import Any

from skyasync.arrays import NO_INTS, Ints, ints, joined
from skyasync.config.schema import Config
from skyasync.config.schema.judges import PREFIX, JudgeConfig, judges_of
from skyasync.envs.base import BaseTextEnv, Conversation, InvalidEnvOutputError
from skyasync.envs.episodes import StepResult
from skyasync.envs.pool import EnvPool
from skyasync.envs.reward import metrics_of, reward_inputs
from skyasync.envs.tools import schemas
from skyasync.errors import WHILE_PLAYING, NonFiniteRewardError, UserError, unknown
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import GenerationOutput, GenerationRequest, SamplingParams
from skyasync.models.images import Images, images_of
from skyasync.rewards.llm_judge import ChatServer, LLMJudge, Messages, UnansweredError, key_of
from skyasync.rewards.settings import short_names
from skyasync.rollout.chat import LONG_TEXT_TOKENS, ChatTokenizer, PlainText, Tools
from skyasync.rollout.episode_limits import (
    MAX_ATTEMPTS,
    EpisodeFailedError,
    EpisodeLimits,
    failed_episode,
    nonfinite_episode,
    warn_once,
)
from skyasync.rollout.generator_api import Generator, TrajectoryGenerator, request_seed
from skyasync.rollout.group_sampling import (
    GroupMonitor,
    StopRule,
    play_episodes,
    with_extra_samples,
)
from skyasync.rollout.partial_rollouts import PartialRollouts, request_id
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import (
    Group,
    RolloutRequest,
    Segment,
    Trajectory,
    TrajectoryId,
    action_of,
)
from skyasync.utils.rpc import ProcessLostError
from skyasync.utils.task_group import StrictTaskGroup, together

__all__ = ["EpisodeGenerator", "EpisodeLimits", "Generator", "Judges"]

MESSAGE_SAMPLES = 1024
"""Samples whose first requests travel in one message: the default batch of an engine."""
TURN_SAMPLES = 64
"""Samples that begin in one turn of the event loop, which takes a few milliseconds."""


class EpisodeGenerator(TrajectoryGenerator):
    """Single-turn and multi-turn episodes against text environments.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        max_model_len: an episode ends before its tokens would exceed this.
        limits: what else ends an episode.
        apply_chat_template: see ``ChatTokenizer``.
        as_template_shows: the model reads earlier turns as the template shows them, not as it wrote
            them.
        stops: the rule by which training groups are not played to their end (``GroupMonitor``).
        judges: models that grade responses after the end of an episode.
    """

    def __init__(
        self,
        client: InferenceClient,
        environments: EnvPool,
        tokenizer: Tokenizer,
        max_model_len: int,
        limits: EpisodeLimits = EpisodeLimits(),  # noqa: B008  (frozen)
        apply_chat_template: bool = True,
        as_template_shows: bool = True,
        stops: StopRule | None = None,
        judges: Judges | None = None,
    ) -> None:
        self._client = client
        self._environments = environments
        self._judges = judges
        self._chat = ChatTokenizer(tokenizer, apply_chat_template)
        self._plain = PlainText(tokenizer, apply_chat_template)
        self._max_model_len = max_model_len
        self._as_template_shows = as_template_shows
        self._limits = limits
        self._stop_rule = stops
        self._in_flight = asyncio.Semaphore(limits.in_flight) if limits.in_flight else nullcontext()
        self._partial = PartialRollouts(client)

    async def generate_trajectories(self, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        # An evaluation plays every sample to its end, and no extra ones: it must not be biased.
        training = not any(request.is_eval for request in requests)
        extra = self._limits.spares if training else 0
        stops = self._stop_rule if training else None
        samples = with_extra_samples(requests, extra)
        # If samples may be dropped, be stopped or wait, each begins and ends by itself.
        one_by_one = extra or stops is not None or self._limits.in_flight
        try:
            if one_by_one:
                return await self._play_samples(requests, samples, stops, training=training)
            return await self._play_groups(samples, training=training)
        finally:
            # Only here: a checkpoint has finished episodes until their groups are complete.
            self._partial.remove([sample.id for sample in samples])

    async def partial_rollouts(self) -> list[Trajectory]:
        return await self._partial.now()

    def resume_from(self, trajectories: Sequence[Trajectory]) -> None:
        self._partial.resume(trajectories)

    async def close(self) -> None:
        """Close the judges' clients, and end the processes of the environments."""
        if self._judges is not None:
            await self._judges.close()
        self._environments.end()

    # ---------------------------------------------------------------- groups

    async def _play_samples(
        self,
        requests: Sequence[RolloutRequest],
        samples: Sequence[RolloutRequest],
        stops: StopRule | None,
        *,
        training: bool,
    ) -> list[Trajectory]:
        """Play each sample by itself."""
        requested = [request.id for request in requests]
        monitor = None
        if stops is not None or (training and self._limits.metric):
            monitor = GroupMonitor(requested, stops, self._limits.metric)
        progress = self._client.progress if len(samples) > len(requests) else None
        episodes = {request.id: self._play_sample(request) for request in samples}
        return await play_episodes(requested, episodes, monitor, progress)

    async def _play_sample(self, request: RolloutRequest) -> Trajectory:
        episode = self._begin(request, self._setup(request))
        await self._play_alone(episode)
        return episode.trajectory

    async def _play_groups(
        self, requests: Sequence[RolloutRequest], *, training: bool
    ) -> list[Trajectory]:
        """Begin some groups at a time, so that other tasks run in between."""
        by_prompt = groupby(requests, key=attrgetter("id.prompt"))
        groups = [list(samples) for _, samples in by_prompt]
        async with together() as tasks:
            group_tasks: list[asyncio.Task[list[Trajectory]]] = []
            for message in _batches(groups, MESSAGE_SAMPLES):
                # The first requests inside leave in one message.
                with self._client.collecting(), self._environments.collecting():
                    for batch in _batches(message, TURN_SAMPLES):
                        for group in batch:
                            group_tasks.append(
                                tasks.start(self._play_group(group, training=training))
                            )
                        await asyncio.sleep(0)
                    # Until the tasks that the last groups have started have begun too.
                    await asyncio.sleep(0)
        return [trajectory for group in group_tasks for trajectory in group.result()]

    async def _play_group(
        self, requests: Sequence[RolloutRequest], *, training: bool
    ) -> list[Trajectory]:
        """Play the samples of a prompt, their first turn together if nothing tells them apart."""
        setup = self._setup(requests[0])
        episodes = [self._begin(request, setup) for request in requests]
        async with together() as tasks:
            if self._begins_together(episodes, setup):
                await self._play_first_turn(episodes, setup, tasks)
            else:
                for episode in episodes:
                    tasks.start(self._play_alone(episode))
        trajectories = [episode.trajectory for episode in episodes]
        if training and self._limits.metric:
            # For its error alone: at the first group, not at the end of the step.
            Group(requests[0].prompt, trajectories).metric_values(self._limits.metric)
        return trajectories

    def _begins_together(self, episodes: Sequence[_EpisodeTurn], setup: _PromptSetup) -> bool:
        """Whether all episodes begin with the prompt as it is, none with turns of a checkpoint."""
        if not self._environments.starts_from_prompt(setup.env_name, setup.opening):
            return False
        return not any(self._partial.knows(episode.trajectory.id) for episode in episodes)

    async def _play_first_turn(
        self, episodes: Sequence[_EpisodeTurn], setup: _PromptSetup, tasks: StrictTaskGroup
    ) -> None:
        """Send one request for all samples, and have their environments answer.

        An environment that answers at once is called in this task. For others a task per episode
        waits, which also plays the turns that follow.
        """
        extras = episodes[0].request.extras
        plays_here = self._environments.plays_here(setup.env_name, extras) and not setup.graded_by
        unfinished = dict.fromkeys(episodes)  # a set in the order of the samples
        try:
            async with self._time_limit(unfinished):
                await self._open_group(episodes, setup)
                requests = []
                episode_of_request = {}
                for episode in episodes:
                    request = self._request(episode)
                    requests.append(request)
                    episode_of_request[request.request_id] = episode
                async with aclosing(self._client.generate_group(requests)) as arriving:
                    async for outputs in arriving:
                        texts = await setup.texts(outputs, episodes[0].sampling)
                        for output, text in zip(outputs, texts, strict=True):
                            episode = episode_of_request.pop(output.request_id)
                            if not plays_here:
                                # From here on its task has its time limit and its errors.
                                del unfinished[episode]
                                tasks.start(self._play_alone(episode, output, text))
                                continue
                            is_done = await self._end_turn_here(episode, output, text)
                            del unfinished[episode]
                            if not is_done:
                                tasks.start(self._play_alone(episode))
        except BaseException as error:
            if not unfinished:
                raise
            # All are abandoned before the first ``_fail``, which may raise.
            for episode in unfinished:
                self._abandon(episode)
            for episode in unfinished:
                self._fail(episode, error)

    async def _end_turn_here(
        self, episode: _EpisodeTurn, output: GenerationOutput, text: str
    ) -> bool:
        """End a turn in the group's task. Returns whether the episode is over, or failed alone."""
        try:
            is_done = await self._end_turn(episode, output, text)
        except Exception as error:
            self._abandon(episode)
            self._fail(episode, error)
            return True
        if is_done:
            self._count_success(episode)
        return is_done

    # ---------------------------------------------------------------- one episode

    def _setup(self, request: RolloutRequest) -> _PromptSetup:
        """The set-up that all samples of a prompt share."""
        name = request.prompt.env_class
        messages = request.prompt.messages
        try:
            env_class = self._environments.env_class(name)
            env_config = self._environments.env_config
            as_text = env_class.raw_text
            if as_text and images_of(messages):
                raise UserError(
                    f"environment {name} reads plain text (raw_text): rows with images need messages"
                )
            return _PromptSetup(
                env_name=name,
                env_class=env_class,
                frame=self._plain if as_text else self._chat,
                opening=self._plain.opening(messages) if as_text else messages,
                tools=schemas(env_class),  # type: ignore[arg-type]  # a class can be hashed
                sees_tokens=env_class.sees_tokens(env_config, request.extras),
                graded_by=env_class.graded_by(env_config, request.extras),
            )
        except Exception as error:
            _note_episode(error, request.id)
            raise

    def _begin(self, request: RolloutRequest, setup: _PromptSetup) -> _EpisodeTurn:
        trajectory = Trajectory(request.id)
        self._partial.add(trajectory)
        return _EpisodeTurn(request, setup, trajectory, str(request.id), request.sampling)

    async def _play_alone(
        self, episode: _EpisodeTurn, output: GenerationOutput | None = None, text: str | None = None
    ) -> None:
        """Play an episode to its end, and have it graded.

        Args:
            output: the model's action of the current turn, if there is one already, with its
                ``text``.
        """
        try:
            async with self._in_flight, self._time_limit([episode]):
                await self._play_with_retries(episode, output, text)
            # Outside: a grade takes no place of another episode, and has a time limit of its own.
            if episode.setup.graded_by:
                await self._grade(episode)
        except BaseException as error:
            self._abandon(episode)
            self._fail(episode, error)
        else:
            self._count_success(episode)

    async def _grade(self, episode: _EpisodeTurn) -> None:
        if self._judges is None:
            raise UserError(
                "the row's reward functions name a judge, and there are none: set environment.judges.NAME (a "
                "generator of your own takes them from BasePPOExp.get_judges)"
            )
        request = episode.request
        messages = request.prompt.messages
        await self._judges.add(
            episode.trajectory, episode.setup.graded_by, request.extras, messages, episode.text
        )

    def _abandon(self, episode: _EpisodeTurn) -> None:
        self._environments.abandon(episode.name)
        self._partial.remove([episode.trajectory.id])

    def _fail(self, episode: _EpisodeTurn, error: BaseException) -> None:
        """Complete the trajectory of an episode that ends alone; raise any other error."""
        trajectory = episode.trajectory
        messages = episode.request.prompt.messages
        if isinstance(error, NonFiniteRewardError) and self._limits.skips_nonfinite:
            nonfinite_episode(trajectory, error)
        elif isinstance(error, EpisodeFailedError) and isinstance(error.__cause__, Exception):
            opening = Segment("prompt", self._chat.prompt(messages), images=images_of(messages))
            failed_episode(trajectory, self._limits, error.__cause__, opening)
        else:
            _note_episode(error, trajectory.id)
            raise error

    def _count_success(self, episode: _EpisodeTurn) -> None:
        if self._limits.on_error != "raise":
            # env/given_up is a mean over all episodes. The environment may have this dict.
            episode.trajectory.metrics = episode.trajectory.metrics | {"given_up": 0.0}

    @asynccontextmanager
    async def _time_limit(self, episodes: Iterable[_EpisodeTurn]) -> AsyncIterator[None]:
        """Limit the time of episodes that have begun together.

        Args:
            episodes: may shrink inside; those that are left fail when the time has passed.
        """
        limit_s = self._limits.timeout_s
        if not limit_s:
            yield
            return
        for episode in episodes:
            # Once: an episode whose first turn was played in a group goes on with its time.
            if episode.deadline is None:
                episode.deadline = asyncio.get_running_loop().time() + limit_s
        try:
            async with asyncio.timeout_at(next(iter(episodes)).deadline) as timer:
                yield
        except TimeoutError as error:
            if not timer.expired():  # another timeout, of the environment or the engine
                raise
            identity = next(iter(episodes)).trajectory.id
            message = (
                f"episode {identity} did not end within {limit_s:g} s (generator.episode_timeout_s)"
            )
            with self._limits.environment_errors():
                raise TimeoutError(message) from error

    async def _play_with_retries(
        self, episode: _EpisodeTurn, output: GenerationOutput | None, text: str | None
    ) -> None:
        """Play an episode, from its beginning if the process of its environment is lost."""
        trajectory = episode.trajectory
        for attempt in count(1):
            try:
                if not episode.is_open:
                    await self._open(episode)
                await self._play(episode, output, text)
                break
            except (ProcessLostError, EpisodeFailedError) as error:
                cause = error.__cause__ if isinstance(error, EpisodeFailedError) else error
                if not isinstance(cause, ProcessLostError) or attempt == MAX_ATTEMPTS:
                    raise
                message = (
                    "episode %s is played again from its beginning in another process; others are counted in "
                    "env/retries: %.500s"
                )
                warn_once("a lost process", message, trajectory.id, cause)
                self._partial.restart(trajectory)
                episode.restart()
                output = None
                text = None
        if attempt > 1:
            retries = trajectory.metrics.get("retries", 0) + attempt - 1
            trajectory.metrics = trajectory.metrics | {"retries": retries}

    async def _open(self, episode: _EpisodeTurn) -> None:
        """Start the environment, and give its opening to the model."""
        setup = episode.setup
        with self._limits.environment_errors():
            start = await self._environments.init(
                episode.name, setup.env_name, episode.request.extras, setup.opening
            )
        episode.open(start, setup.frame.prompt(start, setup.tools))

    async def _open_group(self, episodes: Sequence[_EpisodeTurn], setup: _PromptSetup) -> None:
        """Start environments that open with the prompt as it is, which is tokenised once."""
        extras = {episode.name: episode.request.extras for episode in episodes}
        with self._limits.environment_errors():
            await self._environments.init_group(extras, setup.env_name, setup.opening)
        tokens = setup.frame.prompt(setup.opening, setup.tools)
        for episode in episodes:
            episode.open(setup.opening, tokens)

    async def _play(
        self, episode: _EpisodeTurn, output: GenerationOutput | None, text: str | None
    ) -> None:
        """Play turn after turn: the model acts, the environment answers."""
        is_done = False
        while not is_done:
            if output is None or text is None:
                output = await self._act(episode)
                (text,) = await episode.setup.texts([output], episode.sampling)
            is_done = await self._end_turn(episode, output, text)
            output = None
            text = None

    def _request(self, episode: _EpisodeTurn) -> GenerationRequest:
        """The request for the model's next action."""
        identity = episode.trajectory.id
        tokens = episode.tokens
        sampling = episode.sampling
        free = self._max_model_len - len(tokens)
        if free < 1:
            raise UserError(
                f"the prompt of {identity} has {len(tokens)} tokens, which leaves no room for a response: "
                f"raise generator.max_model_len={self._max_model_len} or lower trainer.max_prompt_length"
            )
        name = request_id(identity, episode.turn)
        # ``replace`` only if it must: most requests of a run share one object.
        if free < sampling.max_tokens:
            # Engines reject a minimum above the maximum.
            sampling = replace(sampling, max_tokens=free, min_tokens=min(sampling.min_tokens, free))
        if sampling.seed is not None:
            sampling = sampling.with_seed(request_seed(sampling.seed, name))
        return GenerationRequest(
            name, tokens, sampling, session_id=self._limits.session(identity), images=episode.images
        )

    async def _act(self, episode: _EpisodeTurn) -> GenerationOutput:
        request = self._request(episode)
        identity = episode.trajectory.id
        seeded = request.sampling.seed is not None
        # A complete response of a checkpoint is not generated again, a partial one is continued.
        recorded_output = self._partial.turn(
            identity, episode.turn, episode.tokens, episode.images, seeded=seeded
        )
        if recorded_output is None:
            return await self._client.generate(request)
        return await self._client.go_on(request, recorded_output)

    async def _end_turn(self, episode: _EpisodeTurn, output: GenerationOutput, text: str) -> bool:
        """Record the model's action, and have the environment answer.

        Returns:
            Whether the episode is over.
        """
        limits = self._limits
        environments = self._environments
        trajectory = episode.trajectory
        setup = episode.setup
        trajectory.stop_reason = output.finish_reason or "stop"
        # Before the environment answers: a checkpoint in between has the action.
        action = action_of(output, trajectory.segments)
        trajectory.segments.append(action)
        episode.text = text
        turn_tokens = None
        if setup.sees_tokens:
            is_long = len(episode.tokens) + len(action.tokens) >= LONG_TEXT_TOKENS
            read_turn = partial(setup.frame.seen, episode.tokens, action.tokens)
            turn_tokens = await _in_thread(is_long, read_turn)
        with limits.environment_errors():
            step = await environments.step(episode.name, text, turn_tokens)
        action.reward = step["reward"]
        trajectory.metrics = step["metrics"]
        if step["done"]:
            return True
        episode.turn += 1
        if episode.turn == limits.max_turns or not self._observe(episode, action, step):
            # An environment that is not done is closed, and may report metrics then.
            with limits.environment_errors():
                trajectory.metrics |= await environments.close(episode.name)
            return True
        return False

    def _observe(self, episode: _EpisodeTurn, action: Segment, step: StepResult) -> bool:
        """Append the environment's answer, which the model reads next.

        Returns:
            False if there is no room for it.
        """
        trajectory = episode.trajectory
        frame = episode.setup.frame
        messages = step["observations"]
        with self._limits.environment_errors():
            try:
                observation = ints(frame.observation(messages, action.tokens))
                images = images_of(messages)
            except UserError as error:
                # The fault of this episode's text and images, not of the run's settings.
                raise InvalidEnvOutputError(str(error)) from error
        episode.images = (*episode.images, *images)
        tokens = joined(episode.tokens, action.tokens, observation)
        reframed = None  # the conversation as the template shows it, if that differs
        if self._as_template_shows:
            episode.messages += [{"role": "assistant", "content": episode.text}, *messages]
            reframed = frame.reframed(episode.messages, episode.setup.tools, tokens)
        # An action needs one more token at least.
        if len(tokens if reframed is None else reframed) >= self._max_model_len:
            trajectory.stop_reason = "length"
            message = (
                "episode %s is full after %d turns: what its environment said would exceed "
                "generator.max_model_len=%d; others are counted in response/truncated. Raise it, or set "
                "generator.max_turns, which the default follows"
            )
            warn_once(
                "no room", message, trajectory.id, len(trajectory.actions), self._max_model_len
            )
            return False
        if reframed is None:
            trajectory.segments.append(Segment("observation", observation, images=images))
        else:
            # Its context does not extend the previous turn: it begins another sequence.
            trajectory.branches.append(trajectory.segments)
            trajectory.segments = [Segment("prompt", reframed, images=episode.images)]
            tokens = reframed
        episode.tokens = tokens
        if step["sampling_params"]:
            episode.sampling = replace(episode.sampling, **step["sampling_params"])
        return True


@dataclass(frozen=True, kw_only=True)
class _PromptSetup:
    """The set-up that the samples of a prompt have in common.

    Args:
        opening: the conversation, or its text, that environments begin with.
        graded_by: the row's reward functions with their weights, if judges are among them.
    """

    env_name: str
    env_class: type[BaseTextEnv]
    frame: ChatTokenizer
    opening: Conversation | str
    tools: Tools
    sees_tokens: bool
    graded_by: Sequence[tuple[str, float]]

    async def texts(
        self, outputs: Sequence[GenerationOutput], sampling: SamplingParams
    ) -> list[str]:
        """The text of each response for its environment."""
        tokens = [output.token_ids for output in outputs]
        is_long = sum(map(len, tokens)) >= LONG_TEXT_TOKENS
        texts: list[str] = await _in_thread(is_long, partial(self.frame.texts, tokens, sampling))
        return texts


@dataclass(eq=False, slots=True)
class _EpisodeTurn:
    """An episode between two turns.

    Attributes:
        sampling: of the next action.
        deadline: event loop time at which it is too late; None: it has none, or has not begun.
        tokens, images: the model reads them next. Arrays are replaced, never changed, because
            requests have them.
        messages: the conversation so far, as the template shows it.
        text: of the last action.
    """

    request: RolloutRequest
    setup: _PromptSetup
    trajectory: Trajectory
    name: str
    sampling: SamplingParams
    deadline: float | None = None
    turn: int = 0
    tokens: Ints = field(default_factory=lambda: NO_INTS)
    images: Images = ()
    messages: Conversation = field(default_factory=list)
    text: str = ""

    @property
    def is_open(self) -> bool:
        return len(self.tokens) > 0

    def open(self, start: Conversation | str, tokens: Ints) -> None:
        """Note the conversation that the environment opens with, and its tokens."""
        self.tokens = tokens
        self.images = images_of(start)
        # A copy, because later turns are appended; text environments have no messages.
        self.messages = [] if isinstance(start, str) else list(start)
        self.trajectory.segments[0].tokens = tokens
        self.trajectory.segments[0].images = self.images

    def restart(self) -> None:
        """Return to the state before ``open``."""
        self.turn = 0
        self.tokens = NO_INTS
        self.images = ()
        self.messages = []
        self.sampling = self.request.sampling


def _batches(
    groups: Iterable[list[RolloutRequest]], size: int
) -> Iterator[list[list[RolloutRequest]]]:
    """The groups in order, in lists of at least ``size`` samples."""
    batch: list[list[RolloutRequest]] = []
    samples = 0
    for group in groups:
        batch.append(group)
        samples += len(group)
        if samples >= size:
            yield batch
            batch = []
            samples = 0
    if batch:
        yield batch


def _note_episode(error: BaseException, identity: TrajectoryId) -> None:
    notes: list[str] = vars(error).get("__notes__", [])
    # Episodes may share an error: the note names the first.
    if not any(note.startswith(WHILE_PLAYING) for note in notes):
        error.add_note(f"{WHILE_PLAYING} {identity}")


async def _in_thread(is_long: bool, call: partial[Any]) -> Any:  # noqa: ANN401  (the result of the call)
    """The call's result, by a thread for long texts, so that the event loop continues."""
    if is_long:
        return await asyncio.to_thread(call)
    return call()


# ---------------------------------------------------------------- judges


class Judges:
    """All of ``environment.judges``: language models that grade finished episodes.

    Args:
        judges: by their names.
        on_timeout: ``environment.reward_on_timeout``, for responses without a grade.
    """

    def __init__(self, judges: Mapping[str, LLMJudge], on_timeout: str = "zero") -> None:
        self._judges = judges
        self._on_timeout = on_timeout

    @classmethod
    def of(
        cls,
        cfg: Config,
        keys: Mapping[str, str],
        client: InferenceClient,
        tokenizer: Tokenizer,
        max_model_len: int,
    ) -> Judges:
        """The judges of a run.

        Args:
            keys: API keys of servers, by the judges' names; missing ones are read from environment
                variables.
        """
        chat = ChatTokenizer(tokenizer, cfg.data.apply_chat_template)
        judges = {}
        for name, judge in judges_of(cfg.environment.judges).items():
            if judge.engine:
                # Nothing is remembered: the weights of the engines change.
                engine = EngineJudge(name, judge, client, chat, max_model_len)
                judges[name] = LLMJudge(name, judge, engine, remembers=False)
            else:
                key = keys[name] if name in keys else key_of(name, judge)
                server = ChatServer(name, judge, key)
                judges[name] = LLMJudge(name, judge, server, remembers=judge.cache)
        return cls(judges, cfg.environment.reward_on_timeout)

    async def add(
        self,
        trajectory: Trajectory,
        weighted: Sequence[tuple[str, float]],
        row: dict[str, Any],
        messages: Conversation,
        response: str,
    ) -> None:
        """Add the grades of the judges among a row's reward functions to its episode.

        Raises:
            UserError: for a judge that does not exist, or that cannot grade the row.
            TimeoutError: for a response without a grade, if ``environment.reward_on_timeout`` is
                raise.
        """
        judge_weights = [(func, weight) for func, weight in weighted if func.startswith(PREFIX)]
        if not judge_weights or not trajectory.actions:
            return
        judges = []
        for func, _ in judge_weights:
            name = func.removeprefix(PREFIX)
            if name not in self._judges:
                raise UserError(f"{unknown('judge', name, self._judges)} (environment.judges)")
            judges.append(self._judges[name])
        graded_row = reward_inputs(row, messages, response)
        # At once: each judge limits its own requests.
        scores = await asyncio.gather(*(judge.score(graded_row) for judge in judges))
        total = 0.0
        for (func, weight), score in zip(judge_weights, scores, strict=True):
            if score.no_reward and self._on_timeout == "raise":
                raise TimeoutError(
                    f"reward function {func} gave no grade; environment.reward_on_timeout=zero "
                    f"counts it as 0"
                )
            total += weight * score.reward
        trajectory.actions[-1].reward += total
        # Short names differ among all functions of the row, judges or not.
        funcs = [func for func, _ in weighted]
        names = dict(zip(funcs, short_names(funcs), strict=True))
        metrics = metrics_of(
            [names[func] for func, _ in judge_weights],
            scores,
            [False] * len(judge_weights),
            row.get("domain"),
        )
        trajectory.metrics = {**trajectory.metrics, **metrics}

    async def close(self) -> None:
        await asyncio.gather(*(judge.close() for judge in self._judges.values()))


class EngineJudge:
    """The run's engines as a judge: they answer with their current weights, between requests."""

    def __init__(
        self,
        name: str,
        judge: JudgeConfig,
        client: InferenceClient,
        chat: ChatTokenizer,
        max_model_len: int,
    ) -> None:
        self._name = name
        self._judge = judge
        self._client = client
        self._chat = chat
        self._max_model_len = max_model_len
        self._numbers = count()

    async def ask(self, messages: Messages) -> str:
        """The engine's answer.

        Raises:
            UnansweredError: if the question leaves no room for one, or the request was aborted.
        """
        judge = self._judge
        tokens = self._chat.prompt(messages)
        free = self._max_model_len - len(tokens)
        if free < 1:
            raise UnansweredError(
                f"its question has {len(tokens)} tokens, which leaves no room for an answer within "
                f"generator.max_model_len={self._max_model_len}"
            )
        sampling = SamplingParams(
            max_tokens=min(judge.max_tokens, free), temperature=judge.temperature
        )
        request = GenerationRequest(f"judge-{self._name}-{next(self._numbers)}", tokens, sampling)
        output = await self._client.generate(request)
        if output.finish_reason == "abort":
            raise UnansweredError("the engine has ended its request")
        return self._chat.text(output.token_ids)

    async def close(self) -> None:
        """Do nothing: the run closes its engines."""

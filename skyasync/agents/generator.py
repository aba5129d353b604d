"""Episodes of agent programs: a program calls the endpoint as it likes and returns a score.

Invariant: every trajectory requested comes back, in the order requested, made of the calls that
were recorded; the newest of them gets the reward. An engine's failure and a wrong setting end the
run. A program that fails ends its own episode, and with it the run, unless ``environment.on_error``
lets failed episodes be counted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skyasync.agents.calls import Session
from skyasync.agents.external_sessions import SessionBroker
from skyasync.agents.programs import (
    AgentError,
    AgentPool,
    AgentScore,
    NonFiniteAgentError,
    PassingAgentError,
    ray_processes,
)
from skyasync.agents.recorder import RecordedCall, sequences
from skyasync.agents.server import Endpoint
from skyasync.config.parts import reads_behaviour
from skyasync.config.schema import Config
from skyasync.config.schema.generator import ONLINE
from skyasync.config.schema.sampling import evaluation
from skyasync.envs.images import read_messages, with_urls
from skyasync.inference.client import InferenceClient
from skyasync.models.images import images_of
from skyasync.rollout.chat import ChatTokenizer
from skyasync.rollout.episode_limits import (
    MAX_ATTEMPTS,
    EpisodeLimits,
    failed_episode,
    nonfinite_episode,
)
from skyasync.rollout.generator_api import TrajectoryGenerator
from skyasync.rollout.group_sampling import GroupMonitor, play_episodes
from skyasync.rollout.tokenizer import Tokenizer, template_text
from skyasync.rollout.types import RolloutRequest, Segment, Trajectory
from skyasync.utils.rpc import ProcessLostError, RetryPolicy


def agent_generator(
    cfg: Config,
    tokenizer: Tokenizer,
    client: InferenceClient,
    max_model_len: int,
    folder: Path | None,
) -> AgentGenerator:
    """Programs in processes of the run, or, with ``agent_program=online``, external ones.

    Args:
        max_model_len: tokens of a prompt and its response together.
        folder: the run's, where external programs find the endpoint's address and key.
    """
    generator = cfg.generator
    broker = None
    if generator.agent_program == ONLINE:
        broker = SessionBroker(folder)
    endpoint = Endpoint(
        client,
        tokenizer,
        max_model_len,
        generator.endpoint_host,
        port=generator.endpoint_port,
        tools=generator.tool_parser,
        reasoning=generator.reasoning_parser,
        broker=broker,
    )
    runner: AgentPool | SessionBroker
    if broker is not None:
        runner = broker
        patience = RetryPolicy()  # never used: the failure of a session is final
    else:
        patience = RetryPolicy.of(cfg.environment)
        start = ray_processes(
            generator.agent_program,
            agent_config(cfg, max_model_len),
            generator.agent_env,
            generator.endpoint_host,
            patience,
        )
        runner = AgentPool(start, cfg.environment.num_workers)
    return AgentGenerator(
        endpoint,
        runner,
        tokenizer,
        EpisodeLimits.of(cfg),
        patience,
        reads_behaviour=reads_behaviour(cfg.trainer.algorithm),
    )


def agent_config(cfg: Config, max_length: int) -> dict[str, object]:
    """The ``config`` of agent programs: settings of the environments.

    For an agent file it has those of the sampling, too.
    """
    config: dict[str, object] = dict(cfg.environment.env_config)
    if not cfg.generator.agent_func_path:
        return config
    template = ""  # the tokenizer's
    if cfg.data.chat_template:
        template = template_text(cfg.data.chat_template)
    return config | {
        "tokenizer": (
            cfg.trainer.policy.model.path,
            template,
            json.dumps(dict(cfg.data.chat_template_kwargs)),
        ),
        "chat_template": cfg.data.apply_chat_template,
        "max_length": max_length,
        "sampling": {  # by is_eval
            False: asdict(cfg.generator.sampling_params),
            True: asdict(evaluation(cfg.generator)),
        },
    }


class AgentGenerator(TrajectoryGenerator):
    """Plays an episode per trajectory.

    Args:
        endpoint: where programs find the policy; the first request starts it.
        runner: what runs the programs.
        limits: limits of an episode; its turns are decided by the program.
        patience: with programs that fail for now; they are played again from their beginning.
        reads_behaviour: see ``Session``; for episodes that are trained.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        runner: AgentPool | SessionBroker,
        tokenizer: Tokenizer,
        limits: EpisodeLimits,
        patience: RetryPolicy = RetryPolicy(),  # noqa: B008  (frozen)
        *,
        reads_behaviour: str = "",
    ) -> None:
        self._endpoint = endpoint
        self._runner = runner
        self._patience = patience
        self._reads_behaviour = reads_behaviour
        self._chat = ChatTokenizer(tokenizer)
        self._limits = limits
        self._in_flight = asyncio.Semaphore(limits.in_flight) if limits.in_flight else nullcontext()

    async def generate_trajectories(self, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        await self._endpoint.start()
        requested = [request.id for request in requests]
        monitor = None
        if self._limits.metric and not any(request.is_eval for request in requests):
            monitor = GroupMonitor(requested, metric=self._limits.metric)
        episodes = {request.id: self._episode(request) for request in requests}
        return await play_episodes(requested, episodes, monitor)

    async def close(self) -> None:
        """Stop listening, and end the programs' processes."""
        await self._runner.close()
        await self._endpoint.close()

    async def _episode(self, request: RolloutRequest) -> Trajectory:
        identity = request.id
        messages = with_urls(request.prompt.messages)
        data = {"messages": messages, **request.extras, "prompt": messages}
        reads = "" if request.is_eval else self._reads_behaviour
        async with self._in_flight:
            attempt = 1
            retries = 0
            while True:
                # A new session for every attempt: the calls of the failed one are not trained.
                affinity = self._limits.session(identity)
                async with self._endpoint.session(
                    identity, request.sampling, affinity, reads
                ) as session:
                    try:
                        return await self._play(session, data, retries, is_eval=request.is_eval)
                    except PassingAgentError as error:
                        retries += 1
                        program = f"the agent program of {identity}"
                        if not await self._patience.wait(retries, program, error):
                            return self._failed(session, error, data)
                    except AgentError as error:
                        return self._failed(session, error, data)
                    except ProcessLostError as error:
                        # A program may end any process that plays it.
                        if attempt == MAX_ATTEMPTS:
                            lost = AgentError(
                                f"{identity}: its process was lost {MAX_ATTEMPTS} times ({error})"
                            )
                            return self._failed(session, lost, data)
                        attempt += 1

    async def _play(
        self, session: Session, data: dict[str, Any], retries: int, *, is_eval: bool
    ) -> Trajectory:
        """The trajectory of a program's calls, with its score.

        Raises:
            AgentError: if the program fails, or its score does not fit its calls.
            Exception: the failure of an engine that it met, if that comes first.
        """
        score = await self._score(session, data, is_eval=is_eval)
        session.settle()
        _check_answers(session, score)
        if score.rewards:
            # Before the calls become sequences, which copy actions with the experts of a mixture.
            self._add_rewards(session, score)
        trajectory = _recorded(session, score.left_out)
        if not score.rewards:
            trajectory.segments[-1].reward = score.reward
        trajectory.metrics |= score.metrics
        if retries:
            trajectory.metrics["retries"] = float(retries)
        if self._limits.on_error != "raise":
            trajectory.metrics["given_up"] = 0.0  # a mean over all episodes
        return trajectory

    async def _score(self, session: Session, data: dict[str, Any], *, is_eval: bool) -> AgentScore:
        """Run the program; raises the failure of an engine that it meets."""
        play = self._runner.play(
            str(session.identity),
            data,
            self._endpoint.base_url,
            session.api_key,
            is_eval=is_eval,
            timeout_s=self._limits.timeout_s,
        )
        playing = asyncio.ensure_future(play)
        waited: set[asyncio.Future[Any]] = {playing, session.failure}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():  # before the program's own error, which may follow from it
                session.failure.result()
            return await playing
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)

    def _add_rewards(self, session: Session, score: AgentScore) -> None:
        """Rewards of calls, on their tokens; later calls count less by ``turn_discount``."""
        calls = _trained_calls(session, score.left_out)
        newest = {call.id: call for call in calls}  # an answer's choices share its id
        for number, call in enumerate(calls):
            if call is newest[call.id]:
                discount = self._limits.turn_discount**number
                call.action.reward = score.rewards.get(call.id, 0.0) * discount

    def _failed(self, session: Session, error: AgentError, data: dict[str, Any]) -> Trajectory:
        """The trajectory of an episode that failed. Raises the error if the settings say so."""
        calls = session.recorder.calls
        nonfinite = isinstance(error, NonFiniteAgentError) and self._limits.skips_nonfinite
        if nonfinite and calls:
            return nonfinite_episode(_recorded(session), error)
        if self._limits.on_error == "raise":
            raise error
        trajectory = _recorded(session) if calls else Trajectory(session.identity)
        if self._limits.on_error == "mask":
            trajectory.branches = []  # without a loss they carry nothing
        messages = read_messages(data["prompt"])
        opening = Segment("prompt", self._chat.prompt(messages), images=images_of(messages))
        return failed_episode(trajectory, self._limits, error, opening)


def _check_answers(session: Session, score: AgentScore) -> None:
    """Raises ``AgentError`` for a score without a trained call, or for an unknown answer."""
    answers = {call.id for call in session.recorder.calls}
    if not answers - score.left_out:
        raise AgentError(
            f"{session.identity}: the program returned a score without a call of the model"
        )
    foreign = sorted(score.rewards.keys() - answers)
    if foreign:
        raise AgentError(
            f"{session.identity}: the program returned a reward for {foreign[0]}, which is the id of none of its "
            f"{len(answers)} answers: {', '.join(sorted(answers))}"
        )


def _trained_calls(session: Session, left_out: frozenset[str]) -> list[RecordedCall]:
    return [call for call in session.recorder.calls if call.id not in left_out]


def _recorded(session: Session, left_out: frozenset[str] = frozenset()) -> Trajectory:
    """The calls as a trajectory: the sequence of the newest call, and the others as branches."""
    calls = _trained_calls(session, left_out)
    *branches, newest = sequences(calls)
    metrics = {"agent_calls": float(len(calls)), "agent_sequences": float(len(branches) + 1)}
    return Trajectory(
        session.identity,
        newest,
        stop_reason=calls[-1].stop_reason,
        metrics=metrics,
        branches=branches,
    )

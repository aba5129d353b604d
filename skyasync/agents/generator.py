"""Plays episodes of agent programs: a program calls the endpoint as it likes and returns a score.

Invariant: every trajectory requested comes back, in the order requested, made of the calls that
were recorded; the last of them gets the reward. An engine's failure and a wrong setting end the
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
    NonFiniteAgentError,
    PassingAgentError,
    ray_processes,
)
from skyasync.agents.recorder import sequences
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
    patience = RetryPolicy()
    if generator.agent_program == ONLINE:
        broker = SessionBroker(folder)
    else:
        broker = None
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
    else:
        program = generator.agent_program
        host = generator.endpoint_host
        patience = RetryPolicy.of(cfg.environment)
        processes = ray_processes(
            program, agent_config(cfg, max_model_len), generator.agent_env, host, patience
        )
        runner = AgentPool(processes, cfg.environment.num_workers)
    reads = reads_behaviour(cfg.trainer.algorithm)
    return AgentGenerator(
        endpoint, runner, tokenizer, EpisodeLimits.of(cfg), patience, reads_behaviour=reads
    )


def agent_config(cfg: Config, max_length: int) -> dict[str, object]:
    """The ``config`` of agent programs: settings of the environments, and of the sampling for an
    agent file."""
    config: dict[str, object] = dict(cfg.environment.env_config)
    if not cfg.generator.agent_func_path:
        return config
    if cfg.data.chat_template:
        template = template_text(cfg.data.chat_template)
    else:
        template = ""
    return config | {
        "tokenizer": (
            cfg.trainer.policy.model.path,
            template,
            json.dumps(dict(cfg.data.chat_template_kwargs)),
        ),
        "chat_template": cfg.data.apply_chat_template,
        "max_length": max_length,
        "sampling": {
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
        return await play_episodes(
            requested, {request.id: self._episode(request) for request in requests}, monitor
        )

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
                affinity = self._limits.session(identity)
                async with self._endpoint.session(
                    identity, request.sampling, affinity, reads
                ) as session:
                    try:
                        return await self._play(session, data, retries, is_eval=request.is_eval)
                    except PassingAgentError as error:
                        retries += 1
                        if not await self._patience.wait(
                            retries, f"the agent program of {identity}", error
                        ):
                            return self._failed(session, error, data)
                    except AgentError as error:
                        return self._failed(session, error, data)
                    except ProcessLostError as error:
                        if attempt == MAX_ATTEMPTS:
                            lost = AgentError(
                                f"{identity}: its process was lost {MAX_ATTEMPTS} times ({error})"
                            )
                            return self._failed(session, lost, data)
                        attempt += 1

    async def _play(
        self, session: Session, data: dict[str, Any], retries: int, *, is_eval: bool
    ) -> Trajectory:
        """What the program's score makes of its calls; or the failure of an engine that it met, if
        that comes first."""
        episode = str(session.identity)
        url = self._endpoint.base_url
        key = session.api_key
        play = self._runner.play(
            episode, data, url, key, is_eval=is_eval, timeout_s=self._limits.timeout_s
        )
        playing = asyncio.ensure_future(play)
        waited: set[asyncio.Future[Any]] = {playing, session.failure}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():
                session.failure.result()
            score = await playing
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
        session.settle()
        known = {call.id for call in session.recorder.calls}
        if not known - score.left_out:
            raise AgentError(f"{episode}: the program returned a score without a call of the model")
        foreign = sorted(score.rewards.keys() - known)
        if foreign:
            raise AgentError(
                f"{episode}: the program returned a reward for {foreign[0]}, which is the id of none of its "
                f"{len(known)} answers: {', '.join(sorted(known))}"
            )
        trajectory = _recorded(session, score.left_out)
        if (
            score.rewards
        ):  # of each call, on its tokens, worth less by ``turn_discount`` for every call before it
            calls = [call for call in session.recorder.calls if call.id not in score.left_out]
            last = {call.id: call for call in calls}  # an answer's choices share its id
            for number, call in enumerate(calls):
                if call is last[call.id]:
                    call.action.reward = (
                        score.rewards.get(call.id, 0.0) * self._limits.turn_discount**number
                    )
        else:
            trajectory.segments[-1].reward = score.reward
        trajectory.metrics |= score.metrics | ({"retries": float(retries)} if retries else {})
        if self._limits.on_error != "raise":
            trajectory.metrics |= {"given_up": 0.0}  # a mean over all episodes
        return trajectory

    def _failed(self, session: Session, error: AgentError, data: dict[str, Any]) -> Trajectory:
        if (
            isinstance(error, NonFiniteAgentError)
            and self._limits.skips_nonfinite
            and session.recorder.calls
        ):
            return nonfinite_episode(_recorded(session), error)
        if self._limits.on_error == "raise":
            raise error
        if session.recorder.calls:
            trajectory = _recorded(session)
        else:
            trajectory = Trajectory(session.identity)
        if self._limits.on_error == "mask":
            trajectory.branches = []  # without a loss they carry nothing
        messages = read_messages(data["prompt"])
        opening = Segment("prompt", self._chat.prompt(messages), images=images_of(messages))
        return failed_episode(trajectory, self._limits, error, opening)


def _recorded(session: Session, left_out: frozenset[str] = frozenset()) -> Trajectory:
    calls = [call for call in session.recorder.calls if call.id not in left_out]
    *branches, last = sequences(calls)
    metrics = {"agent_calls": float(len(calls)), "agent_sequences": float(len(branches) + 1)}
    return Trajectory(session.identity, last, calls[-1].stop_reason, metrics, branches)

"""Plays episodes of agent programs: a program calls the endpoint as it likes and returns a score.

Invariant: every trajectory asked for comes back, in the order asked, made of the calls that were recorded; the score is
earned by the last of them. An engine's failure and a wrong setting end the run. A program that fails ends its own
episode, and with it the run, unless ``environment.on_error`` has such episodes given up and counted.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any, Protocol

from skyasync.arrays import NO_INTS
from skyasync.endpoint.agent_pool import AgentError, NonFiniteAgentError, PassingAgentError, ProcessLostError, Score
from skyasync.endpoint.recorder import sequences
from skyasync.endpoint.server import Endpoint
from skyasync.endpoint.session import Session
from skyasync.engines.protocol import SamplingParams
from skyasync.processes.transient import Patience
from skyasync.rollout.chat import ChatTokenizer
from skyasync.rollout.contract import TrajectoryGenerator
from skyasync.rollout.early_end import HasMetric
from skyasync.rollout.rules import EpisodeRules, GivenUpError, give_up, without_number
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import GeneratorInput, Segment, Trajectory, TrajectoryId
from skyasync.utils.task_group import together

PLAYS = 3  # of an episode whose process another one may have ended


class Agents(Protocol):
    """Who plays the episodes; see ``AgentPool`` and ``Lobby``."""

    async def play(self, episode: str, data: dict[str, Any], base_url: str, api_key: str, *, is_eval: bool = False,
                   timeout_s: float = 0.0) -> Score: ...  # fmt: skip
    async def close(self) -> None: ...


class AgentGenerator(TrajectoryGenerator):
    """Plays an episode per trajectory.

    Args:
        endpoint: where programs find the policy; the first ``roll_out`` starts it.
        agents: what runs the programs.
        rules: limits of an episode; its turns are the program's own affair.
        patience: with programs that fail for now; they are played again from their beginning.
        reads_behaviour: as ``Session`` has it, for episodes that are trained.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        agents: Agents,
        tokenizer: Tokenizer,
        rules: EpisodeRules,
        patience: Patience = Patience(),  # noqa: B008  (frozen)
        *,
        reads_behaviour: str = "",
    ) -> None:
        self._endpoint, self._agents, self._patience = endpoint, agents, patience
        self._reads_behaviour = reads_behaviour
        self._chat = ChatTokenizer(tokenizer)
        self._rules = rules
        self._turn = asyncio.Semaphore(rules.in_flight) if rules.in_flight else nullcontext()

    async def roll_out(self, input_batch: GeneratorInput) -> list[Trajectory]:
        await self._endpoint.start()
        sampling, is_eval = input_batch["sampling_params"], input_batch["is_eval"]
        episodes = [
            self._episode(identity, {"messages": prompt, **extras, "prompt": prompt}, sampling, is_eval)
            for identity, prompt, extras in zip(
                input_batch["trajectory_ids"], input_batch["prompts"], input_batch["env_extras"], strict=True
            )
        ]
        if self._rules.metric and not is_eval:
            asked = input_batch["trajectory_ids"]
            looks = HasMetric(self._rules.metric, asked)
            episodes = [looks.play(identity, episode) for identity, episode in zip(asked, episodes, strict=True)]
        async with together() as tasks:
            played = [tasks.start(episode) for episode in episodes]
        return [episode.result() for episode in played]

    async def close(self) -> None:
        """Stop listening, and end the programs' processes."""
        await self._agents.close()
        await self._endpoint.close()

    async def _episode(
        self, identity: TrajectoryId, data: dict[str, Any], sampling: SamplingParams, is_eval: bool
    ) -> Trajectory:
        async with self._turn:
            losses = retries = 0
            while True:
                reads = "" if is_eval else self._reads_behaviour
                async with self._endpoint.session(identity, sampling, self._rules.session(identity), reads) as session:
                    try:
                        score = await self._play(session, data, is_eval)
                        return self._scored(session, score, retries)
                    except PassingAgentError as error:
                        retries += 1
                        if not await self._patience.wait(retries, f"the agent program of {identity}", error):
                            return self._given_up(session, error, data)
                    except AgentError as error:
                        return self._given_up(session, error, data)
                    except ProcessLostError as error:
                        losses += 1
                        if losses == PLAYS:
                            lost = AgentError(f"{identity}: its process was lost {PLAYS} times ({error})")
                            return self._given_up(session, lost, data)

    async def _play(self, session: Session, data: dict[str, Any], is_eval: bool) -> Score:
        """The program's score, or the failure of an engine that it met: whichever is there first."""
        episode, url, key = str(session.identity), self._endpoint.base_url, session.api_key
        play = self._agents.play(episode, data, url, key, is_eval=is_eval, timeout_s=self._rules.timeout_s)
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
        _check_calls(session, score)
        return score

    def _scored(self, session: Session, score: Score, retries: int) -> Trajectory:
        trajectory = _recorded(session, score.left_out)
        if score.rewards:
            self._reward_calls(session, score)
        else:
            trajectory.segments[-1].reward = score.reward
        trajectory.metrics |= score.metrics | ({"retries": float(retries)} if retries else {})
        if self._rules.on_error != "raise":
            trajectory.metrics |= {"given_up": 0.0}  # a mean over all episodes
        return trajectory

    def _reward_calls(self, session: Session, score: Score) -> None:
        """Each call's reward on its tokens, worth less by ``turn_discount`` for every call before it."""
        kept = [call for call in session.recorder.calls if call.id not in score.left_out]
        last = {call.id: call for call in kept}  # an answer's choices share its id
        for number, call in enumerate(kept):
            if call is last[call.id]:
                call.action.reward = score.rewards.get(call.id, 0.0) * self._rules.turn_discount**number

    def _given_up(self, session: Session, error: AgentError, data: dict[str, Any]) -> Trajectory:
        if isinstance(error, NonFiniteAgentError) and self._rules.leaves_out and session.recorder.calls:
            return without_number(_recorded(session), error)
        if self._rules.on_error == "raise":
            raise error
        trajectory = Trajectory(session.identity, [Segment("prompt", NO_INTS)])
        if session.recorder.calls:
            trajectory = _recorded(session)
            if self._rules.on_error == "mask":
                trajectory.branches = []  # without a loss they say nothing
        reason = GivenUpError()
        reason.__cause__ = error
        return give_up(trajectory, self._rules, reason, self._chat.prompt(data["prompt"]))


def _check_calls(session: Session, score: Score) -> None:
    """Raises ``AgentError`` if there is nothing to train, or a reward for a call that was not made."""
    calls = {call.id for call in session.recorder.calls}
    if not calls - score.left_out:
        raise AgentError(f"{session.identity}: the program returned a score without a call of the model")
    if foreign := sorted(score.rewards.keys() - calls):
        raise AgentError(
            f"{session.identity}: the program returned a reward for {foreign[0]}, which is the id of none of its "
            f"{len(calls)} answers: {', '.join(sorted(calls))}"
        )


def _recorded(session: Session, left_out: frozenset[str] = frozenset()) -> Trajectory:
    calls = [call for call in session.recorder.calls if call.id not in left_out]
    *branches, last = sequences(calls)
    metrics = {"agent_calls": float(len(calls)), "agent_sequences": float(len(branches) + 1)}
    return Trajectory(session.identity, last, calls[-1].stop_reason, metrics, branches)

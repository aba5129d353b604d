"""Sampling from snapshots of models and from the base model. The engines have one at a time.

Invariant: all tokens of an answer are of its sampler's snapshot. The engines change to another
snapshot between answers, in the order of the requests. A request for the current snapshot starts at
once, unless a request for another one waits.

| who waits     | for what                                | woken by                                              |
|---------------|-----------------------------------------|-------------------------------------------------------|
| ``at``        | the engines to hold its snapshot        | the end of the last answer of another; the weight sync |
| ``answer``    | the engines' answers                    | the client; its time limit                            |
| ``result``    | an answer                               | its task; its own time limit                          |
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from operator import attrgetter

import numpy as np
from tinker import types

from skyasync.agents.api import LONGEST_STOP, MOST_STOPS
from skyasync.arrays import ints
from skyasync.errors import UserError, headline
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import GenerationRequest, SamplingParams
from skyasync.interop.tinker.store import Store
from skyasync.interop.tinker.wire import sample_result
from skyasync.interop.tinker.worker import BASE, PolicyTurns
from skyasync.weight_sync.sync import WeightSync
from skyasync.workers.dispatch import Dispatch
from skyasync.workers.roles import POLICY

log = logging.getLogger(__name__)

ANSWERS = 8192
"""Finished answers that stay in memory, because an answer may be lost on its way. A client whose
answer is gone samples again."""
MOST_SAMPLES = 1024  # of a request, all of which are in memory until they are retrieved
NOT_SUPPORTED = {
    "topk_prompt_logprobs": "the engines return log-probabilities of the sampled tokens only",
    "topk_sample_logprobs": "the engines return log-probabilities of the sampled tokens only",
    "target_prompt_logprobs": "the engines return log-probabilities of the sampled tokens only",
    "prompt_alt_tokens_k": "the engines draw no tokens within a prompt",
    "record_stability_info": "the loss stable_reinforce, which needs it, is not supported",
}


class SnapshotTurns:
    """The snapshot of the engines and its users.

    Attributes:
        current: the snapshot; None while it is changing or not known.
    """

    def __init__(
        self, store: Store, policy: PolicyTurns, weights: WeightSync, client: InferenceClient
    ) -> None:
        self.policy = policy
        self._store = store
        self._weights = weights
        self._client = client
        self.current: str | None = None
        self._users = 0
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._changing = False

    @asynccontextmanager
    async def at(self, snapshot: str) -> AsyncIterator[None]:
        """While it is entered, the engines have this snapshot.

        Args:
            snapshot: the folder of a checkpoint; "" is the base model.

        Raises:
            UserError: if its checkpoint was removed.
        """
        if snapshot == self.current and not self._waiting and not self._changing:
            self._users += 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(snapshot, []).append(turn)
            try:
                self._advance()
                await turn
            except asyncio.CancelledError:
                # _change() had counted it as a user just before.
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    self._leave()
                raise
        try:
            yield
        except Exception as error:
            if self._client.pool.end is not None:  # no engine can be started any more
                self.policy.end(error)
            raise
        finally:
            self._leave()

    async def load(self, snapshot: str, dispatch: Dispatch) -> None:
        """Load a snapshot into the policy, and from there into the engines."""
        version = 0
        if snapshot == BASE:
            call = ("activate", BASE)
        else:
            checkpoint = self._store.checkpoint(snapshot)
            if checkpoint is None:
                raise UserError(
                    "the checkpoint of this sampler has expired or was deleted, or another one has its name"
                )
            version = checkpoint.number
            call = ("show_adapters", checkpoint.folder)
        async with dispatch.transfer.changing():
            await dispatch.call(POLICY, *call)
        await self._weights.sync(version, self._paused)

    async def load_again(self, dispatch: Dispatch) -> None:
        """Load the current snapshot into new ranks, from which replacement engines get it."""
        # The weight sync had connections to the lost ranks.
        self._weights.restart(dispatch)
        if self.current is None:
            return
        if not self._users and self._store.checkpoint(self.current) is None:
            self.current = BASE  # its checkpoint was deleted
        await self.load(self.current, dispatch)

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Engines without work during a weight sync."""
        await self._client.pause("keep")  # requests that run stay in the engines
        try:
            yield
        finally:
            await self._client.resume()

    def _leave(self) -> None:
        self._users -= 1
        self._advance()

    def _advance(self) -> None:
        """Change to the next snapshot if the current one has no users."""
        if self._users == 0 and self._waiting and not self._changing:
            self._changing = True
            task = asyncio.create_task(self._change())
            task.add_done_callback(self.policy.task_ended)

    async def _change(self) -> None:
        """Load the snapshot that was requested first, and wake its users."""
        snapshot = next(iter(self._waiting))
        error = None
        try:
            if snapshot != self.current:
                self.current = None  # not known until it is loaded
                await self.policy.run(BASE, lambda dispatch: self.load(snapshot, dispatch))
                self.current = snapshot
        except Exception as problem:  # the answer of the requests that wait for it
            error = problem
        self._changing = False
        for turn in self._waiting.pop(snapshot):
            if turn.cancelled():
                continue
            if error is None:
                self._users += 1
                turn.set_result(None)
            else:
                turn.set_exception(error)
        self._advance()


class SamplingQueue:
    """A task for each sampling request.

    Args:
        vocabulary: the number of tokens of the model.
        most_tokens: the largest length of a prompt with its answer.
    """

    def __init__(
        self,
        store: Store,
        client: InferenceClient,
        turns: SnapshotTurns,
        vocabulary: int,
        most_tokens: int,
    ) -> None:
        self._store = store
        self._client = client
        self._turns = turns
        self._vocabulary = vocabulary
        self._most_tokens = most_tokens
        self._answers: dict[str, asyncio.Task[bytes]] = {}
        self._finished_names: deque[str] = deque()  # the oldest first

    async def close(self) -> None:
        for task in self._answers.values():
            task.cancel()
        await asyncio.gather(*self._answers.values(), return_exceptions=True)

    def submit(self, request: types.SampleRequest, snapshot: str) -> str:
        """The request's id; a repetition has the id of the first.

        Raises:
            UserError: for more samples than a request may have.
        """
        if not 1 <= request.num_samples <= MOST_SAMPLES:
            raise UserError(f"num_samples is {request.num_samples}, not from 1 to {MOST_SAMPLES}")
        if request.sampling_session_id and request.seq_id is not None:
            name = f"{request.sampling_session_id}:{request.seq_id}"
        else:
            name = f"sample:{secrets.token_hex(8)}"
        if name not in self._answers:
            task = asyncio.create_task(self._answer(name, request, snapshot))
            self._answers[name] = task
            task.add_done_callback(lambda _: self._finished_names.append(name))
            while len(self._finished_names) > ANSWERS:  # tasks of unfinished answers stay
                self._answers.pop(self._finished_names.popleft(), None)
        return name

    def cancel(self, name: str) -> None:
        task = self._answers.pop(name, None)
        if task is not None:
            task.cancel()

    async def result(self, name: str, timeout_s: float) -> tuple[bytes, bool] | None:
        """An answer and True, or an error and False; None if there is none in time.

        Raises:
            KeyError: if there is no such request (any more).
        """
        task = self._answers[name]
        await asyncio.wait([task], timeout=timeout_s)
        if not task.done():
            return None
        if task.cancelled():
            raise KeyError(name)
        error = task.exception()
        if error is None:
            return task.result(), True
        if self._turns.policy.ended.done():
            return None  # the next server does not know it, and the client samples again
        category = "user"
        if not isinstance(error, UserError | ValueError | TypeError):
            category = "server"
            log.warning("a sampling request of Tinker's API has failed", exc_info=error)
        answer = json.dumps({"error": headline(error), "category": category})
        return answer.encode(), False

    async def _answer(self, name: str, request: types.SampleRequest, snapshot: str) -> bytes:
        """The answer of a request, in protobuf."""
        for field, why in NOT_SUPPORTED.items():
            if attrgetter(field)(request):
                raise UserError(f"{field} is not supported: {why}")
        prompt = self._prompt(request)
        samplings = self._samplings(request, len(prompt))
        scored_tokens = request.prompt_logprobs_last_n
        if scored_tokens is not None and not 1 <= scored_tokens < len(prompt):
            raise UserError(
                f"prompt_logprobs_last_n is {scored_tokens}, not from 1 to {len(prompt) - 1}"
            )
        async with self._turns.at(snapshot):
            calls = []
            for sampling in samplings:
                request_id = f"{name}-{secrets.token_hex(4)}"
                generation = GenerationRequest(request_id, ints(prompt), sampling)
                calls.append(self._client.generate(generation))
            outputs = await asyncio.gather(*calls)
            scores = await self._scores(prompt) if request.prompt_logprobs else None
        if scores is not None and scored_tokens is not None:
            scores[: len(prompt) - scored_tokens] = np.nan
        return sample_result(outputs, scores)

    async def _scores(self, prompt: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """The log-probabilities of the prompt's tokens, ``[length]``; NaN for the first one."""
        for _ in range(int(self._client.request_timeout_s) + 1):
            scores = await self._client.score([prompt])
            if scores:
                break
            # All engines have failed. The supervisor starts others, or ends the client.
            await asyncio.sleep(1.0)
        return np.array([np.nan, *scores[0][0]], dtype=np.float32)

    def _prompt(self, request: types.SampleRequest) -> list[int]:
        """The tokens of the prompt.

        Raises:
            UserError: for a prompt that the engines cannot take.
        """
        prompt: list[int] = []
        for chunk in request.prompt.chunks:
            if chunk.type != "encoded_text":
                raise UserError("images and audio are not supported: the policy reads text")
            prompt += chunk.tokens
        if not prompt:
            raise UserError("the prompt is empty")
        for token in prompt:
            if not 0 <= token < self._vocabulary:
                raise UserError(f"there is no token {token}: the model has {self._vocabulary}")
        if len(prompt) >= self._most_tokens:
            raise UserError(
                f"the prompt has {len(prompt)} tokens; with the answer {self._most_tokens} are the most"
            )
        return prompt

    def _samplings(self, request: types.SampleRequest, prompt_length: int) -> list[SamplingParams]:
        """The sampling parameters of each sample, which differ by their seed."""
        params = request.sampling_params
        stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
        stop_texts = tuple(stop for stop in stops if isinstance(stop, str))
        stop_tokens = tuple(stop for stop in stops if isinstance(stop, int))
        longest = max(map(len, stop_texts), default=0)
        if len(stops) > MOST_STOPS or longest > LONGEST_STOP:
            raise UserError(
                f"stop has more than {MOST_STOPS} entries, or one of more than {LONGEST_STOP} characters"
            )
        max_tokens = self._most_tokens - prompt_length
        if params.max_tokens is not None:
            max_tokens = min(params.max_tokens, max_tokens)
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            stop=stop_texts,
            stop_token_ids=stop_tokens,
            # An empty list of stops switches the end-of-text token off; None does not.
            ignore_eos=params.stop is not None and not stops,
            seed=params.seed,
        )
        if params.seed is None:
            return [sampling] * request.num_samples
        return [
            replace(sampling, seed=params.seed + number) for number in range(request.num_samples)
        ]

"""Sampling: from snapshots of models and from the base, of which the engines hold one at a time.

Invariant: every token of an answer is of the snapshot of its sampler. The engines change to another
one between the answers, in the order in which snapshots were requested. A request for the one that
they hold starts at once, unless a request for another one waits.

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
"""The last answers, which stay: one may be lost on its way. A client whose answer is gone samples
again."""
MOST_SAMPLES = 1024
NOT_SUPPORTED = {
    "topk_prompt_logprobs": "the engines return log-probabilities of the sampled tokens only",
    "topk_sample_logprobs": "the engines return log-probabilities of the sampled tokens only",
    "target_prompt_logprobs": "the engines return log-probabilities of the sampled tokens only",
    "prompt_alt_tokens_k": "the engines draw no tokens within a prompt",
    "record_stability_info": "the loss stable_reinforce, which needs it, is not supported",
}


class SnapshotTurns:
    """Which snapshot the engines hold, ``current``, and who uses it."""

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
        """Inside the engines hold it.

        Args:
            snapshot: the folder of a checkpoint; "" is the base model.
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
        """Into the engines, by the policy."""
        if snapshot == BASE:
            number = 0
            call = ("activate", BASE)
        elif (checkpoint := self._store.checkpoint(snapshot)) is not None:
            number = checkpoint.number
            call = ("show_adapters", checkpoint.folder)
        else:
            raise UserError(
                "the checkpoint of this sampler has expired or was deleted, or another one has its name"
            )
        async with dispatch.transfer.changing():
            await dispatch.call(POLICY, *call)
        await self._weights.sync(number, self._paused)

    async def load_again(self, dispatch: Dispatch) -> None:
        """The same snapshot from new ranks: replacements of engines get it from there."""
        self._weights.restart(dispatch)
        if self.current is not None:
            if not self._users and self._store.checkpoint(self.current) is None:
                self.current = BASE  # its checkpoint was deleted
            await self.load(self.current, dispatch)

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        await self._client.pause("keep")
        try:
            yield
        finally:
            await self._client.resume()

    def _leave(self) -> None:
        self._users -= 1
        self._advance()

    def _advance(self) -> None:
        if self._users == 0 and self._waiting and not self._changing:
            self._changing = True
            task = asyncio.create_task(self._change())
            task.add_done_callback(self.policy.task_ended)

    async def _change(self) -> None:
        snapshot = next(iter(self._waiting))
        error = None
        try:
            if snapshot != self.current:
                self.current = None
                await self.policy.run(BASE, lambda dispatch: self.load(snapshot, dispatch))
                self.current = snapshot
        except Exception as problem:
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
    """Args:
    base_model: its name in requests.
    most_tokens: of a prompt and its answer.
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
        self._done: deque[str] = deque()  # of them, the oldest first

    async def close(self) -> None:
        for task in self._answers.values():
            task.cancel()
        await asyncio.gather(*self._answers.values(), return_exceptions=True)

    def submit(self, request: types.SampleRequest, snapshot: str) -> str:
        """The request's id, the first one if it comes twice.

        Raises:
            UserError: for more samples than a request may have.
        """
        if not 1 <= request.num_samples <= MOST_SAMPLES:
            raise UserError(f"num_samples is {request.num_samples}, not from 1 to {MOST_SAMPLES}")
        own = f"{request.sampling_session_id}:{request.seq_id}"
        if request.sampling_session_id and request.seq_id is not None:
            name = own
        else:
            name = f"sample:{secrets.token_hex(8)}"
        if name not in self._answers:
            self._answers[name] = asyncio.create_task(self._answer(name, request, snapshot))
            self._answers[name].add_done_callback(lambda _: self._done.append(name))
            while len(self._done) > ANSWERS:
                self._answers.pop(self._done.popleft(), None)
        return name

    def cancel(self, name: str) -> None:
        task = self._answers.pop(name, None)
        if task is not None:
            task.cancel()

    async def result(self, name: str, timeout_s: float) -> tuple[bytes, bool] | None:
        """An answer and whether it is one, or an error; None if there is none yet.

        Raises:
            KeyError: if the request is not known (any more).
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
        if isinstance(error, UserError | ValueError | TypeError):
            category = "user"
        else:
            category = "server"
        if category == "server":
            log.warning("a sampling request of Tinker's API has failed", exc_info=error)
        return json.dumps({"error": headline(error), "category": category}).encode(), False

    async def _answer(self, name: str, request: types.SampleRequest, snapshot: str) -> bytes:
        for field, why in NOT_SUPPORTED.items():
            if attrgetter(field)(request):
                raise UserError(f"{field} is not supported: {why}")
        prompt = self._prompt(request)
        samplings = self._samplings(request, len(prompt))
        last = request.prompt_logprobs_last_n
        if last is not None and not 1 <= last < len(prompt):
            raise UserError(f"prompt_logprobs_last_n is {last}, not from 1 to {len(prompt) - 1}")
        async with self._turns.at(snapshot):
            calls = [
                self._client.generate(
                    GenerationRequest(f"{name}-{secrets.token_hex(4)}", ints(prompt), sampling)
                )
                for sampling in samplings
            ]
            outputs = await asyncio.gather(*calls)
            if request.prompt_logprobs:
                scores = await self._scores(prompt)
            else:
                scores = None
        if scores is not None and last is not None:
            scores[: len(prompt) - last] = np.nan
        return sample_result(outputs, scores)

    async def _scores(self, prompt: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        for _ in range(int(self._client.request_timeout_s) + 1):
            scores = await self._client.score([prompt])
            if scores:
                break
            await asyncio.sleep(
                1.0
            )  # every engine has failed; the supervisor starts others, or ends the client
        return np.array([np.nan, *scores[0][0]], dtype=np.float32)

    def _prompt(self, request: types.SampleRequest) -> list[int]:
        chunks = request.prompt.chunks
        if not all(chunk.type == "encoded_text" for chunk in chunks):
            raise UserError("images and audio are not supported: the policy reads text")
        prompt = [token for chunk in chunks for token in chunk.tokens]  # type: ignore[union-attr]
        if not prompt:
            raise UserError("the prompt is empty")
        wrong = [token for token in prompt if not 0 <= token < self._vocabulary]
        if wrong:
            raise UserError(f"there is no token {wrong[0]}: the model has {self._vocabulary}")
        if len(prompt) >= self._most_tokens:
            raise UserError(
                f"the prompt has {len(prompt)} tokens; with the answer {self._most_tokens} are the most"
            )
        return prompt

    def _samplings(self, request: types.SampleRequest, prompt: int) -> list[SamplingParams]:
        params = request.sampling_params
        stop = request.sampling_params.stop
        stops = [stop] if isinstance(stop, str) else list(stop or ())
        if len(stops) > MOST_STOPS or any(
            isinstance(each, str) and len(each) > LONGEST_STOP for each in stops
        ):
            raise UserError(
                f"stop has more than {MOST_STOPS} entries, or one of more than {LONGEST_STOP} characters"
            )
        left = self._most_tokens - prompt
        sampling = SamplingParams(
            max_tokens=left if params.max_tokens is None else min(params.max_tokens, left),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            stop=tuple(text for text in stops if isinstance(text, str)),
            stop_token_ids=tuple(token for token in stops if isinstance(token, int)),
            ignore_eos=stop is not None and not stops,
            seed=params.seed,
        )
        if params.seed is None:
            return [sampling] * request.num_samples
        return [
            replace(sampling, seed=params.seed + number) for number in range(request.num_samples)
        ]

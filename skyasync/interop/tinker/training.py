"""Training requests: each model's in the order of their sequence ids, and the models in turn.

Invariant: a request is carried out once, whatever is lost (``store``, ``turns``), and one that
cannot be carried out changes nothing: its error is its result, and the next one goes on. A gradient
adds up until ``optim_step``.

| who waits       | for what                              | woken by                                    |
|-----------------|---------------------------------------|---------------------------------------------|
| a model's task  | the request with the next sequence id | ``submit``                                  |
| a model's task  | its turn with the policy              | ``PolicyTurns``                             |
| ``result``      | a request's result                    | the model's task; its own time limit        |
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tinker import types

from skyasync.config.schema.sampling import INT32
from skyasync.errors import UserError, headline
from skyasync.interop.tinker.store import Checkpoint, Store, StoredRequest
from skyasync.interop.tinker.wire import loss_batch, loss_result
from skyasync.interop.tinker.worker import PolicyTurns
from skyasync.workers.dispatch import Dispatch
from skyasync.workers.roles import POLICY

log = logging.getLogger(__name__)

STEPS_PER_STATE = 8
"""Optimizer steps from one saved state of a model to the next: as many are repeated after a loss,
at most."""
MOST_ATTEMPTS = 3
"""Servers that may be lost while they work on a request; the next one gives it up."""
SNAPSHOTS = 16
"""Snapshots without a name that a model has; samplers of older ones are rejected."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RANGES = {"learning_rate": (0, 1e6), "beta1": (0, 1 - 1e-9), "beta2": (0, 1 - 1e-9), "eps": (1e-30, 1),
           "weight_decay": (0, 1e6), "grad_clip_norm": (-1e30, 1e30)}  # fmt: skip


class RequestOutcome(NamedTuple):
    """What a request has come to. ``state``: the model's state must be saved with it; not ``ok``:
    it is an error."""

    result: bytes
    checkpoint: Checkpoint | None = None
    state: bool = False
    ok: bool = True


def check_lifetime(seconds: object) -> None:
    """Raises UserError for what cannot be a checkpoint's ``ttl_seconds``."""
    if seconds is not None and (type(seconds) is not int or not 0 <= seconds <= INT32):
        raise UserError(
            f"ttl_seconds is {seconds!r:.100}, not a whole number of seconds from 0 to {INT32}"
        )


class TrainingQueue:
    """Args:
    vocabulary: of the policy's model.
    most_tokens: of a row.
    """

    def __init__(self, store: Store, turns: PolicyTurns, vocabulary: int, most_tokens: int) -> None:
        self._store = store
        self._turns = turns
        self._limits = {"vocabulary": vocabulary, "most_tokens": most_tokens}
        self._arrived: dict[str, asyncio.Event] = {}  # of a model, whose task waits for it
        self._finished: dict[str, asyncio.Event] = {}  # of a request
        self._steps: dict[str, int] = {}  # of a model since its last state
        self._counts: dict[
            str, Callable[[], None]
        ] = {}  # of a model: counts an attempt at its request
        self._tasks: set[asyncio.Task[None]] = set()
        turns.restore = self._restore
        self._work: Mapping[str, Callable[[Dispatch, str, bytes], Awaitable[RequestOutcome]]] = {
            "create_model": self._create,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "load_weights": self._load,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
            "not_accepted": self._not_accepted,
        }

    def start(self) -> None:
        """Go on with what a server before has left."""
        for model in self._store.unfinished():
            self._begin(model)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def submit(self, model: str, seq: int, kind: str, payload: bytes) -> str:
        """The id of the request with this sequence id, the first one if it comes twice."""
        request = f"{model}:{seq}"
        if self._store.request(request) is None:
            self._store.add_request(request, model, seq, kind, payload)
            self._begin(model)
        return request

    async def result(self, request: str, timeout_s: float) -> StoredRequest | None:
        """The request with its result, or still without; None if there is no such request."""
        stored = self._store.request(request)
        if stored is None or stored.result is not None:
            return stored
        finished = self._finished.setdefault(request, asyncio.Event())
        with suppress(TimeoutError):
            await asyncio.wait_for(finished.wait(), timeout_s)
        return self._store.request(request)

    def _begin(self, model: str) -> None:
        if model not in self._arrived:
            self._arrived[model] = asyncio.Event()
            task = asyncio.create_task(self._serve(model))
            self._tasks.add(task)
            task.add_done_callback(self._turns.task_ended)
        self._arrived[model].set()

    async def _serve(self, model: str) -> None:
        following = self._store.last_finished(model) + 1
        arrived = self._arrived[model]
        while True:
            while (request := self._store.request(f"{model}:{following}")) is None:
                arrived.clear()
                await arrived.wait()
            await self._carry_out(model, request)
            finished = self._finished.pop(request.id, None)
            if finished is not None:
                finished.set()
            following += 1

    async def _carry_out(self, model: str, request: StoredRequest) -> None:
        if request.attempts >= MOST_ATTEMPTS:
            problem = (
                f"it was given up: {request.attempts} servers were lost while they worked on it"
            )
            log.warning("request %s of Tinker's API: %s", request.id, problem)
            self._fail(model, request, problem, "server")
            return
        counted = False

        def count() -> None:
            """Count this server for the request, once, when the model has its turn."""
            nonlocal counted
            if not counted:
                counted = True
                self._store.count_attempt(request.id, 1)

        async def work(dispatch: Dispatch) -> tuple[RequestOutcome, str]:
            count()
            outcome = await self._work[request.kind](dispatch, model, request.payload)
            self._steps[model] = self._steps.get(model, 0) + (request.kind == "optim_step")
            if not outcome.state and self._steps[model] < STEPS_PER_STATE:
                return outcome, ""
            state = await self._write(dispatch, "states")
            self._steps[model] = 0
            return outcome, state

        self._counts[model] = count
        try:
            outcome, state = await self._turns.run(model, work)
        except asyncio.CancelledError:
            if counted:  # this server ends as it should
                self._store.count_attempt(request.id, -1)
            raise
        except Exception as error:
            if self._turns.ended.done():  # the next server carries it out
                raise
            mine = isinstance(error, UserError | ValueError)
            if not mine:
                log.warning("request %s of Tinker's API has failed", request.id, exc_info=error)
            self._fail(model, request, headline(error), "user" if mine else "server")
            return
        obsolete = self._store.finish(
            request,
            model,
            outcome.result,
            ok=outcome.ok,
            state=state,
            checkpoint=outcome.checkpoint,
        )
        if obsolete:
            shutil.rmtree(obsolete, ignore_errors=True)
        if outcome.checkpoint is not None and not outcome.checkpoint.named:
            for old in self._store.checkpoints(model, named=False)[:-SNAPSHOTS]:
                self._store.remove_checkpoint(old)

    def _fail(self, model: str, request: StoredRequest, problem: str, category: str) -> None:
        """Store an error as the request's result."""
        failure = json.dumps({"error": problem, "category": category}).encode()
        self._store.finish(request, model, failure, ok=False)

    async def _restore(self, model: str, dispatch: Dispatch) -> None:
        """Into ranks that do not have the model: its last state, and what has been done since."""
        self._counts[model]()
        row = self._store.model(model)
        async with dispatch.transfer.changing():
            await dispatch.call(POLICY, "forget", model)
            await dispatch.call(POLICY, "activate", model, row["rank"], row["seed"])
            if row["state"]:
                await dispatch.call(POLICY, "load_adapters", row["state"], True)
        self._steps[model] = 0
        for request in self._store.since_state(model):
            if request.kind in (
                "forward_backward",
                "optim_step",
            ):  # all others change nothing, or come with a state
                await self._work[request.kind](dispatch, model, request.payload)
                self._steps[model] += request.kind == "optim_step"

    # ---------------------------------------------------------------- the requests

    async def _create(self, dispatch: Dispatch, model: str, payload: bytes) -> RequestOutcome:
        return _json({"model_id": model, "type": "create_model"})

    async def _forward_backward(
        self, dispatch: Dispatch, model: str, payload: bytes
    ) -> RequestOutcome:
        batch = await asyncio.to_thread(lambda: loss_batch(payload, **self._limits))
        await dispatch.forward_backward(batch)
        assert batch.proximal_logprobs is not None
        return RequestOutcome(await asyncio.to_thread(loss_result, batch.proximal_logprobs, batch))

    async def _optim_step(self, dispatch: Dispatch, model: str, payload: bytes) -> RequestOutcome:
        params = types.OptimStepRequest.model_validate_json(payload).optim_params
        if not isinstance(params, types.AdamParams):
            raise UserError(
                f"the optimizer {params.type} is not supported: models are trained by AdamW"
            )
        adam = params.model_dump(exclude={"type"})
        for name, (low, high) in _RANGES.items():
            if not low <= adam[name] <= high:
                raise UserError(f"{name} is {adam[name]}, not from {low} to {high}")
        async with dispatch.transfer.changing():
            metrics = (await dispatch.call(POLICY, "adam_step", adam))[0]
        problem = metrics.pop("problem", "")
        if problem:
            failure = {
                "error": f"there was no step, and the gradient is dropped: {problem}",
                "category": "user",
            }
            return _json(failure)._replace(
                ok=False, state=True
            )  # else the gradient would come back with a new rank
        if metrics:
            named = {"grad_norm:mean": metrics["grad_norm"]}
        else:
            named = {}
        return _json({"metrics": named, "type": "optim_step"})

    async def _load(self, dispatch: Dispatch, model: str, payload: bytes) -> RequestOutcome:
        request = types.LoadWeightsRequest.model_validate_json(payload)
        checkpoint = self._store.checkpoint(request.path)
        rank = self._store.model(model)["rank"]
        if checkpoint is None or checkpoint.kind != "weights":
            raise UserError(f"there is no checkpoint {request.path} of a model's state")
        if checkpoint.rank != rank:
            raise UserError(
                f"{request.path} has adapters of rank {checkpoint.rank}, the model of {rank}"
            )
        async with dispatch.transfer.changing():
            await dispatch.call(POLICY, "load_adapters", checkpoint.folder, request.optimizer)
        return _json({"path": request.path, "model_id": model, "type": "load_weights"})._replace(
            state=True
        )

    async def _not_accepted(self, dispatch: Dispatch, model: str, payload: bytes) -> RequestOutcome:
        """A request whose body was no valid one; the error is its payload."""
        raise UserError(payload.decode())

    async def _save(self, dispatch: Dispatch, model: str, payload: bytes) -> RequestOutcome:
        request = types.SaveWeightsRequest.model_validate_json(payload)
        about = request.user_metadata
        saved = self._named(
            model, "weights", request.path, request.ttl_seconds, about, overwrite=request.overwrite
        )
        checkpoint = saved._replace(folder=await self._write(dispatch, "checkpoints"))
        return _json({"path": checkpoint.path, "type": "save_weights"})._replace(
            checkpoint=checkpoint
        )

    async def _save_for_sampler(
        self, dispatch: Dispatch, model: str, payload: bytes
    ) -> RequestOutcome:
        request = types.SaveWeightsForSamplerRequest.model_validate_json(payload)
        answer = dict[str, str]()
        name = request.path
        number = request.sampling_session_seq_id
        saved = self._named(model, "sampler_weights", name or f"snapshot-{secrets.token_hex(8)}", request.ttl_seconds,
                            request.user_metadata)  # fmt: skip
        checkpoint = saved._replace(
            folder=await self._write(dispatch, "checkpoints", optimizer=False),
            named=name is not None,
        )
        if number is None:
            answer["path"] = checkpoint.path
        else:
            session = self._store.model(model)["session"]
            answer["sampling_session_id"] = f"{session}:sample:{number}"
            self._store.add_sampler(
                answer["sampling_session_id"], session, number, checkpoint.folder
            )
        return _json({**answer, "type": "save_weights_for_sampler"})._replace(checkpoint=checkpoint)

    async def _save_external(
        self, dispatch: Dispatch, model: str, payload: bytes
    ) -> RequestOutcome:
        request = types.SaveWeightsExternalRequest.model_validate_json(payload)
        if request.age_encryption_recipients:
            raise UserError(
                "age_encryption_recipients is not supported: the files stay on this machine"
            )
        saved = self._named(model, "external_weights", request.path, request.ttl_seconds, None)
        folder = self._new_folder("checkpoints")
        await dispatch.export(folder)
        return _json({"path": saved.path})._replace(checkpoint=saved._replace(folder=str(folder)))

    def _named(
        self, model: str, kind: str, name: str | None, ttl_s: int | None, about: dict[str, str] | None,
        *, overwrite: bool = False,
    ) -> Checkpoint:  # fmt: skip
        """A checkpoint that has no folder yet."""
        if not name or not _NAME.fullmatch(name):
            raise UserError(
                f"{name!r} cannot name a checkpoint: up to 128 of letters, digits, '.', '_' and '-'"
            )
        check_lifetime(ttl_s)
        path = f"tinker://{model}/{kind}/{name}"
        now = time.time()
        rank = self._store.model(model)["rank"]
        if not overwrite and self._store.checkpoint(path) is not None:
            raise UserError(f"there is a checkpoint {path} already: choose another name")
        expires = now + ttl_s if ttl_s else None
        return Checkpoint(
            path, self._store.next_version(), model, kind, "", rank, True, now, expires, about
        )

    async def _write(self, dispatch: Dispatch, where: str, *, optimizer: bool = True) -> str:
        """The folder in which the active model's adapters are."""
        folder = self._new_folder(where)
        for saved in await dispatch.call(POLICY, "save_adapters", str(folder), optimizer):
            if saved.problem:
                shutil.rmtree(folder, ignore_errors=True)
                raise OSError(saved.problem)
        return str(folder)

    def _new_folder(self, where: str) -> Path:
        folder = self._store.folder / where / secrets.token_hex(8)
        folder.mkdir(parents=True)
        return folder


def _json(answer: Mapping[str, Any]) -> RequestOutcome:
    return RequestOutcome(json.dumps(dict(answer)).encode())

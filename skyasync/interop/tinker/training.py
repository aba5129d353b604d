"""Training requests: each model's in the order of their sequence ids, and the models in turn.

Invariant: a request is carried out once, also if a server or a rank is lost (``store``, ``turns``).
A request that fails changes nothing: its error is its result, and the next request is carried out.
A gradient accumulates until ``optim_step``.

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
"""Optimizer steps between two saved states of a model. After the loss of a rank at most so many are
repeated."""
MOST_ATTEMPTS = 3
"""Servers that may be lost during a request: one that ends every server must not block its model."""
SNAPSHOTS = 16
"""Unnamed snapshots per model that stay on disk; samplers of older ones are rejected."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
#: Bounds of AdamW's settings: at a beta of 1 its bias correction would divide by zero.
_RANGES = {
    "learning_rate": (0, 1e6),
    "beta1": (0, 1 - 1e-9),
    "beta2": (0, 1 - 1e-9),
    "eps": (1e-30, 1),
    "weight_decay": (0, 1e6),
    "grad_clip_norm": (-1e30, 1e30),
}


class RequestOutcome(NamedTuple):
    """The outcome of a request.

    Args:
        result: the answer for the client.
        checkpoint: the checkpoint that it has made.
        state: the model's state must be saved with it.
        ok: the result is no error.
    """

    result: bytes
    checkpoint: Checkpoint | None = None
    state: bool = False
    ok: bool = True


def check_lifetime(seconds: object) -> None:
    """Raises UserError for an invalid ``ttl_seconds`` of a checkpoint."""
    if seconds is None:  # it does not expire
        return
    if type(seconds) is not int or not 0 <= seconds <= INT32:
        raise UserError(
            f"ttl_seconds is {seconds!r:.100}, not a whole number of seconds from 0 to {INT32}"
        )


class TrainingQueue:
    """A task for each model, which carries out its requests.

    Args:
        vocabulary: the number of tokens of the policy's model.
        most_tokens: the largest length of a row.
    """

    def __init__(self, store: Store, turns: PolicyTurns, vocabulary: int, most_tokens: int) -> None:
        self._store = store
        self._turns = turns
        self._limits = {"vocabulary": vocabulary, "most_tokens": most_tokens}
        self._arrivals: dict[str, asyncio.Event] = {}  # model -> a request has arrived
        self._waiters: dict[str, asyncio.Event] = {}  # request -> it has a result
        self._steps: dict[str, int] = {}  # model -> optimizer steps since its last state
        # Model -> the function that counts an attempt at its current request.
        self._counts: dict[str, Callable[[], None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        turns.restore = self._restore
        self._handlers: Mapping[
            str, Callable[[Dispatch, str, bytes], Awaitable[RequestOutcome]]
        ] = {
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
        """Carry out the requests that the previous server has left."""
        for model in self._store.unfinished():
            self._begin(model)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def submit(self, model: str, seq: int, kind: str, payload: bytes) -> str:
        """The id of the request with this sequence id; a repetition has the id of the first."""
        request = f"{model}:{seq}"
        if self._store.request(request) is None:
            self._store.add_request(request, model, seq, kind, payload)
            self._begin(model)
        return request

    async def result(self, request: str, timeout_s: float) -> StoredRequest | None:
        """The request, with its result if there is one in time; None if there is no such request."""
        stored = self._store.request(request)
        if stored is None or stored.result is not None:
            return stored
        finished = self._waiters.setdefault(request, asyncio.Event())
        with suppress(TimeoutError):
            await asyncio.wait_for(finished.wait(), timeout_s)
        return self._store.request(request)

    def _begin(self, model: str) -> None:
        """Wake the model's task, or start it."""
        if model not in self._arrivals:
            self._arrivals[model] = asyncio.Event()
            task = asyncio.create_task(self._serve(model))
            self._tasks.add(task)
            task.add_done_callback(self._turns.task_ended)
        self._arrivals[model].set()

    async def _serve(self, model: str) -> None:
        """Carry out the model's requests in the order of their sequence ids, as they arrive."""
        # Requests may arrive out of order: the next one in the sequence is waited for.
        seq = self._store.last_finished(model) + 1
        arrival = self._arrivals[model]
        while True:
            request = self._store.request(f"{model}:{seq}")
            if request is None:
                arrival.clear()
                await arrival.wait()
                continue
            await self._carry_out(model, request)
            finished = self._waiters.pop(request.id, None)
            if finished is not None:
                finished.set()
            seq += 1

    async def _carry_out(self, model: str, request: StoredRequest) -> None:
        """Carry out a request, and store its result."""
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
            """The outcome, and the folder of the model's state if it was saved."""
            count()
            outcome = await self._handlers[request.kind](dispatch, model, request.payload)
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
            if counted:  # this server ends on purpose: it is no lost one
                self._store.count_attempt(request.id, -1)
            raise
        except Exception as error:
            if self._turns.ended.done():  # the next server carries it out
                raise
            if isinstance(error, UserError | ValueError):
                self._fail(model, request, headline(error), "user")
            else:
                log.warning("request %s of Tinker's API has failed", request.id, exc_info=error)
                self._fail(model, request, headline(error), "server")
            return
        obsolete = self._store.finish(
            request,
            model,
            outcome.result,
            ok=outcome.ok,
            state=state,
            checkpoint=outcome.checkpoint,
        )
        # After the commit: a crash before it leaves the old folder in use.
        if obsolete:
            shutil.rmtree(obsolete, ignore_errors=True)
        if outcome.checkpoint is not None and not outcome.checkpoint.named:
            snapshots = self._store.checkpoints(model, named=False)
            for checkpoint in snapshots[:-SNAPSHOTS]:
                self._store.remove_checkpoint(checkpoint)

    def _fail(self, model: str, request: StoredRequest, problem: str, category: str) -> None:
        """Store an error as the request's result."""
        failure = json.dumps({"error": problem, "category": category}).encode()
        self._store.finish(request, model, failure, ok=False)

    async def _restore(self, model: str, dispatch: Dispatch) -> None:
        """Load a model into ranks that do not have it: its last state, then the requests since."""
        self._counts[model]()  # a request that ends the ranks on its repetition counts, too
        row = self._store.model(model)
        async with dispatch.transfer.changing():
            # A rank in which a request has failed may have a part of it.
            await dispatch.call(POLICY, "forget", model)
            await dispatch.call(POLICY, "activate", model, row["rank"], row["seed"])
            if row["state"]:  # otherwise the new adapters are its state
                await dispatch.call(POLICY, "load_adapters", row["state"], True)
        self._steps[model] = 0
        for request in self._store.since_state(model):
            # All other requests change nothing in the ranks, or have saved a state.
            if request.kind in ("forward_backward", "optim_step"):
                await self._handlers[request.kind](dispatch, model, request.payload)
                self._steps[model] += request.kind == "optim_step"

    # ---------------------------------------------------------------- the requests

    async def _create(self, dispatch: Dispatch, model: str, payload: bytes) -> RequestOutcome:
        """Answer that the model exists: its adapters are made when it has its turn."""
        return _json({"model_id": model, "type": "create_model"})

    async def _forward_backward(
        self, dispatch: Dispatch, model: str, payload: bytes
    ) -> RequestOutcome:
        # In threads, so that large messages do not stop the server.
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
            value = adam[name]
            if not low <= value <= high:
                raise UserError(f"{name} is {value}, not from {low} to {high}")
        async with dispatch.transfer.changing():
            metrics = (await dispatch.call(POLICY, "adam_step", adam))[0]
        problem = metrics.pop("problem", "")
        if problem:
            message = f"there was no step, and the gradient is dropped: {problem}"
            failure = _json({"error": message, "category": "user"})
            # With a state, because without one a restored model would have the gradient again.
            return failure._replace(ok=False, state=True)
        answer: dict[str, float] = {}
        if metrics:
            answer["grad_norm:mean"] = metrics["grad_norm"]
        return _json({"metrics": answer, "type": "optim_step"})

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
        answer = _json({"path": request.path, "model_id": model, "type": "load_weights"})
        # With a state, because the checkpoint may be deleted.
        return answer._replace(state=True)

    async def _not_accepted(self, dispatch: Dispatch, model: str, payload: bytes) -> RequestOutcome:
        """Raise the error of a request with an invalid body; the error is its payload."""
        raise UserError(payload.decode())

    async def _save(self, dispatch: Dispatch, model: str, payload: bytes) -> RequestOutcome:
        request = types.SaveWeightsRequest.model_validate_json(payload)
        checkpoint = self._new_checkpoint(
            model,
            "weights",
            request.path,
            request.ttl_seconds,
            request.user_metadata,
            overwrite=request.overwrite,
        )
        checkpoint = checkpoint._replace(folder=await self._write(dispatch, "checkpoints"))
        answer = _json({"path": checkpoint.path, "type": "save_weights"})
        return answer._replace(checkpoint=checkpoint)

    async def _save_for_sampler(
        self, dispatch: Dispatch, model: str, payload: bytes
    ) -> RequestOutcome:
        request = types.SaveWeightsForSamplerRequest.model_validate_json(payload)
        name = request.path
        number = request.sampling_session_seq_id
        checkpoint = self._new_checkpoint(
            model,
            "sampler_weights",
            name or f"snapshot-{secrets.token_hex(8)}",
            request.ttl_seconds,
            request.user_metadata,
        )
        folder = await self._write(dispatch, "checkpoints", optimizer=False)
        checkpoint = checkpoint._replace(folder=folder, named=name is not None)
        answer: dict[str, str] = {}
        if number is None:
            answer["path"] = checkpoint.path
        else:
            session = self._store.model(model)["session"]
            sampler = f"{session}:sample:{number}"
            answer["sampling_session_id"] = sampler
            self._store.add_sampler(sampler, session, number, checkpoint.folder)
        answer["type"] = "save_weights_for_sampler"
        return _json(answer)._replace(checkpoint=checkpoint)

    async def _save_external(
        self, dispatch: Dispatch, model: str, payload: bytes
    ) -> RequestOutcome:
        request = types.SaveWeightsExternalRequest.model_validate_json(payload)
        if request.age_encryption_recipients:
            raise UserError(
                "age_encryption_recipients is not supported: the files stay on this machine"
            )
        checkpoint = self._new_checkpoint(
            model, "external_weights", request.path, request.ttl_seconds, None
        )
        folder = self._new_folder("checkpoints")
        await dispatch.export(folder)
        checkpoint = checkpoint._replace(folder=str(folder))
        return _json({"path": checkpoint.path})._replace(checkpoint=checkpoint)

    def _new_checkpoint(
        self,
        model: str,
        kind: str,
        name: str | None,
        ttl_s: int | None,
        metadata: dict[str, str] | None,
        *,
        overwrite: bool = False,
    ) -> Checkpoint:
        """A checkpoint that has no folder yet."""
        if not name or not _NAME.fullmatch(name):
            raise UserError(
                f"{name!r} cannot name a checkpoint: up to 128 of letters, digits, '.', '_' and '-'"
            )
        check_lifetime(ttl_s)
        path = f"tinker://{model}/{kind}/{name}"
        rank = self._store.model(model)["rank"]
        if not overwrite and self._store.checkpoint(path) is not None:
            raise UserError(f"there is a checkpoint {path} already: choose another name")
        now = time.time()
        return Checkpoint(
            path=path,
            number=self._store.next_version(),
            model=model,
            kind=kind,
            folder="",
            rank=rank,
            named=True,
            created=now,
            expires=now + ttl_s if ttl_s else None,
            metadata=metadata,
        )

    async def _write(self, dispatch: Dispatch, parent: str, *, optimizer: bool = True) -> str:
        """Write the active model's adapters; the new folder, which is in ``parent``.

        Raises:
            OSError: if a rank could not write them.
        """
        folder = self._new_folder(parent)
        # Each rank answers; one that could not write makes the folder useless.
        for saved in await dispatch.call(POLICY, "save_adapters", str(folder), optimizer):
            if saved.problem:
                shutil.rmtree(folder, ignore_errors=True)
                raise OSError(saved.problem)
        return str(folder)

    def _new_folder(self, parent: str) -> Path:
        folder = self._store.folder / parent / secrets.token_hex(8)
        folder.mkdir(parents=True)
        return folder


def _json(answer: Mapping[str, Any]) -> RequestOutcome:
    text = json.dumps(dict(answer))
    return RequestOutcome(text.encode())

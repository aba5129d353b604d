"""The HTTP server of the Tinker API: sessions, requests, futures, training runs and checkpoints.

Invariant: a request that needs the policy or the engines is a future. It is answered at once with
an id, and the client calls ``retrieve_future`` until there is a result. An error is an answer in
the protocol's form (``error``, ``category``): 4xx for a request that was not accepted, otherwise
the future's result. Both use its sequence id. An endpoint that is not supported answers with the
reason.

| who waits           | for what                     | woken by                                     |
|---------------------|------------------------------|----------------------------------------------|
| ``retrieve_future`` | a result                     | the request's task; ``POLL_S``: ask again    |
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from skyasync.agents.api import RequestError
from skyasync.agents.connection_limits import (
    RUNNER_OPTIONS,
    ConnectionLimits,
    read_bytes,
    read_json,
)
from skyasync.agents.server import LOOPBACK, in_url, key_of, same_key
from skyasync.config.schema.sampling import INT32
from skyasync.errors import UserError
from skyasync.inference.origin_check import is_loopback
from skyasync.interop.tinker.sampling import SamplingQueue
from skyasync.interop.tinker.store import Checkpoint, Store
from skyasync.interop.tinker.training import TrainingQueue, check_lifetime
from skyasync.interop.tinker.wire import PROTOBUF, check_padding
from skyasync.interop.tinker.worker import BASE

KEY_VARIABLE = "SKYASYNC_TINKER_KEY"
POLL_S = 20.0  # the client waits 45 s for an answer
MOST_BYTES = 1 << 24  # of a body; clients send at most about 5 MB at a time
WAITING_CONNECTIONS = 1024
LARGEST_SEED = 1 << 63  # SQLite's integers are signed, with 64 bits
PAGE = 1000  # entries of a list
MOST_METADATA = 1 << 14  # bytes as JSON, of a session, a model or a checkpoint
LATEST = 253402300799  # the last second of the year 9999, the latest that datetime has
NO_EXPIRY = 1e11  # in the year 5138, where the protocol needs a time
M = TypeVar("M", bound=BaseModel)

CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
}

TRAINING_REQUESTS: dict[str, type[BaseModel]] = {
    "optim_step": types.OptimStepRequest,
    "save_weights": types.SaveWeightsRequest,
    "save_weights_for_sampler": types.SaveWeightsForSamplerRequest,
    "save_weights_external": types.SaveWeightsExternalRequest,
}
"""Requests in JSON for one model. Their payload is the body."""

_COPY_WEIGHTS = "a checkpoint has one owner here: load it into a new model, and save that"
_PUBLISH = "training_runs/{model}/checkpoints/{kind}/{name}/publish"
NOT_SUPPORTED = {
    ("POST", "copy_weights"): _COPY_WEIGHTS,
    ("POST", "create_custom_loss"): "losses are computed by the client here",
    ("POST", "join_sampling_session"): "copies of a sampling client choose their own numbers here",
    ("POST", "retrieve_futures"): "futures are retrieved one at a time here",
    ("POST", "sessions/search"): "sessions have no index here; list them",
    ("PUT", "sessions/{session}/project"): "there are no projects here",
    ("GET", "sessions/{session}/trace_export"): "no traces are recorded here",
    ("POST", _PUBLISH): "there are no other users here",
    ("DELETE", _PUBLISH): "there are no other users here",
    ("GET", "audit"): "there is no audit log",
    ("GET", "billing/usage/events"): "nothing is billed here",
    ("GET", "billing/usage/checkpoints/current"): "nothing is billed here",
}
"""Endpoints of the API that are answered with a reason."""


@dataclass(frozen=True)
class Address:
    """The address on which the server listens; without a key only the loopback's.

    Args:
        port: 0 lets the system choose.
        key: that clients must send; "" accepts all.
    """

    host: str = LOOPBACK
    port: int = 8333
    key: str = ""

    def check(self) -> None:
        """Check the address before the processes start.

        Raises:
            UserError: if other machines could reach a server without a key, or the port is taken.
        """
        try:
            loopback = is_loopback(self.host)
        except ValueError:
            raise UserError(
                f"--host {self.host} is not an address of this machine, such as 127.0.0.1"
            ) from None
        if not self.key and not loopback:
            raise UserError(
                f"--host {self.host} lets other machines reach the server: set {KEY_VARIABLE} to a key, which clients "
                f"send as TINKER_API_KEY (it begins with tml-)"
            )
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            socket.create_server((self.host, self.port), family=family).close()
        except OSError as error:
            problem = error.strerror or error
            raise UserError(
                f"--host {self.host} --port {self.port} cannot be listened on: {problem}"
            ) from error


class TinkerServer:
    """The endpoints of the API.

    Args:
        base_model: the name of the policy's model in requests: a folder or a hub's name.
        rank: the largest rank of adapters.
        most_tokens: the largest length of a row, and of a prompt with its answer.
    """

    def __init__(
        self,
        store: Store,
        training: TrainingQueue,
        sampling: SamplingQueue,
        base_model: str,
        rank: int,
        most_tokens: int,
        address: Address,
    ) -> None:
        self._store = store
        self._training = training
        self._sampling = sampling
        self._base_model = base_model
        self._rank = rank
        self._most_tokens = most_tokens
        self._address = address
        self._limits = ConnectionLimits()
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen, and carry out the requests that the previous server has left."""
        self._training.start()
        app = web.Application(
            client_max_size=MOST_BYTES, middlewares=[_errors, self._limits.middleware]
        )
        for (method, path), handler in self._routes().items():
            app.router.add_route(method, f"/api/v1/{path}", self._with_key(handler))
        for (method, path), why in NOT_SUPPORTED.items():
            handler = partial(_not_supported, path, why)
            app.router.add_route(method, f"/api/v1/{path}", self._with_key(handler))
        self._runner = web.AppRunner(app, **RUNNER_OPTIONS)
        await self._runner.setup()
        host = self._address.host
        port = self._address.port
        self.port = await self._limits.open(self._runner, host, port, backlog=WAITING_CONNECTIONS)

    @property
    def base_url(self) -> str:
        return f"http://{in_url(self._address.host)}:{self.port}"

    async def close(self) -> None:
        """Stop listening, and leave unfinished requests to the next server."""
        # Connections first, so that no request arrives while the queues close.
        await self._limits.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await self._sampling.close()
        await self._training.close()

    def _with_key(self, handler: Handler) -> Handler:
        async def checked(request: web.Request) -> web.StreamResponse:
            if self._address.key and not same_key(key_of(request), self._address.key):
                raise RequestError(
                    "the API key is not this server's", code="invalid_api_key", status=401
                )
            # Only after the check: connections without a key are limited.
            self._limits.has_key(request)
            return await handler(request)

        return checked

    def _routes(self) -> dict[tuple[str, str], Handler]:
        checkpoint = "training_runs/{model}/checkpoints/{kind}/{name}"
        return {
            ("GET", "healthz"): partial(_always, {"status": "ok"}),
            # The SDK calls these at its start, and does not work without an answer.
            ("POST", "client/config"): partial(_always, CLIENT_CONFIG),
            ("POST", "client/dynamic_config"): partial(_always, {}),
            ("POST", "telemetry"): partial(_always, {"status": "accepted"}),
            ("GET", "get_server_capabilities"): self._capabilities,
            ("POST", "create_session"): self._create_session,
            ("POST", "session_heartbeat"): partial(_always, {"type": "session_heartbeat"}),
            ("POST", "sessions/{session}/finish"): partial(_always, {}),
            ("GET", "sessions"): self._sessions,
            ("GET", "sessions/{session}"): self._session,
            ("POST", "create_model"): self._create_model,
            ("POST", "get_info"): self._info,
            ("POST", "forward_backward"): self._forward_backward,
            ("POST", "load_weights"): self._load_weights,
            **{("POST", kind): partial(self._training_request, kind) for kind in TRAINING_REQUESTS},
            ("POST", "create_sampling_session"): self._create_sampler,
            ("GET", "samplers/{sampler}"): self._sampler,
            ("POST", "asample"): self._sample,
            ("POST", "cancel_future"): self._cancel,
            ("POST", "retrieve_future"): self._retrieve,
            ("GET", "training_runs"): self._training_runs,
            ("GET", "training_runs/{model}"): self._training_run,
            ("GET", "training_runs/{model}/checkpoints"): self._checkpoints,
            ("GET", "checkpoints"): self._checkpoints,
            ("DELETE", checkpoint): self._delete_checkpoint,
            ("PUT", f"{checkpoint}/ttl"): self._expire_checkpoint,
            ("GET", f"{checkpoint}/external_weights_urls"): self._external_files,
            ("POST", "weights_info"): self._weights_info,
        }

    # ---------------------------------------------------------------- sessions and models

    async def _capabilities(self, request: web.Request) -> web.Response:
        model = {
            "model_name": self._base_model,
            "max_context_length": self._most_tokens,
            "trainable": True,
            "sampleable": True,
        }
        return web.json_response({"supported_models": [model]})

    async def _create_session(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        names = ("tags", "user_metadata", "display_name", "sdk_version")
        metadata = {name: body.get(name) for name in names}
        _check_metadata(metadata)
        session = secrets.token_hex(16)  # not to be guessed by other clients
        self._store.add_session(session, metadata)
        return web.json_response({"type": "create_session", "session_id": session})

    async def _sessions(self, request: web.Request) -> web.Response:
        offset, limit = _page(request)
        return web.json_response({"sessions": self._store.sessions(offset, limit)})

    async def _session(self, request: web.Request) -> web.Response:
        session = request.match_info["session"]
        self._check_session(session)
        metadata = self._store.session(session)
        answer = {
            "training_run_ids": [model["id"] for model in self._store.models(session)],
            "sampler_ids": self._store.samplers(session),
            "user_metadata": metadata.get("user_metadata"),
            "display_name": metadata.get("display_name"),
        }
        return web.json_response(answer)

    def _check_session(self, session: str) -> None:
        if not self._store.has_session(session):
            raise RequestError(f"there is no session {session:.100}", status=404)

    def _check_base(self, name: str | None) -> None:
        if name not in (None, "", self._base_model):
            raise RequestError(
                f"the base model {name} is not served: this server has {self._base_model}"
            )

    async def _create_model(self, request: web.Request) -> web.Response:
        body = await _parsed(request, types.CreateModelRequest)
        self._check_session(body.session_id)
        self._check_base(body.base_model)
        lora = body.lora_config
        if body.optimizer_config.type != "adamw":
            raise RequestError(
                f"the optimizer {body.optimizer_config.type} is not supported: models learn by AdamW"
            )
        if lora is None:
            raise RequestError(
                "training all weights is not supported: models are adapters; give a lora_config"
            )
        if not 1 <= lora.rank <= self._rank:
            raise RequestError(
                f"the rank {lora.rank} is not from 1 to {self._rank} (trainer.policy.lora.rank)"
            )
        if not (lora.train_mlp and lora.train_attn):
            raise RequestError(
                "train_mlp=False and train_attn=False are not supported: all models adapt the layers of "
                "trainer.policy.lora.target_modules"
            )
        seed = (secrets.randbits(31) if lora.seed is None else lora.seed) % LARGEST_SEED
        return self._add_model(body, lora.rank, seed, "create_model", b"{}")

    async def _load_weights(self, request: web.Request) -> web.Response:
        """Load a checkpoint into a model, or into a new one that the request creates."""
        body = await self._parsed_or_skipped(request, types.LoadWeightsRequest)
        payload = body.model_dump_json().encode()
        if body.model_id is not None and body.seq_id is not None:
            return _future(self._submit(body.model_id, body.seq_id, "load_weights", payload))
        if body.session_id is None or body.model_seq_id is None:
            raise RequestError(
                "load_weights needs model_id and seq_id, or session_id and model_seq_id"
            )
        self._check_session(body.session_id)
        self._check_base(body.base_model)
        rank = self._checkpoint(body.path).rank
        return self._add_model(body, rank, 0, "load_weights", payload)

    def _add_model(
        self,
        body: types.CreateModelRequest | types.LoadWeightsRequest,
        rank: int,
        seed: int,
        kind: str,
        payload: bytes,
    ) -> web.Response:
        """Add a model with its first request."""
        _check_metadata(body.user_metadata)
        session = str(body.session_id)
        model = f"{session}:train:{_number(body.model_seq_id, 'model_seq_id', 0)}"
        self._store.add_model(model, session, rank, seed, body.user_metadata or {})
        return _future(self._training.submit(model, 0, kind, payload), model)

    def _model(self, model: str) -> dict[str, Any]:
        try:
            return self._store.model(model)
        except KeyError:
            raise RequestError(f"there is no model {model}", status=404) from None

    async def _info(self, request: web.Request) -> web.Response:
        body = await _parsed(request, types.GetInfoRequest)
        answer = {
            "type": "get_info",
            "model_data": {"model_name": self._base_model, "tokenizer_id": self._base_model},
            "model_id": body.model_id,
            "is_lora": True,
            "lora_rank": self._model(body.model_id)["rank"],
            "model_name": self._base_model,
        }
        return web.json_response(answer)

    # ---------------------------------------------------------------- requests that are futures

    async def _forward_backward(self, request: web.Request) -> web.Response:
        if request.content_type != PROTOBUF:
            problem = f"forward_backward is read as {PROTOBUF}: the SDK is older than this server"
            if request.content_type == "application/json":
                self._skip(await read_json(request), problem)
            raise RequestError(problem, status=415)
        payload = await read_bytes(request)
        try:
            message = pb.ForwardBackwardRequest.FromString(payload)
        except DecodeError as error:
            raise RequestError(f"the request is no ForwardBackwardRequest: {error}") from error
        try:
            check_padding(message)
        except UserError as error:
            self._skip({"model_id": message.model_id, "seq_id": message.seq_id}, str(error))
            raise
        request_id = self._submit(message.model_id, message.seq_id, "forward_backward", payload)
        return _future(request_id, message.model_id)

    async def _training_request(self, kind: str, request: web.Request) -> web.Response:
        body: Any = await self._parsed_or_skipped(request, TRAINING_REQUESTS[kind])
        try:
            check_lifetime(getattr(body, "ttl_seconds", None))
            _check_metadata(getattr(body, "user_metadata", None))
        except (UserError, RequestError) as error:
            self._skip(body.model_dump(), str(error))
            raise
        request_id = self._submit(body.model_id, body.seq_id, kind, await request.read())
        return _future(request_id, body.model_id)

    async def _parsed_or_skipped(self, request: web.Request, schema: type[M]) -> M:
        """The body of a training request.

        Later requests of its model do not wait for a request that is not accepted.
        """
        body = await read_json(request)
        try:
            return _validated(body, schema)
        except RequestError as error:
            self._skip(body, str(error))
            raise

    def _skip(self, body: dict[str, Any], problem: str) -> None:
        """Submit the error in place of a request that is not accepted, if it has a sequence id.

        Otherwise the model's task would wait for this id.
        """
        model = body.get("model_id")
        seq = body.get("seq_id")
        if isinstance(model, str) and type(seq) is int:
            # A model or an id that does not exist: the client gets the first error.
            with suppress(RequestError, UnicodeError):
                self._submit(model, seq, "not_accepted", problem.encode(errors="replace"))

    def _submit(self, model: str, seq: int | None, kind: str, payload: bytes) -> str:
        self._model(model)
        return self._training.submit(model, _number(seq), kind, payload)

    async def _retrieve(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        name = str(body.get("request_id", ""))
        answer: tuple[bytes, bool] | None = None  # with whether it is protobuf
        stored = await self._training.result(name, POLL_S)
        if stored is None:
            try:
                answer = await self._sampling.result(name, POLL_S)
            except KeyError:
                raise RequestError(f"there is no request {name} (any more)", status=410) from None
        elif stored.result is not None:
            # From now on the result may be deleted, after some more requests.
            self._store.retrieved(name)
            answer = (stored.result, stored.ok and stored.kind == "forward_backward")
        if answer is None:
            # 408 lets the SDK call again without counting an error.
            return web.json_response({"type": "try_again", "queue_state": "active"}, status=408)
        result, is_protobuf = answer
        content_type = PROTOBUF if is_protobuf else "application/json"
        return web.Response(body=result, content_type=content_type)

    # ---------------------------------------------------------------- sampling

    async def _create_sampler(self, request: web.Request) -> web.Response:
        body = await _parsed(request, types.CreateSamplingSessionRequest)
        self._check_session(body.session_id)
        self._check_base(body.base_model)
        number = _number(body.sampling_session_seq_id, "sampling_session_seq_id", 0)
        snapshot = self._snapshot(body.model_path)
        sampler = f"{body.session_id}:sample:{number}"
        self._store.add_sampler(sampler, body.session_id, number, snapshot)
        return web.json_response(
            {"type": "create_sampling_session", "sampling_session_id": sampler}
        )

    def _snapshot(self, path: str | None) -> str:
        """The folder of a checkpoint to sample from; without a path, the base model."""
        if not path:
            return BASE
        checkpoint = self._checkpoint(path)
        if checkpoint.kind == "external_weights":
            raise RequestError(
                f"{path} is for other programs: sample from weights or sampler_weights"
            )
        return checkpoint.folder

    async def _sampler(self, request: web.Request) -> web.Response:
        sampler = request.match_info["sampler"]
        snapshot = self._store.snapshot(sampler)
        if snapshot is None:
            raise RequestError(f"there is no sampler {sampler}", status=404)
        checkpoint = self._store.checkpoint(snapshot) if snapshot else None
        answer = {
            "sampler_id": sampler,
            "base_model": self._base_model,
            "model_path": checkpoint.path if checkpoint else None,
        }
        return web.json_response(answer)

    async def _sample(self, request: web.Request) -> web.Response:
        body = await _parsed(request, types.SampleRequest)
        self._check_base(body.base_model)
        snapshot: str | None
        if body.sampling_session_id is None:
            snapshot = self._snapshot(body.model_path)
        else:
            snapshot = self._store.snapshot(body.sampling_session_id)
        if snapshot is None:
            raise RequestError(
                f"there is no sampling session {body.sampling_session_id}", status=404
            )
        name = self._sampling.submit(body, snapshot)
        sequences = [f"{name}:{number}" for number in range(body.num_samples)]
        return web.json_response({"request_id": name, "sample_sequence_ids": sequences})

    async def _cancel(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        name = str(body.get("request_id", ""))
        self._sampling.cancel(name)
        return web.json_response({})

    # ---------------------------------------------------------------- the catalogue

    async def _training_runs(self, request: web.Request) -> web.Response:
        runs = [self._run(model) for model in self._store.models()]
        return _list("training_runs", runs, request)

    async def _training_run(self, request: web.Request) -> web.Response:
        model = self._model(request.match_info["model"])
        return web.json_response(self._run(model))

    def _run(self, model: dict[str, Any]) -> dict[str, Any]:
        """A model as a training run of the protocol."""
        newest = {}  # kind -> its newest checkpoint: they are the oldest first
        for checkpoint in self._store.checkpoints(model["id"], named=True):
            newest[checkpoint.kind] = _described(checkpoint)
        return {
            "training_run_id": model["id"],
            "base_model": self._base_model,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": model["rank"],
            "last_request_time": _time(model["used"]),
            "last_checkpoint": newest.get("weights"),
            "last_sampler_checkpoint": newest.get("sampler_weights"),
            "user_metadata": {str(name): str(value) for name, value in model["about"].items()},
        }

    async def _checkpoints(self, request: web.Request) -> web.Response:
        """The checkpoints of a model, or of all."""
        model = request.match_info.get("model", "")
        if model:
            self._model(model)
        checkpoints = []
        for checkpoint in self._store.checkpoints(model, named=True):
            checkpoints.append(_described(checkpoint))
        return _list("checkpoints", checkpoints, request)

    def _checkpoint(self, path: str) -> Checkpoint:
        checkpoint = self._store.checkpoint(path)
        if checkpoint is None:
            raise RequestError(f"there is no checkpoint {path}", status=404)
        return checkpoint

    def _requested_checkpoint(self, request: web.Request) -> Checkpoint:
        """The checkpoint that the URL names."""
        return self._checkpoint("tinker://{model}/{kind}/{name}".format(**request.match_info))

    async def _delete_checkpoint(self, request: web.Request) -> web.Response:
        self._store.remove_checkpoint(self._requested_checkpoint(request))
        return web.json_response({})

    async def _expire_checkpoint(self, request: web.Request) -> web.Response:
        checkpoint = self._requested_checkpoint(request)
        body = await read_json(request)
        seconds = body.get("ttl_seconds")
        check_lifetime(seconds)
        now = datetime.now(UTC).timestamp()
        # Its files are removed when checkpoints are listed.
        self._store.expire(checkpoint.path, None if seconds is None else now + seconds)
        return web.json_response({})

    async def _external_files(self, request: web.Request) -> web.Response:
        checkpoint = self._requested_checkpoint(request)
        folder = Path(checkpoint.folder)
        # In a thread: the folder may be on a network file system.
        files = await asyncio.to_thread(_files, folder)
        urls = {str(path.relative_to(folder)): path.absolute().as_uri() for path in files}
        expires = _time(checkpoint.expires or NO_EXPIRY)
        return web.json_response({"urls": urls, "expires": expires})

    async def _weights_info(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        path = str(body.get("tinker_path", ""))
        checkpoint = self._checkpoint(path)
        answer = {
            "base_model": self._base_model,
            "is_lora": True,
            "lora_rank": checkpoint.rank,
            "train_unembed": False,
            "train_mlp": True,
            "train_attn": True,
        }
        return web.json_response(answer)


def _described(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint as the protocol describes it."""
    type_of = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
    size = 0
    for path in _files(Path(checkpoint.folder)):
        size += path.stat().st_size
    return {
        # Without tinker://MODEL/.
        "checkpoint_id": checkpoint.path.split("/", 3)[3],
        "checkpoint_type": type_of[checkpoint.kind],
        "time": _time(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": size,
        "public": False,
        "user_metadata": checkpoint.metadata,
        "expires_at": checkpoint.expires and _time(checkpoint.expires),
    }


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _time(seconds: float) -> str:
    """Seconds since 1970 as text."""
    time = datetime.fromtimestamp(min(seconds, LATEST), UTC)
    return time.isoformat()


def _check_metadata(metadata: object) -> None:
    """Raises RequestError for metadata that are too large."""
    size = len(json.dumps(metadata))
    if size > MOST_METADATA:
        raise RequestError(
            f"user_metadata and tags have {size} bytes as JSON; {MOST_METADATA} are the most"
        )


def _page(request: web.Request) -> tuple[int, int]:
    """The position of the first entry of a list, and the number of entries."""
    try:
        offset = int(request.query.get("offset", "0"))
        limit = int(request.query.get("limit", "100"))
    except ValueError:
        raise RequestError("offset and limit must be whole numbers") from None
    return max(0, offset), min(max(0, limit), PAGE)


def _list(name: str, entries: list[dict[str, Any]], request: web.Request) -> web.Response:
    """One page of a list."""
    offset, limit = _page(request)
    cursor = {"offset": offset, "limit": limit, "total_count": len(entries)}
    return web.json_response({name: entries[offset : offset + limit], "cursor": cursor})


async def _parsed(request: web.Request, schema: type[M]) -> M:
    return _validated(await read_json(request), schema)


def _validated(body: dict[str, Any], schema: type[M]) -> M:
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"]))
        raise RequestError(f"{field}: {problem['msg']}", field) from error


def _number(value: int | None, name: str = "seq_id", minimum: int = 1) -> int:
    """A sequence id that the store can have."""
    if value is None or not minimum <= value <= INT32:
        raise RequestError(f"{name} is {value}, not a whole number from {minimum} to {INT32}", name)
    return value


def _future(request: str, model: str | None = None) -> web.Response:
    answer = {"request_id": request}
    if model:
        answer["model_id"] = model
    return web.json_response(answer)


async def _always(answer: dict[str, Any], request: web.Request) -> web.Response:
    """The same answer for each request."""
    await read_bytes(request)
    return web.json_response(answer)


async def _not_supported(path: str, why: str, request: web.Request) -> web.Response:
    _, _, name = path.rpartition("/")
    raise RequestError(f"{name} is not supported: {why}", code="not_supported")


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors in the protocol's form."""
    category = "user"
    try:
        return await handler(request)
    except web.HTTPException as error:  # no such address, wrong method, too long
        problem = RequestError(
            f"{error.reason} ({request.method} {request.path})", status=error.status
        )
    except RequestError as error:
        problem = error
    except UserError as error:
        problem = RequestError(str(error))
    except UnicodeEncodeError:  # half of a surrogate pair, valid in JSON and not in the database
        problem = RequestError("a text of the request is not valid Unicode")
    except Exception as error:
        problem = RequestError(f"{type(error).__name__}: {error}", status=500)
        category = "server"
    body = {
        "error": str(problem),
        "category": category,
        "detail": str(problem),
        "code": problem.code,
    }
    answer = web.Response(
        text=json.dumps(body), content_type="application/json", status=problem.status
    )
    # The rest of a body that was not read would be taken for the next request.
    if not request.content.is_eof():
        answer.force_close()
    return answer

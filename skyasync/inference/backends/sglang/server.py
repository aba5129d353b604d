"""An SGLang server that the run does not start; code for all kinds of servers is in ``remote``.

Its JSON is that of its own ``io_struct.py`` and ``http_server.py`` (0.5.23). Its log-probabilities
are of the tempered distribution, after penalties and biases, and before top-k, top-p and min-p:
those are not supported.

Invariant: the server gets each name once. If a client closes a connection, the server ends the
request by its name two seconds later, and would end a second request of that name.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from skyasync.errors import UserError
from skyasync.inference.interface import (
    BACKENDS,
    EngineConfig,
    FinishReason,
    GenerationOutput,
    PauseMode,
    SamplingParams,
)
from skyasync.inference.remote import INFO, JSON, RemoteEngine, RemoteRequest
from skyasync.weight_sync.transfers.file import missing_file_error
from skyasync.weight_sync.update import WeightUpdate

GENERATE = "/generate"
INTERVAL = 16  # tokens of a piece of an answer
RESERVED = 5  # tokens that SGLang keeps free after a prompt
FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_OFF = SamplingParams()


class SGLangServerEngine(RemoteEngine):
    kind = "SGLang"
    core_route = INFO  # which asks the server's scheduler
    how_to_start = "start it with: python -m sglang.launch_server --model-path MODEL --port PORT"
    # It cannot compare weights with digests: verification prompts run after every sync.
    proves_weights = False

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._server_ids = (f"{self._run_id}-{number}" for number in count())
        self._open = asyncio.Event()  # requests may be sent
        self._open.set()

    @classmethod
    def complaint(cls, url: str, info: JSON, config: EngineConfig) -> str:
        if "vllm_config" in info:
            return f"generator.engines: {url} is a vLLM server: leave generator.backend at auto"
        if "internal_states" not in info or "max_req_input_len" not in info:
            return cls.foreign(url, "it does not say how it was started")
        return cls.mismatch(
            url,
            config,
            longest=int(info["max_req_input_len"]) + 1,
            length=f"--context-length {config.max_model_len + RESERVED}",
            kwargs=json.loads(info.get("json_model_override_args") or "{}"),
            kwargs_flag="--json-model-override-args",
            dtype=str(info.get("dtype")),
        )

    async def _cache_used(self) -> int | None:
        answer = await self._server.get("/v1/loads")
        loads = answer.get("loads")
        if loads:
            return sum(int(load["num_used_tokens"]) for load in loads)
        return None

    async def _reset(self, info: JSON) -> int:
        await self._server.post("/abort_request", {"abort_all": True})
        await self._server.post("/continue_generation", {})
        version = {"new_version": str(self.version), "abort_all_requests": False}
        await self._server.post("/update_weight_version", version)
        return int(info.get("max_total_num_tokens") or 0)

    async def _generate(self, pending: RemoteRequest) -> GenerationOutput:
        await self._open.wait()
        pending.server_id = next(self._server_ids)
        body = {
            "rid": pending.server_id,
            "input_ids": pending.request.prompt_token_ids.tolist(),
            "sampling_params": sampling_of(pending.request.fresh_sampling),
            "return_logprob": True,
            "extra_key": self._salt(pending.version),
            "stream": True,
        }
        async for chunk in self._server.chunks(GENERATE, body):
            meta = chunk["meta_info"]
            new_tokens = int(meta["completion_tokens"]) - len(pending.tokens)
            # a chunk repeats earlier ones unless the server was started otherwise
            if new_tokens > 0:
                entries: Sequence[Sequence[Any]] = meta.get("output_token_logprobs") or ()
                entries = entries[-new_tokens:]
                if len(entries) != new_tokens:
                    name = pending.request.request_id
                    raise RuntimeError(
                        f"{new_tokens} tokens of {name} have {len(entries)} log-probabilities"
                    )
                tokens = [int(entry[1]) for entry in entries]
                logprobs = [float(entry[0]) for entry in entries]
                pending.receive(tokens, logprobs)
            reason = meta.get("finish_reason")
            if reason:
                # With a status the request was not cut, but could not be computed.
                if reason["type"] not in FINISH_REASONS or reason.get("status_code"):
                    raise RuntimeError(
                        f"{self._server.name} failed on request {pending.request.request_id}: {reason}"
                    )
                finish_reason = FINISH_REASONS[reason["type"]]
                return self._ended(pending, finish_reason, meta.get("weight_versions"))
        raise self._server.failure("it ended an answer without a reason")

    async def _abort(self, pending: Collection[RemoteRequest]) -> None:
        for request in pending:
            await self._server.post("/abort_request", {"rid": request.server_id})

    async def _score(self, sequence: Sequence[int]) -> list[float] | None:
        body = {
            "rid": next(self._server_ids),
            "input_ids": [int(token) for token in sequence],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": self._salt(self.version),
        }
        answer = await self._server.post(GENERATE, body)
        meta = answer["meta_info"]
        scores = meta.get("input_token_logprobs") or ()
        if len(scores) != len(sequence):
            return None
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            return None
        return [float(score[0]) for score in scores[1:]]  # the first token has none

    async def _schedule(self, mode: PauseMode | None) -> None:
        if mode is None:
            self._open.set()
            await self._server.post("/continue_generation", {})
            return
        if mode == "wait":  # the server has no such mode: no request is sent until the others end
            self._open.clear()
            while tasks := self._sent_tasks():
                await asyncio.wait(tasks)
                await asyncio.sleep(0)  # ``_answer`` removes a finished request from the table
        server_mode = "abort" if mode == "abort" else "in_place"
        await self._server.post("/pause_generation", {"mode": server_mode})

    def _sent_tasks(self) -> list[asyncio.Task[GenerationOutput]]:
        """The tasks of requests that the server has been sent."""
        tasks = []
        for pending in self._requests.values():
            if pending.server_id and pending.task:
                tasks.append(pending.task)
        return tasks

    async def _load(self, update: WeightUpdate) -> None:
        with _as_folder(Path(update.info["path"])) as folder:
            body = {
                "model_path": str(folder),
                "weight_version": str(update.version),
                "flush_cache": False,
            }
            await self._server.post("/update_weights_from_disk", body)


def sampling_of(sampling: SamplingParams) -> dict[str, Any]:
    """The fields of SGLang's ``SamplingParams``.

    Raises:
        UserError: naming a field that it lacks.
    """
    settings = vars(sampling)
    off = vars(_OFF)
    for name in BACKENDS["sglang_server"][1]["lacks"]:
        if settings[name] != off[name]:
            if name == "top_k" and sampling.top_k <= 0:  # all these values mean off
                continue
            raise UserError(
                f"{name}={settings[name]!r} is not for SGLang servers: they do not have it, or their "
                f"log-probabilities are of the distribution before it; remove it"
            )
    sampling_fields: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
        "sampling_seed": None if sampling.seed is None else sampling.seed % 2**31,  # an int32
        "stream_interval": INTERVAL,
    }
    if sampling.stop:
        sampling_fields["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        sampling_fields["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        bias = {str(token): value for token, value in sampling.logit_bias.items()}
        sampling_fields["logit_bias"] = bias
    return sampling_fields


@contextmanager
def _as_folder(file: Path) -> Iterator[Path]:
    """The file, linked into a folder next to it: the server loads folders.

    Raises:
        FileNotFoundError: if this machine does not have it.
    """
    if not file.exists():
        raise missing_file_error(str(file))
    folder = file.with_suffix("")
    link = folder / "model.safetensors"
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        link.symlink_to(Path("..") / file.name)
        yield folder
    finally:
        link.unlink(missing_ok=True)
        folder.rmdir()

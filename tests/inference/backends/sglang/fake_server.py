"""A fake SGLang server: the routes and JSON of version 0.5.23, and a model of its own.

Its answers were compared with a real server's by the tests that run against either (``test_server``).
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

KEY = "a key of twenty letters"
TOKEN_S = 0.002


@dataclass(eq=False)
class Running:
    prompt: list[int]
    most: int
    temperature: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    end: dict[str, Any] | None = None


class FakeServer:
    """Args: incremental: chunks of an answer do not repeat earlier ones (``--incremental-streaming-output``)."""

    def __init__(self, model: LlamaForCausalLM, *, incremental: bool) -> None:
        self.model, self.incremental = model, incremental
        self.version, self.names, self.running = "default", set[str](), dict[str, Running]()
        self.going, self.admits = (
            asyncio.Event(),
            asyncio.Event(),
        )  # of running requests, and of new ones
        self.going.set()
        self.admits.set()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._check_key])
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/v1/loads", self._loads)
        for route in (
            "generate", "abort_request", "pause_generation", "continue_generation", "update_weights_from_disk",
            "update_weight_version",
        ):  # fmt: skip
            app.router.add_post(f"/{route}", getattr(self, f"_{route}"))
        return app

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _info(self, request: web.Request) -> web.Response:
        states: list[dict[str, Any]] = [{"last_gen_throughput": 0.0}]
        return web.json_response(
            {"dtype": "float32", "context_length": 512, "max_total_num_tokens": 4096, "max_req_input_len": 506,
             "json_model_override_args": "{}", "version": "0.5.23", "internal_states": states}
        )  # fmt: skip

    async def _loads(self, request: web.Request) -> web.Response:
        used = sum(len(mine.prompt) + len(mine.tokens) for mine in self.running.values())
        return web.json_response(
            {"loads": [{"dp_rank": 0, "num_used_tokens": used, "max_total_num_tokens": 4096}]}
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name, sampling = body["rid"], body["sampling_params"]
        if name in self.names:
            return web.json_response(
                {"error": {"message": f"Duplicate request ID: {name}"}}, status=400
            )
        if len(body["input_ids"]) > 506:
            return web.json_response(
                {"error": {"message": "The input is longer than the context"}}, status=400
            )
        self.names.add(name)
        await self.admits.wait()
        mine = self.running[name] = Running(
            body["input_ids"], sampling["max_new_tokens"], sampling["temperature"]
        )
        try:
            if not body.get("stream"):
                scores = [[None, mine.prompt[0], None], *self._scores(mine.prompt)]
                mine.end = {"type": "length", "length": 0}
                return web.json_response(
                    self._chunk(name, mine, 0) | {"meta_info": self._meta(name, mine, 0, scores)}
                )
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            told, every = 0, sampling["stream_interval"]
            while mine.end is None:
                await self._step(mine)
                if mine.end or len(mine.tokens) % every == 1:
                    await response.write(
                        b"data: " + json.dumps(self._chunk(name, mine, told)).encode() + b"\n\n"
                    )
                    told = len(mine.tokens)
            await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            del self.running[name]

    async def _step(self, mine: Running) -> None:
        await asyncio.sleep(TOKEN_S)
        await self.going.wait()
        if mine.end is not None:
            return
        with torch.no_grad():
            logits = self.model(torch.tensor([mine.prompt + mine.tokens])).logits[0, -1] / (
                mine.temperature or 1.0
            )
        logprobs = logits.log_softmax(-1)
        token = int(
            logprobs.argmax() if mine.temperature == 0 else torch.multinomial(logprobs.exp(), 1)
        )
        mine.tokens.append(token)
        mine.logprobs.append(logprobs[token].item())
        mine.versions.append(self.version)
        if len(mine.tokens) == mine.most:
            mine.end = {"type": "length", "length": mine.most}

    def _scores(self, prompt: list[int]) -> list[list[Any]]:
        with torch.no_grad():
            logprobs = self.model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        return [[logprobs[i, token].item(), token, None] for i, token in enumerate(prompt[1:])]

    def _chunk(self, name: str, mine: Running, told: int) -> dict[str, Any]:
        first = told if self.incremental else 0
        return {
            "text": "",
            "output_ids": mine.tokens[first:],
            "meta_info": self._meta(name, mine, first, []),
        }

    def _meta(self, name: str, mine: Running, first: int, scores: list[Any]) -> dict[str, Any]:
        found = [
            [logprob, token, None]
            for logprob, token in zip(mine.logprobs, mine.tokens, strict=True)
        ]
        meta = {"id": name, "finish_reason": mine.end, "prompt_tokens": len(mine.prompt),
                "completion_tokens": len(mine.tokens), "weight_version": self.version,
                "input_token_logprobs": scores, "output_token_logprobs": found[first:]}  # fmt: skip
        if mine.end:
            spans: list[dict[str, Any]] = []
            for place, version in enumerate(mine.versions):
                if not spans or spans[-1]["version"] != version:
                    spans.append({"version": version, "start": place, "end": place})
                spans[-1]["end"] = place + 1
            meta["weight_versions"] = spans
        return meta

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = await request.json()
        for name, mine in self.running.items():
            if body.get("abort_all") or name == body.get("rid"):
                mine.end = {"type": "abort", "message": "Abort in waiting queue"}
        return web.Response()

    async def _pause_generation(self, request: web.Request) -> web.Response:
        self.admits.clear()
        if (await request.json())["mode"] != "abort":
            self.going.clear()
            return web.json_response({"status": "ok"})
        for mine in self.running.values():
            mine.end = {"type": "abort", "message": "Aborted"}
        while self.running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return web.json_response({"status": "ok"})

    async def _continue_generation(self, request: web.Request) -> web.Response:
        self.going.set()
        self.admits.set()
        return web.json_response({"status": "ok"})

    async def _update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))  # noqa: ASYNC240
        if not files or body.get("flush_cache", True):
            return web.json_response(
                {"success": False, "message": "Failed to get weights iterator"}, status=400
            )
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        self.model.load_state_dict(weights, strict=False)
        self.version = body["weight_version"]
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True})

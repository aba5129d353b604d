"""A vLLM server that somebody else has started; what all servers have in common is in ``engines.elsewhere``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from skyasync.engines.elsewhere import ServerEngine
from skyasync.engines.http import Begun
from skyasync.engines.protocol import GenerationOutput, PauseMode
from skyasync.engines.vllm.server_check import complaint
from skyasync.engines.vllm.server_http import (
    DEAD,
    ENDS,
    GENERATE,
    PREFIX,
    body_of,
    cache_share,
    hear,
    prompt_scores,
    scoring_body,
)
from skyasync.weight_sync.update import WeightUpdate


class VLLMServerEngine(ServerEngine):
    """See ``ServerEngine``."""

    kind = "vLLM"
    dead = DEAD
    info = {"config_format": "json"}  # noqa: RUF012  (a class variable of the base)

    def complaint(self, info: Mapping[str, Any]) -> str:
        return complaint(self._server.url, info, self.config)

    def room(self, info: Mapping[str, Any]) -> int:
        cache = info["vllm_config"].get("cache_config") or {}
        return int(cache.get("num_gpu_blocks") or 0) * int(cache.get("block_size") or 0)

    async def _used(self) -> int | None:
        share = cache_share(await self._server.text("/metrics"))
        return None if share is None else int(share * self._cache_tokens)

    async def _set_back(self) -> None:
        await self._server.post("/abort_requests", {})
        await self._server.post("/resume")
        await self._server.post("/update_weight_version", {"new_version": str(self.version)})

    async def _play(self, begun: Begun) -> GenerationOutput:
        async for chunk in self._server.chunks(GENERATE, body_of(begun.request, self._salt(begun.version))):
            for choice in chunk["choices"]:
                hear(begun, choice)
                if said := choice.get("finish_reason"):
                    reason = ENDS.get(said)
                    if reason is None:
                        name = begun.request.request_id
                        raise RuntimeError(f"{self._server.name} failed on request {name}: {said}")
                    return self._ended(begun, reason, choice.get("weight_versions"))
        raise self._server.died("it ended an answer without a reason")

    async def _end(self, chosen: Collection[Begun]) -> None:
        names = [PREFIX + begun.request.request_id for begun in chosen]
        await self._server.post("/abort_requests", {"request_ids": names})

    async def _alive(self) -> None:
        await self._server.get("/is_paused")

    async def _scored(self, sequence: Sequence[int]) -> list[float] | None:
        answer = await self._server.post(GENERATE, scoring_body(sequence, self._salt(self.version)))
        return prompt_scores(answer, sequence)

    async def _stop(self, mode: PauseMode) -> None:
        await self._server.post("/pause", mode=mode, clear_cache="false")

    async def _go_on(self) -> None:
        await self._server.post("/resume")

    async def _load(self, update: WeightUpdate) -> list[str]:
        await self._server.post("/start_weight_update")
        await self._server.post("/update_weights", {"update_info": update.info})
        await self._server.post("/finish_weight_update", {"weight_version": str(update.version)})
        try:
            answer = await self._server.post("/collective_rpc", {"method": "unproven"})
        except RuntimeError:  # started without what it takes to say so
            return ["the server does not say"]
        return sorted({name for names in answer["results"] for name in names})

"""An SGLang server that somebody else has started; what all servers have in common is in ``engines.elsewhere``.

Invariant: a name is told to the server once. It ends by name, two seconds later, whatever a client hung up on, and
would end a second request of that name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from skyasync.engines.elsewhere import ServerEngine
from skyasync.engines.http import Begun
from skyasync.engines.protocol import ENGINES, EngineConfig, GenerationOutput, PauseMode
from skyasync.engines.sglang.server_check import complaint
from skyasync.engines.sglang.server_http import ENDS, GENERATE, body_of, hear, prompt_scores, scoring_body
from skyasync.weight_sync.transfers.file import not_here
from skyasync.weight_sync.update import WeightUpdate


@ENGINES.register(
    "sglang_server",
    elsewhere=True,
    loads_as_files=True,
    lacks=(
        "top_p", "top_k", "min_p", "bad_words", "allowed_token_ids", "structured_outputs", "repetition_detection",
    ),
)  # fmt: skip
class SGLangServerEngine(ServerEngine):
    """See ``ServerEngine``."""

    kind = "SGLang"
    proves_weights = False  # it has no digests of what was sent: the probe looks at it after every sync

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._names = count()
        self._open = asyncio.Event()  # requests may be sent
        self._open.set()

    def complaint(self, info: Mapping[str, Any]) -> str:
        return complaint(self._server.url, info, self.config)

    def room(self, info: Mapping[str, Any]) -> int:
        return int(info.get("max_total_num_tokens") or 0)

    async def _used(self) -> int | None:
        loads = (await self._server.get("/v1/loads")).get("loads") or ()
        return sum(int(load["num_used_tokens"]) for load in loads) if loads else None

    async def _set_back(self) -> None:
        await self._server.post("/abort_request", {"abort_all": True})
        await self._server.post("/continue_generation", {})
        said = {"new_version": str(self.version), "abort_all_requests": False}
        await self._server.post("/update_weight_version", said)

    async def _play(self, begun: Begun) -> GenerationOutput:
        await self._open.wait()
        begun.name = f"{self._run}-{next(self._names)}"
        body = body_of(begun.request, begun.name, self._salt(begun.version))
        async for chunk in self._server.chunks(GENERATE, body):
            hear(begun, chunk)
            about = chunk["meta_info"]
            if said := about.get("finish_reason"):
                reason = ENDS.get(said["type"])
                if reason is None or said.get("status_code"):  # it was not cut, but could not be computed
                    raise RuntimeError(f"{self._server.name} failed on request {begun.request.request_id}: {said}")
                return self._ended(begun, reason, about.get("weight_versions"))
        raise self._server.died("it ended an answer without a reason")

    async def _end(self, chosen: Collection[Begun]) -> None:
        for begun in chosen:
            await self._server.post("/abort_request", {"rid": begun.name})

    async def _alive(self) -> None:
        await self._server.get("/server_info")  # which asks its scheduler

    async def _scored(self, sequence: Sequence[int]) -> list[float] | None:
        name = f"{self._run}-{next(self._names)}"
        answer = await self._server.post(GENERATE, scoring_body(sequence, name, self._salt(self.version)))
        return prompt_scores(answer, sequence)

    async def _stop(self, mode: PauseMode) -> None:
        if mode == "wait":  # which it does not have
            self._open.clear()
            while sent := {begun.playing for begun in self._begun.values() if begun.name and begun.playing}:
                await asyncio.wait(sent)
                await asyncio.sleep(0)  # those who have waited for it take it off the list
        await self._server.post("/pause_generation", {"mode": "abort" if mode == "abort" else "in_place"})

    async def _go_on(self) -> None:
        self._open.set()
        await self._server.post("/continue_generation", {})

    async def _load(self, update: WeightUpdate) -> None:
        with _as_folder(Path(update.info["path"])) as folder:
            said = {"model_path": str(folder), "weight_version": str(update.version), "flush_cache": False}
            await self._server.post("/update_weights_from_disk", said)


@contextmanager
def _as_folder(file: Path) -> Iterator[Path]:
    """The file in a folder of its own, beside it, as the server loads models.

    Raises:
        FileNotFoundError: if this machine does not have it.
    """
    if not file.exists():
        raise not_here(str(file))
    folder = file.with_suffix("")
    link = folder / "model.safetensors"
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        link.symlink_to(Path("..") / file.name)
        yield folder
    finally:
        link.unlink(missing_ok=True)
        folder.rmdir()

"""A vLLM server that the run does not start; code for all kinds of servers is in ``remote``.

Invariant: the server is sent one placeholder per image, and expands it by its own processor. A
prompt whose tokens it makes differently is rejected. An image is sent once, with a name, and later
requests have only the name: the server has the image in its processor's cache
(``--mm-processor-cache-gb``). A server that lacks a named image rejects the request, which is then
sent again.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

from skyasync.inference.backends.vllm.setup import WORKER_EXTENSION, check_expanded, sampling_fields
from skyasync.inference.interface import (
    EngineConfig,
    EngineFailedError,
    FinishReason,
    GenerationOutput,
    PauseMode,
)
from skyasync.inference.remote import JSON, RemoteEngine, RemoteRequest
from skyasync.models.images import Image, Images, ImageTokens, reads_images, rgb_url
from skyasync.weight_sync.update import WeightUpdate

if TYPE_CHECKING:
    from skyasync.models.vision import ImageProcessor

BACKEND = "shared_memory"
GENERATE = "/inference/v1/generate"
PREFIX = "generate-tokens-"  # of the names of requests at the server
FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "repetition": "length",
}

#: Arguments of vLLM's server in addition to its model. The routes need ``VLLM_SERVER_DEV_MODE=1``.
ARGUMENTS = {
    "--enable-scale-out": "",
    "--worker-extension-cls": WORKER_EXTENSION,
    "--weight-transfer-config": json.dumps({"backend": BACKEND}),
    "--logprobs-mode": "processed_logprobs",
    "--stream-interval": "16",
    "--middleware": "skyasync.inference.origin_check.AccessMiddleware",
}
#: On a CPU; a request with a seed whose prompt is computed in chunks ends vLLM's CPU engine.
ON_CPU = {"--enforce-eager": "", "--no-enable-chunked-prefill": "", "--dtype": "float32"}
T = TypeVar("T")
ContentParts = Sequence[JSON]  # of a request, for its images


class SentImages:
    """The images that a server has in its cache, as far as this run knows.

    Attributes:
        caches: whether the server has a cache of images.
    """

    def __init__(self) -> None:
        self.caches = True
        self._names = uuid4().hex  # so that no other client's images have these names
        # Image -> the upload that brought it; an image that no request has is forgotten.
        self._uploads = WeakKeyDictionary[Image, object]()
        self._uploads_in_flight: dict[Image, asyncio.Future[None]] = {}  # by requests in flight

    async def send(
        self,
        images: Images,
        request: Callable[[ContentParts, Callable[[], None]], Awaitable[T]],
        answer: Sequence[int] = (),
    ) -> T:
        """Send a request with its images.

        It waits for images that another request is sending. A rejection may come from an image that
        the server's cache has lost: the request is sent again, the last time with all pixels.

        Args:
            request: sends the content parts, and calls the function when the server has read them.
            answer: the tokens so far; a request that has some is not sent again.
        """
        if not images:
            return await request([], lambda: None)
        attempts = (False, False, True) if self.caches else (True,)
        for with_pixels in attempts:
            while awaited_images := self._uploads_in_flight.keys() & images:
                await asyncio.wait({self._uploads_in_flight[image] for image in awaited_images})
            named_images: dict[Image, object] = {}  # images that are sent as their names
            new_images = []
            for image in dict.fromkeys(images):
                if image in self._uploads and not with_pixels:
                    named_images[image] = self._uploads[image]
                else:
                    new_images.append(image)
            upload: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if self.caches:
                self._uploads_in_flight |= dict.fromkeys(new_images, upload)
            content_parts = []
            for image in images:
                url = None if image in named_images else rgb_url(image)
                name = f"{self._names}-{image.digest}"
                content_parts.append({"type": "image_url", "url": url, "uuid": name})
            try:
                return await request(content_parts, partial(self._arrived, new_images, upload))
            except EngineFailedError:
                raise
            except RuntimeError:
                if not named_images or answer:
                    raise
                for image, earlier in named_images.items():
                    if self._uploads.get(image) is earlier:  # else it has been sent again
                        del self._uploads[image]
            finally:
                self._arrived(new_images, upload, received=False)
        raise AssertionError("the last attempt has no names")

    def _arrived(
        self,
        images: Sequence[Image],
        upload: asyncio.Future[None],
        *,
        received: bool = True,
    ) -> None:
        """The server has read an upload, or it has failed; the first call counts."""
        if upload.done():
            return
        upload.set_result(None)
        for image in images:
            self._uploads_in_flight.pop(image, None)
            if received:
                self._uploads[image] = upload


class VLLMServerEngine(RemoteEngine):
    kind = "vLLM"
    how_to_start = "start it with: skyasync serve MODEL --port PORT"
    core_route = "/is_paused"
    core_failures = ("EngineDead", "EngineCore encountered")
    info_query = {"config_format": "json"}  # noqa: RUF012  (a class variable of the base)
    _images: ImageProcessor | None = None  # of a model that reads images

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._sent = SentImages()

    @classmethod
    def complaint(cls, url: str, info: JSON, config: EngineConfig) -> str:
        settings = info.get("vllm_config")
        if not isinstance(settings, Mapping):
            if "internal_states" in info:
                return f"generator.engines: {url} is an SGLang server: set generator.backend=sglang_server"
            return cls.foreign(url, "it does not say how it was started")
        model = settings.get("model_config") or {}
        transfer = (settings.get("weight_transfer_config") or {}).get("backend")
        extension = (settings.get("parallel_config") or {}).get("worker_extension_cls")
        if transfer != BACKEND or extension != WORKER_EXTENSION:
            return f"generator.engines: {url} takes no weights from this run (backend {transfer}); {cls.how_to_start}"
        if model.get("logprobs_mode") != ARGUMENTS["--logprobs-mode"]:
            return (
                f"generator.engines: {url} reports {model.get('logprobs_mode')}, and training needs the "
                f"log-probabilities of what was sampled from (--logprobs-mode processed_logprobs); {cls.how_to_start}"
            )
        return cls.mismatch(
            url,
            config,
            longest=int(model.get("max_model_len") or 0),
            length=f"--max-model-len {config.max_model_len}",
            kwargs=model.get("hf_overrides") or {},
            kwargs_flag="--hf-overrides",
            dtype=str(model.get("dtype")).removeprefix("torch."),
        )

    async def _cache_used(self) -> int | None:
        share = cache_share(await self._server.text("/metrics"))
        if share is None:
            return None
        return int(share * self._cache_tokens)

    async def _reset(self, info: JSON) -> int:
        await self._server.post("/abort_requests", {})
        await self._server.post("/resume")
        await self._server.post("/update_weight_version", {"new_version": str(self.version)})
        if reads_images(self.config.model_path):
            from skyasync.models.vision import NEVER, processor_of

            self._images = processor_of(self.config.model_path)
            model = info["vllm_config"].get("model_config") or {}
            multimodal = model.get("multimodal_config") or {}
            self._sent.caches = bool(multimodal.get("mm_processor_cache_gb", True))
            # No response may contain a placeholder.
            ban = {"method": "ban", "args": [self._images.banned, NEVER]}
            await self._server.post("/collective_rpc", ban)
        cache = info["vllm_config"].get("cache_config") or {}
        blocks = int(cache.get("num_gpu_blocks") or 0)
        return blocks * int(cache.get("block_size") or 0)

    async def _generate(self, pending: RemoteRequest) -> GenerationOutput:
        request = pending.request
        tokens = request.prompt_token_ids.tolist()
        body = {
            "request_id": request.request_id,
            **self._prompt(tokens, request.images),
            "sampling_params": sampling_fields(request.fresh_sampling, json=True),
            "cache_salt": self._salt(pending.version),
            "stream": True,
        }

        async def answer(
            content_parts: ContentParts,
            accepted: Callable[[], None],
        ) -> GenerationOutput:
            body["content_parts"] = content_parts
            async for chunk in self._server.chunks(GENERATE, body, accepted):
                expanded = chunk.get("prompt_token_ids")
                if expanded:  # only the first piece of a prompt with images has them
                    check_expanded(expanded, tokens)
                for choice in chunk["choices"]:
                    logprobs = choice.get("logprobs") or {}
                    content: Sequence[JSON] = logprobs.get("content") or ()
                    values = [float(token["logprob"]) for token in content]
                    pending.receive(choice.get("token_ids") or (), values)
                    reason = choice.get("finish_reason")
                    if not reason:
                        continue
                    if reason not in FINISH_REASONS:
                        raise RuntimeError(
                            f"{self._server.name} failed on request {request.request_id}: {reason}"
                        )
                    spans = choice.get("weight_versions")
                    return self._ended(pending, FINISH_REASONS[reason], spans)
            raise self._server.failure("it ended an answer without a reason")

        return await self._sent.send(request.images, answer, pending.tokens)

    def _prompt(self, tokens: list[int], images: Images) -> dict[str, Any]:
        """Fields of a request's prompt.

        Raises:
            UserError: if the prompt's placeholders are not those of the images.
        """
        if self._images is None:
            return {"token_ids": tokens}
        return {"token_ids": self._images.collapse(tokens, images), "return_token_ids": True}

    async def _abort(self, pending: Collection[RemoteRequest]) -> None:
        names = [PREFIX + request.request.request_id for request in pending]
        await self._server.post("/abort_requests", {"request_ids": names})

    async def _score(self, sequence: Sequence[int]) -> list[float] | None:
        tokens = [int(token) for token in sequence]
        body = {
            **self._prompt(tokens, ImageTokens.images_of(sequence)),
            "sampling_params": {
                "max_tokens": 1,
                "temperature": 0.0,
                "prompt_logprobs": 0,
                "detokenize": False,
            },
            "cache_salt": self._salt(self.version),
        }

        async def scored(
            content_parts: ContentParts,
            accepted: Callable[[], None],
        ) -> JSON:
            body["content_parts"] = content_parts
            answer: JSON = await self._server.post(GENERATE, body)
            accepted()
            return answer

        answer = await self._sent.send(ImageTokens.images_of(sequence), scored)
        check_expanded(answer.get("prompt_token_ids") or tokens, tokens)
        scores = answer.get("prompt_logprobs")
        if not scores or len(scores) != len(tokens):
            return None
        placeholder = None if self._images is None else self._images.placeholder
        logprobs = []
        # The first token has no log-probability.
        for score, token in zip(scores[1:], tokens[1:], strict=True):
            if token == placeholder:
                logprobs.append(0.0)
            else:
                entry = score[str(token)]
                logprobs.append(float(entry["logprob"]))
        return logprobs

    async def _schedule(self, mode: PauseMode | None) -> None:
        if mode is None:
            await self._server.post("/resume")
        else:
            await self._server.post("/pause", mode=mode, clear_cache="false")

    async def _load(self, update: WeightUpdate) -> list[str]:
        await self._server.post("/start_weight_update")
        await self._server.post("/update_weights", {"update_info": update.info})
        await self._server.post("/finish_weight_update", {"weight_version": str(update.version)})
        if self._images is not None:  # it has features of images by the former weights
            await self._server.post("/reset_encoder_cache")
        try:
            answer = await self._server.post("/collective_rpc", {"method": "unproven"})
        except RuntimeError:  # started without the worker extension
            return ["the server does not say"]
        return sorted(set[str]().union(*answer["results"]))  # a list per worker


def cache_share(metrics: str) -> float | None:
    """The used share of the cache, the mean of the server's engines; None if it is not reported.

    Args:
        metrics: the text of ``/metrics``.
    """
    pattern = r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$"
    shares = [float(value) for value in re.findall(pattern, metrics, re.MULTILINE)]
    if shares:
        return sum(shares) / len(shares)
    return None

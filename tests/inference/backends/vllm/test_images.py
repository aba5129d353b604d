"""vLLM with images: its tokens and log-probabilities are the trained model's, also after a weight update."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PIL

from skyasync.inference.backends.vllm.server import SentImages, VLLMServerEngine
from skyasync.inference.backends.vllm.setup import alike
from skyasync.inference.interface import (
    ENGINES,
    EngineConfig,
    EngineFailedError,
    GenerationRequest,
    SamplingParams,
)
from skyasync.models.heads import load_causal_lm
from skyasync.models.images import Images, ImageTokens, decoded, read_image, rgb_url
from skyasync.models.token_model import TokenModel
from skyasync.models.vision import processor_of
from skyasync.weight_sync.transfers.file import remove_weights, write_weights
from skyasync.weight_sync.update import WeightUpdate
from tests.inference.backends.vllm.test_server import free_port, serving, until_it_answers
from tests.models.tiny_vision import (
    FAMILIES,
    answers_of,
    as_batch,
    logprobs,
    noise,
    prompt,
    redraw,
    save_tiny,
)

CASES: list[Images] = [(noise(1),), (noise(2), noise(3, 84, 56)), (), (noise(1),)]


def test_requests_with_other_images_are_not_samples_of_one() -> None:
    sampling = SamplingParams()
    requests = [
        GenerationRequest(str(i), [1, 2], sampling, images=(noise(i % 2),)) for i in range(4)
    ]
    assert [[r.request_id for r in bundle] for bundle in alike(requests)] == [
        ["0", "2"],
        ["1", "3"],
    ]


class Cache:
    """A server's cache of images: a request that names others is rejected."""

    def __init__(self, room: int = 99) -> None:
        self.room, self.images, self.uploads, self.requests = room, dict[str, str](), 0, 0
        self.failing: list[Exception] = []

    async def __call__(
        self, parts: list[dict[str, Any]], accepted: Callable[[], None]
    ) -> list[str]:
        self.requests += 1
        self.uploads += sum(part["url"] is not None for part in parts)
        await asyncio.sleep(0)
        if self.failing:
            raise self.failing.pop()
        if any(part["url"] is None and part["uuid"] not in self.images for part in parts):
            raise RuntimeError("Cache miss for image at index 0 but data is not provided.")
        shown = [part["url"] or self.images[part["uuid"]] for part in parts]
        self.images |= {part["uuid"]: url for part, url in zip(parts, shown, strict=True)}
        while len(self.images) > self.room:
            del self.images[next(iter(self.images))]
        accepted()
        await asyncio.sleep(0)
        return shown

    async def ask(self, sent: SentImages, *requests: Images) -> list[list[str] | BaseException]:
        self.uploads = self.requests = 0
        return await asyncio.gather(
            *(sent.send(each, self) for each in requests), return_exceptions=True
        )


async def test_a_server_is_sent_an_image_once_for_all_samples_and_again_if_it_has_lost_it() -> None:
    sent, cache = SentImages(), Cache()
    shown = [rgb_url(noise(1))]
    assert await cache.ask(sent, *[(noise(1),)] * 64) == [shown] * 64
    assert (cache.uploads, cache.requests) == (1, 64)
    assert await cache.ask(sent, (noise(1), noise(2)), (noise(2),), ()) == [
        [*shown, rgb_url(noise(2))],
        [rgb_url(noise(2))],
        [],
    ]
    assert cache.uploads == 1
    cache.images.clear()
    assert await cache.ask(sent, *[(noise(1),)] * 64) == [shown] * 64
    assert (cache.uploads, cache.requests) == (1, 128)
    assert await cache.ask(sent, (noise(1),)) == [shown] and cache.uploads == 0


async def test_a_cache_without_room_has_every_request_answered() -> None:
    sent, cache = SentImages(), Cache(room=1)
    images = [(noise(n % 3), noise((n + 1) % 3)) for n in range(12)]
    answers = await cache.ask(sent, *images)
    assert answers == [[rgb_url(one), rgb_url(other)] for one, other in images]
    sent.caches = False  # by the server's own account
    assert await cache.ask(sent, *images) == answers and (cache.uploads, cache.requests) == (24, 12)


async def test_an_upload_that_fails_is_made_by_the_next_request() -> None:
    sent, cache = SentImages(), Cache()
    cache.failing = [EngineFailedError("it was restarted")]
    first, *others = await cache.ask(sent, *[(noise(1),)] * 4)
    assert isinstance(first, EngineFailedError) and others == [[rgb_url(noise(1))]] * 3
    assert (cache.uploads, cache.requests) == (2, 4)
    cache.failing = [RuntimeError("too long"), RuntimeError("too long")]
    (why,) = await cache.ask(sent, (noise(1),))
    assert str(why) == "too long" and cache.requests == 2, "with the image it says why"
    task = asyncio.create_task(sent.send((noise(3),), lambda parts, accepted: asyncio.sleep(60)))
    await asyncio.sleep(0)
    task.cancel()
    assert await cache.ask(sent, (noise(3),)) == [[rgb_url(noise(3))]]


class CountingEngine(VLLMServerEngine):
    """Counts requests with images, and images sent."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.uploads = self.answers = 0
        self._chunks, self._server.chunks = self._server.chunks, self.counted  # type: ignore[method-assign]

    def counted(self, route: str, body: Any, *accepted: Any) -> AsyncIterator[dict[str, Any]]:
        self.uploads += sum(part["url"] is not None for part in body["content_parts"])
        return self._chunks(route, body, *accepted)

    async def sample(self, folder: str, name: str, count: int, images: Images) -> int:
        """The uploads that ``count`` samples took."""
        self.uploads, sampling = 0, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        tokens = prompt(folder, images)
        requests = [
            GenerationRequest(f"{name}-{i}", tokens, sampling, images=images) for i in range(count)
        ]
        outputs = await answers_of(self, requests)
        assert {output.error for output in outputs} == {""}
        (scores,) = await self.score(
            [ImageTokens([*tokens, *outputs[0].token_ids.tolist()], images)]
        )
        assert np.allclose(scores[len(tokens) - 1 :], outputs[-1].logprobs, atol=1e-4), (
            "of these images"
        )
        return self.uploads


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("family", FAMILIES)
async def test_samples_of_an_image_take_one_copy_to_a_server(
    family: str, fork_socket: Path, tmp_path: Path
) -> None:
    folder, port = save_tiny(family, tmp_path / "model"), free_port()
    extra = {"url": f"http://127.0.0.1:{port}", "start_s": 60}
    engine = CountingEngine(EngineConfig(folder, max_model_len=512, version=3, extra=extra))
    with serving(fork_socket, Path(folder), port) as process:
        await until_it_answers(extra["url"], process)  # type: ignore[arg-type]
        await engine.start()
        settings = (await engine._server.get("/server_info", config_format="json"))["vllm_config"][
            "model_config"
        ]
        assert settings["multimodal_config"]["mm_processor_cache_gb"] == 4
        assert await engine.sample(folder, "a group", 64, (noise(1),)) == 1
        assert await engine.sample(folder, "the same again", 8, (noise(1),)) == 0
        assert (
            await engine.sample(folder, "two more", 8, (noise(1), noise(2), noise(3, 84, 56))) == 2
        )
        await engine._server.post("/reset_mm_cache")
        assert await engine.sample(folder, "evicted", 64, (noise(1),)) == 1
        await engine.pause("keep")
        paused = asyncio.create_task(engine.sample(folder, "paused", 8, (noise(4),)))
        await asyncio.sleep(1)
        await engine.resume()
        assert await paused == 1
    with serving(fork_socket, Path(folder), port) as process:
        await until_it_answers(extra["url"], process)  # type: ignore[arg-type]
        (lost,) = await asyncio.gather(
            engine.sample(folder, "restarted", 1, (noise(1),)), return_exceptions=True
        )
        assert isinstance(
            lost, EngineFailedError
        ) and "a weight version that this run never sent" in str(lost)
        await engine.shutdown()
        successor = engine.successor()
        await successor.start()
        assert await successor.sample(folder, "after a restart", 16, (noise(1),)) == 1
        await successor.shutdown()


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["plain", "turned", "transparent", "palette", "tiff"])
def test_a_server_reads_the_pixels_that_the_trainer_reads(kind: str) -> None:
    from vllm.multimodal.media.image import ImageMediaIO

    image, buffer, turned = decoded(noise(1, 84, 56)), io.BytesIO(), PIL.Exif()
    turned[0x0112] = 6
    if kind == "transparent":
        image.putalpha(100)
    if kind == "palette":
        image = image.convert("P")
    image.save(
        buffer,
        {"turned": "JPEG", "tiff": "TIFF"}.get(kind, "PNG"),
        **{"exif": turned} if kind == "turned" else {},
    )
    own = read_image(buffer.getvalue())
    sent = read_image(rgb_url(own))
    assert (sent is own) == (kind == "plain")
    read: Any = ImageMediaIO().load_bytes(sent.data).media
    assert np.array_equal(np.asarray(read), np.asarray(decoded(own)))


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("family", [*FAMILIES[:2], "qwen2_5_vl"])
async def test_vllm_and_the_trained_model_agree_before_and_after_an_update(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny(family, tmp_path / "model")
    model = TokenModel(load_causal_lm(folder, torch.float32))
    engine: Any = ENGINES["vllm"](
        EngineConfig(folder, threads=1, max_model_len=200, max_num_seqs=16, kv_cache_gb=0.1)
    )
    prompts = [prompt(folder, images) for images in CASES]
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)

    async def scores_differ() -> float:
        """The log-probabilities of a text depend on its images."""
        text = prompt(folder, ())
        batch = as_batch([text[:1]], [text[1:]], [()])
        (scores,) = await engine.score([text])
        with torch.no_grad():
            return float(
                (logprobs(model, batch)[batch.loss_mask] - torch.tensor(scores)).abs().max()
            )

    async def differences(version: int, shown: list[Images] = CASES) -> torch.Tensor:
        requests = [
            GenerationRequest(f"v{version}-{i}", p, sampling, images=images)
            for i, (p, images) in enumerate(zip(prompts, CASES, strict=True))
        ]
        outputs = await answers_of(engine, requests)
        assert not any(output.error for output in outputs)
        batch = as_batch(prompts, [output.token_ids.tolist() for output in outputs], shown)
        sampled = torch.tensor([output.logprobs.tolist() for output in outputs]).flatten()
        with torch.no_grad():
            return (logprobs(model, batch)[batch.loss_mask] - sampled).abs()

    async def update(version: int) -> None:
        redraw(model.model, seed=version)
        path = write_weights(model.model.state_dict())
        await engine.update_weights(WeightUpdate(version, "shared_memory", {"path": path}))
        remove_weights(path)

    await engine.start()
    try:
        assert (await differences(0)).max() < 1e-4
        assert await scores_differ() < 1e-4
        wrong = [(noise(5),), (noise(6), noise(7, 84, 56)), (), (noise(5),)]
        assert (await differences(2, wrong)).mean() > 0.1
        placeholder = processor_of(folder).placeholder
        biased = replace(sampling, max_tokens=50, logit_bias={placeholder: 100.0})
        alone = GenerationRequest("alone", [*prompts[2], placeholder], sampling)
        banned = GenerationRequest("banned", prompts[0], biased, images=CASES[0])
        refused, drawn = await answers_of(engine, [alone, banned])
        assert "do not hold those of its 0 images" in refused.error
        assert len(drawn.token_ids) == 50 and placeholder not in drawn.token_ids
        await update(1)
        assert (await differences(1)).max() < 1e-4
        assert await scores_differ() < 1e-4
        monkeypatch.setattr(
            engine.llm, "reset_encoder_cache", engine.llm.check_health
        )  # another call without effect
        await update(3)
        assert (await differences(3)).max() > 0.1
    finally:
        await engine.shutdown()

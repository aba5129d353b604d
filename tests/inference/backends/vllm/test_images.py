"""vLLM with images: its tokens and log-probabilities are the trained model's, also after a weight update."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PIL

from skyasync.inference.backends.vllm.setup import alike
from skyasync.inference.interface import ENGINES, EngineConfig, GenerationRequest, SamplingParams
from skyasync.models.heads import load_causal_lm
from skyasync.models.images import Images, decoded, read_image, rgb_url
from skyasync.models.token_model import TokenModel
from skyasync.models.vision import processor_of
from skyasync.weight_sync.transfers.file import remove_weights, write_weights
from skyasync.weight_sync.update import WeightUpdate
from tests.models.tiny_vision import FAMILIES, answers_of, as_batch, logprobs, noise, prompt, redraw, save_tiny

CASES: list[Images] = [(noise(1),), (noise(2), noise(3, 84, 56)), (), (noise(1),)]


def test_requests_with_other_images_are_not_samples_of_one() -> None:
    sampling = SamplingParams()
    requests = [GenerationRequest(str(i), [1, 2], sampling, images=(noise(i % 2),)) for i in range(4)]
    assert [[r.request_id for r in bundle] for bundle in alike(requests)] == [["0", "2"], ["1", "3"]]


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
        buffer, {"turned": "JPEG", "tiff": "TIFF"}.get(kind, "PNG"), **{"exif": turned} if kind == "turned" else {}
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
    engine: Any = ENGINES["vllm"](EngineConfig(folder, threads=1, max_model_len=200, max_num_seqs=16, kv_cache_gb=0.1))
    prompts = [prompt(folder, images) for images in CASES]
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)

    async def scores_differ() -> float:
        """The log-probabilities of a text depend on its images."""
        text = prompt(folder, ())
        batch = as_batch([text[:1]], [text[1:]], [()])
        (scores,) = await engine.score([text])
        with torch.no_grad():
            return float((logprobs(model, batch)[batch.loss_mask] - torch.tensor(scores)).abs().max())

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
        monkeypatch.setattr(engine.llm, "reset_encoder_cache", engine.llm.check_health)  # another call without effect
        await update(3)
        assert (await differences(3)).max() > 0.1
    finally:
        await engine.shutdown()

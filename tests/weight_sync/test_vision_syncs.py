"""Sampled tokens over fifty weight syncs: engine and trainer differ by rounding alone, whatever images they read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyasync.inference.interface import GenerationRequest, SamplingParams
from skyasync.models.images import Images
from skyasync.models.vision import blank_prompt
from skyasync.weight_sync.verify.log_probabilities import BFLOAT16, FLOAT32
from tests.inference.backends.vllm.test_server import free_port, serving, until_it_answers
from tests.models.tiny_vision import (
    answers_of,
    as_batch,
    noise,
    prompt,
    save_tiny,
    stand_in_for_num2words,
)
from tests.weight_sync.policy_and_engine import Pair, running

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.vllm]

SYNCS, STEP = 50, 2e-3
SEEN: list[Images] = [(noise(1),), (noise(2), noise(3, 84, 56)), ()]
LARGEST = 1e-5  # of one token in float32


def shown(version: int) -> list[Images]:
    """Images of all versions before, and new ones."""
    return [*SEEN, (noise(1000 + version),), (noise(2000 + version, 112, 56), noise(1))]


async def differences(pair: Pair, folder: str, trained: list[Images] | None = None) -> Tensor:
    """Of each sampled token. The trainer is given the images ``trained`` if they are others."""
    images, version = shown(pair.version), pair.version
    prompts = [prompt(folder, own) for own in images]
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    requests = [
        GenerationRequest(f"v{version}-{i}", tokens, sampling, images=own)
        for i, (tokens, own) in enumerate(zip(prompts, images, strict=True))
    ]
    outputs = await answers_of(pair.engine, requests)
    assert not any(output.error for output in outputs), [output.error for output in outputs]
    assert {int(each) for output in outputs for each in output.versions} == {version}
    batch = as_batch(prompts, [output.token_ids.tolist() for output in outputs], trained or images)
    sampled = torch.tensor([output.logprobs.tolist() for output in outputs]).flatten()
    return ((await pair.dispatch.ask("policy", "logprobs", batch))[batch.loss_mask] - sampled).abs()


@pytest.fixture(params=["transformers", "vllm", "vllm_server"])
async def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["qwen3_vl", "smolvlm"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    stand_in_for_num2words(tmp_path / "modules", monkeypatch)
    return save_tiny(request.param, tmp_path / "model")


@pytest.fixture
async def pair(folder: str, backend: str, dtype: str, fork_socket: Path) -> AsyncIterator[Pair]:
    probe: list[list[int]] = [blank_prompt(folder, [5, 6, 7, 8])]
    engine: dict[str, Any] = {"kv_cache_gb": 0.1}
    async with AsyncExitStack() as stack:
        if backend == "vllm_server":
            port = free_port()
            process = stack.enter_context(
                serving(fork_socket, Path(folder), port, "--dtype", dtype)
            )
            await until_it_answers(f"http://127.0.0.1:{port}", process)
            engine["extra"] = {"url": f"http://127.0.0.1:{port}", "start_s": 60}
        yield await stack.enter_async_context(running(backend, folder, dtype, probe, **engine))


async def test_fifty_syncs_with_images_seen_before_and_new_ones(
    pair: Pair, folder: str, dtype: str
) -> None:
    found = [await differences(pair, folder)]
    for _ in range(SYNCS):
        pair.step(STEP)
        await pair.hand_over()
        await pair.verify()
        found.append(await differences(pair, folder))
    floor, means, largest = (
        found[0].mean(),
        torch.stack(found[1:]).mean(1),
        torch.stack(found).max(),
    )
    print(
        f"start: mean {floor:.1e}; {SYNCS} syncs: worst mean {means.max():.1e}, largest token {largest:.1e}"
    )
    if dtype == "float32":
        assert largest < LARGEST
    assert means.max() < (FLOAT32 if dtype == "float32" else BFLOAT16).limit(float(floor))
    wrong = [tuple(noise(3000 + i) if image is noise(1) else image for i, image in enumerate(own))
             for own in shown(pair.version)]  # fmt: skip
    assert (await differences(pair, folder, wrong)).max() > 0.1

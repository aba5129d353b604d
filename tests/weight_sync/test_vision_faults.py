"""Faults of a vision-language model's weight sync and of its images: a check or the verification prompts find each."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from skyasync.errors import UserError
from skyasync.inference.backends.vllm import engine as vllm_engine
from skyasync.inference.backends.vllm import server as vllm_server
from skyasync.inference.interface import GenerationRequest, SamplingParams
from skyasync.models.images import Image, Images, ImageTokens, decoded, rgb_url
from skyasync.models.vision import ImageProcessor, blank_prompt, processor_of
from skyasync.weight_sync.tensors import as_message
from skyasync.weight_sync.transfers.file import remove_weights, write_weights
from skyasync.weight_sync.update import WeightSyncError, WeightUpdate
from skyasync.weight_sync.verify.log_probabilities import choose_probe
from tests.inference.backends.vllm.test_server import free_port, serving, until_it_answers
from tests.models.tiny_vision import answers_of, noise, prompt, save_tiny
from tests.weight_sync.policy_and_engine import Pair, arriving, never_fails, running
from tests.weight_sync.worker_faults import WITHOUT, update_with

pytestmark = pytest.mark.slow

FAMILIES = ("qwen3_vl", "smolvlm")
DIFFER = r"engine 0 and the trainer differ by .*verification prompts"


def probe_of(folder: str) -> list[list[int]]:
    images: list[Images] = [(noise(1),), (noise(2), noise(3, 84, 56)), ()]
    return [
        *(ImageTokens(prompt(folder, own), own) for own in images),
        blank_prompt(folder, [5, 6, 7, 8]),
    ]


def in_tower(name: str) -> bool:
    return "visual." in name or "vision_model." in name


def stale_tower(sent: dict[str, Tensor], before: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: before[name] if in_tower(name) else tensor for name, tensor in sent.items()}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
async def pair(folder: str) -> AsyncIterator[Pair]:
    async with running("transformers", folder, "float32", probe_of(folder)) as pair:
        yield pair


async def test_fifty_syncs_never_fail(pair: Pair) -> None:
    assert max(await never_fails(pair, 50)) < 0.75


async def test_ten_syncs_in_bfloat16_never_fail(folder: str) -> None:
    async with running("transformers", folder, "bfloat16", probe_of(folder)) as pair:
        assert max(await never_fails(pair, 10)) < 0.75


async def test_a_vision_tower_that_was_not_sent_is_named_in_the_same_sync(pair: Pair) -> None:
    pair.step()
    with (
        arriving(pair.engine._model, stale_tower),
        pytest.raises(WeightSyncError, match=r"engine holds.*vis"),
    ):
        await pair.hand_over()
    await pair.hand_over()
    await pair.verify()


async def test_another_tower_than_the_trainers_is_found_by_the_prompts_with_images_alone(
    pair: Pair,
) -> None:
    """The digests are right: they are those of the tensors that were sent."""
    before = {
        name: tensor.clone() for name, tensor in pair.engine._model._model.state_dict().items()
    }
    pair.step(1e-2)
    await pair.hand_over()
    state = pair.engine._model._model.state_dict()
    path = write_weights(stale_tower(dict(state), before))
    await pair.client.update_weights(WeightUpdate(2, "shared_memory", {"path": path}))
    remove_weights(path)
    with pytest.raises(WeightSyncError, match=DIFFER):
        await pair.verify()
    pair.sync.probe = [tokens for tokens in pair.sync.probe if not ImageTokens.images_of(tokens)]
    await pair.verify()


async def test_a_wrong_image_is_found_by_the_prompts(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.hand_over()
    await pair.verify()
    vision, right = pair.engine._model._vision, ImageProcessor.features

    def features(self: ImageProcessor, images: Sequence[Image]) -> dict[str, Tensor]:
        return right(self, [noise(9) if image is noise(1) else image for image in images])

    with monkeypatch.context() as patch:
        engines_own = ImageProcessor(vision._path)
        engines_own.__class__ = type("Confused", (ImageProcessor,), {"features": features})
        patch.setattr(vision, "processor", engines_own)
        await pair.hand_over()
        with pytest.raises(WeightSyncError, match=DIFFER):
            await pair.verify()


async def test_ids_that_are_expanded_twice_are_rejected(folder: str, pair: Pair) -> None:
    images, processor = (noise(1),), processor_of(folder)
    expanded = prompt(folder, images)
    with pytest.raises(UserError, match="has 4 placeholders for 1 images"):
        processor.expand(expanded, images)
    first = expanded.index(processor.placeholder)
    twice = [
        *expanded[:first],
        *processor.expand([processor.placeholder] * 4, images * 4),
        *expanded[first + 4 :],
    ]
    request = GenerationRequest("twice", twice, SamplingParams(max_tokens=2), images=images)
    (answer,) = await answers_of(pair.engine, [request])
    assert "do not hold those of its 1 images, in order" in answer.error


def test_prompts_with_images_are_not_cut() -> None:
    prompts = [ImageTokens([1] * 9, (noise(1),)), [2]]
    assert choose_probe(prompts, 8, cuts=False) == [[1] * 9]
    assert ImageTokens.images_of(choose_probe(prompts, 8, cuts=False)[0]) == (noise(1),)


@pytest.mark.matrix
@pytest.mark.vllm
async def test_vllm_proves_the_tower_and_wrong_images_and_a_stale_cache_of_features_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny("qwen3_vl", tmp_path)
    monkeypatch.setenv(
        "VLLM_ALLOW_INSECURE_SERIALIZATION", "1"
    )  # functions of this file run in the worker
    async with running(
        "vllm", folder, "float32", probe_of(folder), max_model_len=200, kv_cache_gb=0.1
    ) as pair:
        engine: Any = pair.engine
        assert max(await never_fails(pair, 50)) < 0.75
        assert not pair.sync._unproven
        pair.step()
        update = await pair.dispatch.transfer.publish(0)
        fault = WITHOUT + "visual.blocks.1."
        (answer,) = await engine.llm.collective_rpc(
            update_with, args=(fault, as_message(update.info))
        )
        await pair.dispatch.transfer.release(update)
        assert re.search(r"engine holds.*visual\.blocks\.1\.", answer), answer
        await pair.hand_over()

        images = (noise(1),)
        request = GenerationRequest(
            "twice", prompt(folder, images), SamplingParams(max_tokens=2), images=images
        )
        with monkeypatch.context() as patch:  # what vLLM would do without an error
            patch.setattr(engine._images, "collapse", lambda tokens, images: list(tokens))
            (doubled,) = await answers_of(engine, [request])
        assert (
            "vLLM's processor made 21 other tokens of its images than the model's own"
            in doubled.error
        )

        with monkeypatch.context() as patch:
            patch.setattr(
                vllm_engine,
                "decoded",
                lambda image: decoded(noise(9) if image is noise(1) else image),
            )
            await pair.hand_over()
            with pytest.raises(WeightSyncError, match=DIFFER):
                await pair.verify()
        await pair.hand_over()
        await pair.verify()

        pair.step(1e-2)
        monkeypatch.setattr(
            engine.llm, "reset_encoder_cache", engine.llm.check_health
        )  # another call without effect
        await pair.hand_over()
        with pytest.raises(WeightSyncError, match=DIFFER):
            await pair.verify()


@pytest.mark.matrix
@pytest.mark.vllm
async def test_the_same_faults_are_found_at_a_server(
    tmp_path: Path, fork_socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, port = save_tiny("qwen3_vl", tmp_path), free_port()
    extra = {"url": f"http://127.0.0.1:{port}", "start_s": 60}
    with serving(fork_socket, Path(folder), port) as process:
        await until_it_answers(extra["url"], process)
        async with running("vllm_server", folder, "float32", probe_of(folder), extra=extra) as pair:
            await pair.hand_over()
            await pair.verify()
            images, engine = (noise(1),), pair.engine
            request = GenerationRequest(
                "twice", prompt(folder, images), SamplingParams(max_tokens=2), images=images
            )
            with monkeypatch.context() as patch:
                patch.setattr(engine._images, "collapse", lambda tokens, images: list(tokens))
                (doubled,) = await answers_of(engine, [request])
            assert (
                "vLLM's processor made 21 other tokens of its images than the model's own"
                in doubled.error
            )

            with monkeypatch.context() as patch:
                patch.setattr(
                    engine, "_sent", vllm_server.SentImages()
                )  # all images are sent again
                patch.setattr(
                    vllm_server,
                    "rgb_url",
                    lambda image: rgb_url(noise(9) if image is noise(1) else image),
                )
                await pair.hand_over()
                with pytest.raises(WeightSyncError, match=DIFFER):
                    await pair.verify()
            await pair.hand_over()
            await pair.verify()

            pair.step(1e-2)
            post = engine._server.post

            async def forgetful(route: str, *body: Any, **query: str) -> object:
                return (
                    None if route == "/reset_encoder_cache" else await post(route, *body, **query)
                )

            monkeypatch.setattr(engine._server, "post", forgetful)
            await pair.hand_over()
            with pytest.raises(WeightSyncError, match=DIFFER):
                await pair.verify()
            monkeypatch.undo()
            await pair.hand_over()
            await pair.verify()

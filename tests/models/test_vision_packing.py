"""Packed rows with images, and prompts shared with their images, have the gradient of separate rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from skyasync.models.backend import OutputRequest
from skyasync.models.batch import TokenBatch
from skyasync.models.heads import load_causal_lm
from skyasync.models.images import Image, Images
from skyasync.models.packing import MicroBatch, MicroBatches, plain_layout
from skyasync.models.token_model import TokenModel, can_share_prefixes
from tests.models.tiny_vision import FAMILIES, OTHERS, as_batch, noise, prompt, save_tiny

pytestmark = pytest.mark.slow

SMALL, LARGE, OTHER = noise(1), noise(3, 84, 56), noise(8)
ROWS: list[Images] = [(SMALL,), (noise(2), LARGE), (), (noise(4, 56, 112),), (LARGE,), (SMALL,), ()]


@pytest.fixture(scope="module", params=[*FAMILIES, *OTHERS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model(folder: str) -> TokenModel:
    return TokenModel(load_causal_lm(folder, torch.float32))


def micro_batches(
    model: TokenModel, batch: TokenBatch, *, packs: bool, max_tokens: int = 300
) -> list[MicroBatch[TokenBatch]]:
    assert model.vision is not None
    marked = model.vision.with_image_ids(batch, model.model)
    share = can_share_prefixes(model.model.config)
    return list(
        MicroBatches(
            marked, max_tokens=max_tokens, share_prefixes=share, hidden_size=1, packs=packs
        )
    )


def row_by_row(batch: TokenBatch, model: TokenModel) -> list[MicroBatch[TokenBatch]]:
    """Without packing, and without padding."""
    assert model.vision is not None
    marked, micros = model.vision.with_image_ids(batch, model.model), []
    for row in torch.arange(len(batch)).split(1):
        own = marked.select(row).trim()
        layout = plain_layout(own.tokens, own.attention_mask, own.loss_mask)
        layout.images, layout.rope = own.images, own.rope
        micros.append(MicroBatch(row, own, layout))
    return micros


def gradient(
    model: TokenModel, batch: TokenBatch, micros: list[MicroBatch[TokenBatch]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted sum of log-probabilities, and its gradient."""
    weights = torch.linspace(0.5, 1.5, batch.tokens.numel()).view(batch.tokens.shape)
    model.zero_grad()
    total = torch.zeros(())
    for micro in micros:
        own = model(micro.layout, OutputRequest())["logprobs"]
        loss = (own * weights[micro.rows, : own.shape[1]]).sum()
        loss.backward()
        total += loss.detach()
    return total, {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def assert_same(
    one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]
) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=1e-6, atol=0)
    assert one[1].keys() == other[1].keys()
    norm = torch.stack([g.norm() for g in other[1].values()]).norm()
    for name, expected in other[1].items():
        assert (one[1][name] - expected).norm() <= 1e-6 * norm, name


def images_given(model: TokenModel, micro: MicroBatch[TokenBatch]) -> int:
    """Images that the tower computes for a micro-batch."""
    assert model.vision is not None
    given = model.vision.inputs(micro.layout, model.model)
    return (
        given["image_grid_thw"]
        if "image_grid_thw" in given
        else given["pixel_values"].flatten(0, -4)
    ).shape[0]


def test_a_packed_row_has_the_gradient_of_each_row_alone(folder: str, model: TokenModel) -> None:
    prompts = [prompt(folder, images) for images in ROWS]
    batch = as_batch(prompts, [list(range(5, 8 + i**2 % 30)) for i in range(len(ROWS))], ROWS)
    (packed,) = micro_batches(model, batch, packs=model.packs)
    assert packed.layout.tokens.shape == (1, int(batch.attention_mask.sum()))
    assert len(packed.layout.blocks) > 1
    assert images_given(model, packed) == 6
    several = micro_batches(model, batch, packs=model.packs, max_tokens=80)
    assert 1 < len(several) < len(ROWS)
    expected = gradient(model, batch, row_by_row(batch, model))
    assert_same(gradient(model, batch, [packed]), expected)
    assert_same(gradient(model, batch, several), expected)


@pytest.mark.parametrize("packs", [True, False])
def test_a_shared_prompt_and_its_images_are_computed_once(
    folder: str, model: TokenModel, packs: bool
) -> None:
    """Four samples of two prompts; one of them has its own image in a later turn."""
    first, second = prompt(folder, (SMALL, LARGE)), prompt(folder, ())
    later = prompt(folder, (OTHER,))
    answers = [[5, 6, 7], [8, 9], [10, *later, 11, 12], [13], [5], [6, 7], [8, 9, 10], [11]]
    images: list[Images] = [
        (SMALL, LARGE),
        (SMALL, LARGE),
        (SMALL, LARGE, OTHER),
        (SMALL, LARGE),
        *[()] * 4,
    ]
    batch = as_batch([first] * 4 + [second] * 4, answers, images)
    batch.group_ids = torch.arange(8) // 4
    batch.loss_mask[2, len(first) + 1 : len(first) + 1 + len(later)] = False
    micros = micro_batches(model, batch, packs=packs)
    computed = sum(micro.layout.tokens.numel() for micro in micros)
    assert computed < 0.7 * batch.attention_mask.sum()
    assert (
        sum(images_given(model, micro) for micro in micros if any(micro.layout.images or ())) == 3
    )
    assert_same(gradient(model, batch, micros), gradient(model, batch, row_by_row(batch, model)))


def test_equal_tokens_of_different_images_are_not_shared(folder: str, model: TokenModel) -> None:
    own: list[tuple[Image]] = [(SMALL,), (OTHER,), (SMALL,)]
    prompts = [prompt(folder, images) for images in own]
    assert prompts[0] == prompts[1]
    batch = as_batch(prompts, [[5, 6, 7], [8, 9], [10, 11]], list(own))
    batch.group_ids = torch.zeros(3, dtype=torch.int64)
    micros = micro_batches(model, batch, packs=True)
    assert_same(gradient(model, batch, micros), gradient(model, batch, row_by_row(batch, model)))

"""A vision-language model under FSDP, where one rank has images and the other has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from skyasync.models.batch import UpdateBatch
from skyasync.models.images import Images
from skyasync.workers.policy import PolicyWorker
from tests.models.tiny_vision import FAMILIES, noise, prompt, save_tiny
from tests.workers.conftest import config_for
from tests.workers.processes import Rank, Ranks

pytestmark = pytest.mark.slow


def mixed_batch(folder: str) -> UpdateBatch:
    """Two rows with images of different sizes, then two without."""
    images: list[Images] = [(noise(1),), (noise(2), noise(3, 84, 56)), (), ()]
    rows = [[*prompt(folder, own), 5 + i, 6, 7] for i, own in enumerate(images)]
    lengths = torch.tensor([len(row) for row in rows])
    index = torch.arange(int(lengths.max()))
    mask = index < lengths[:, None]
    loss_mask = mask & (index >= lengths[:, None] - 3)
    zeros = torch.zeros(mask.shape)
    return UpdateBatch(
        tokens=torch.tensor([row + [0] * (len(index) - len(row)) for row in rows]),
        attention_mask=mask,
        loss_mask=loss_mask,
        group_ids=torch.arange(4),
        images=tuple(images),
        behaviour_logprobs=torch.where(loss_mask, -2.0, 0.0),
        versions=torch.where(loss_mask, 0, -1),
        truncated=torch.zeros(4, dtype=torch.bool),
        rewards=zeros,
        advantages=torch.linspace(-1, 1, mask.numel()).view(mask.shape) * loss_mask,
        loss_weights=loss_mask / loss_mask.sum(),
    )


def step(rank: Rank, folder: str) -> tuple[dict[str, Any], dict[str, float]]:
    """The gradient, whole, after the rank's own rows, and the step's metrics."""
    batch = mixed_batch(folder)
    share = len(batch) // rank.count
    own = batch.select(torch.arange(rank.rank * share, (rank.rank + 1) * share)).trim()
    rank.worker.forward_backward(own)
    gradients = {}
    for name, parameter in rank.worker.backend.model.named_parameters():
        gradient = parameter.grad
        gradients[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).numpy()
    return gradients, rank.worker.optimizer_step()


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_with_and_without_images_have_the_gradient_of_one(
    family: str,
    tmp_path: Path,
    ranks: Callable[[int], Ranks],
) -> None:
    folder = save_tiny(family, tmp_path / family)
    cfg = config_for(folder)
    alone = Rank(0, 1, PolicyWorker(cfg, threads=1))
    alone.worker.setup()
    expected, metrics = step(alone, folder)
    assert any(gradient.any() for name, gradient in expected.items() if "vis" in name)
    ranks(2).set_up(PolicyWorker, cfg)
    for gradients, reported in ranks(2).call(step, folder):
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            assert np.abs(gradients[name] - gradient).max() <= 1e-5 * np.abs(gradient).max() + 1e-6, name
        assert reported == pytest.approx(metrics, rel=1e-4)

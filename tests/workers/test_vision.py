"""A vision-language model on ranks: rows with no, one and two images, and ranks without any."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from skyasync.config.schema import Config
from skyasync.models.batch import UpdateBatch
from skyasync.models.images import Images
from skyasync.workers.critic import CriticWorker
from skyasync.workers.policy import PolicyWorker
from tests.models.tiny_vision import FAMILIES, UNUSED, noise, prompt, save_tiny
from tests.workers.conftest import config_for
from tests.workers.processes import Rank, Ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[*FAMILIES, pytest.param("llava", marks=pytest.mark.matrix)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


def batch_of_images(folder: str) -> UpdateBatch:
    """Of eight rows the second half has no image: those of the second of two ranks, and of the last two of four.

    Three samples of a prompt with images are a group, and so are four of one without.
    """
    both = (noise(1), noise(3, 84, 56))
    images: list[Images] = [both, both, both, (noise(2),), (), (), (), ()]
    rows = [[*prompt(folder, own), *range(5 + i, 8 + i + i % 3)] for i, own in enumerate(images)]
    lengths = torch.tensor([len(row) for row in rows])
    index = torch.arange(int(lengths.max()))
    mask = index < lengths[:, None]
    loss_mask = mask & (index >= lengths[:, None] - 3)
    return UpdateBatch(
        tokens=torch.tensor([row + [0] * (len(index) - len(row)) for row in rows]),
        attention_mask=mask,
        loss_mask=loss_mask,
        group_ids=torch.tensor([0, 0, 0, 1, 2, 2, 2, 2]),
        images=tuple(images),
        behaviour_logprobs=torch.where(loss_mask, -2.0, 0.0),
        versions=torch.where(loss_mask, 0, -1),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        rewards=torch.zeros(mask.shape),
        advantages=torch.linspace(-1, 1, mask.numel()).view(mask.shape) * loss_mask,
        loss_weights=loss_mask / loss_mask.sum(),
    )


def gradient(rank: Rank, folder: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The whole gradient after the rank's own rows, and the metrics of the optimizer step, which clips it in place."""
    batch = batch_of_images(folder)
    share = len(batch) // rank.count
    rank.worker.forward_backward(
        batch.select(torch.arange(rank.rank * share, (rank.rank + 1) * share)).trim()
    )
    whole = {}
    for name, parameter in rank.worker.backend.model.named_parameters():
        own = parameter.grad
        if any(part in name for part in UNUSED):
            continue
        assert own is not None, name
        whole[name] = (own.full_tensor() if isinstance(own, DTensor) else own).clone()
    return whole, rank.worker.optimizer_step()


def of_one_rank(cfg: Config, folder: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    alone = Rank(0, 1, PolicyWorker(cfg, threads=1))
    alone.worker.setup()
    return gradient(alone, folder)


def row_by_row(folder: str) -> Config:
    cfg = config_for(folder)
    cfg.trainer.micro_train_batch_size_per_gpu = 1
    return cfg


def distance(left: Tensor, right: Tensor) -> Tensor:
    return (left - right).norm()


@pytest.mark.parametrize("count", [1, 2, pytest.param(4, marks=pytest.mark.matrix)])
def test_ranks_with_and_without_images_have_the_gradient_of_each_row_alone(
    folder: str, count: int, ranks: Callable[[int], Ranks]
) -> None:
    expected, metrics = of_one_rank(row_by_row(folder), folder)
    norm = metrics["grad_norm"]
    assert any(whole.any() for name, whole in expected.items() if "vis" in name)
    if count == 1:
        found = [of_one_rank(config_for(folder), folder)]
    else:
        ranks(count).set_up(PolicyWorker, config_for(folder))
        found = ranks(count).call(gradient, folder)
    for whole, reported in found:
        assert whole.keys() == expected.keys()
        for name, reference in expected.items():
            assert distance(whole[name], reference) <= min(
                1e-6 * norm, 5e-6 * reference.norm() + 1e-9 * norm
            ), name
        computed = reported.pop("computed_tokens")
        assert (
            computed < 0.7 * metrics["computed_tokens"] or count > 1
        )  # groups of a rank's rows share prompts
        assert reported == pytest.approx(
            {n: v for n, v in metrics.items() if n != "computed_tokens"}, rel=1e-5
        )


def test_one_rank_sharded_in_bfloat16_has_the_noise_of_one_that_is_not(folder: str) -> None:
    exact, metrics = of_one_rank(row_by_row(folder), folder)
    sharded, plain = config_for(folder), config_for(folder)
    for cfg in (sharded, plain):
        cfg.trainer.policy.model.dtype = "bfloat16"
    plain.trainer.policy.optimizer_config.bf16_stochastic_round = (
        True  # weights in bfloat16 need no FSDP
    )
    with_fsdp, without = (of_one_rank(cfg, folder)[0] for cfg in (sharded, plain))
    for name, reference in exact.items():
        rounding = distance(without[name], reference)
        assert rounding <= 0.1 * reference.norm() + 1e-4 * metrics["grad_norm"], name
        assert distance(with_fsdp[name], reference) <= 1.3 * rounding, name


@pytest.mark.parametrize(
    "setting", [{"gradient_checkpointing": True}, {"cpu_offload": "parameters"}]
)
def test_recomputed_and_offloaded_the_gradient_is_the_same(
    folder: str, setting: dict[str, Any]
) -> None:
    expected, metrics = of_one_rank(config_for(folder), folder)
    cfg = config_for(folder)
    vars(cfg.trainer.policy).update(setting)
    found, _ = of_one_rank(cfg, folder)
    for name, reference in expected.items():
        assert distance(found[name], reference) <= 1e-6 * metrics["grad_norm"], name


def test_adapters_are_on_the_language_model_alone_and_are_sent_merged(folder: str) -> None:
    cfg = config_for(folder)
    cfg.trainer.policy.lora.rank = 2
    worker = PolicyWorker(cfg, threads=1)
    worker.setup()
    before = {name: weight.clone() for name, weight in worker.backend.weights()}
    whole, _ = of_one_rank(config_for(folder), folder)
    batch = batch_of_images(folder)
    worker.forward_backward(batch)
    for name, parameter in worker.backend.model.named_parameters():
        if (
            parameter.grad is not None and "lora_B" in name
        ):  # B is 0, so its gradient is the weight's, times A
            adapted = name.replace("lora_B.default.", "").replace("base_layer.", "")
            first = worker.backend.model.get_parameter(name.replace("lora_B", "lora_A"))
            expected = cfg.trainer.policy.lora.alpha / 2 * whole[adapted] @ first.T
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6)
    worker.optimizer_step()
    worker.forward_backward(batch)
    worker.optimizer_step()
    changed = {
        name for name, weight in worker.backend.weights() if not torch.equal(weight, before[name])
    }
    assert changed
    assert all(
        re.fullmatch(r"model\.(language|text)_model\.layers\.\d\..*_proj\.weight", name)
        for name in changed
    )


def test_an_exported_folder_is_a_model_that_reads_images(folder: str, tmp_path: Path) -> None:
    worker = PolicyWorker(config_for(folder), threads=1)
    worker.setup()
    worker.update_policy(batch_of_images(folder))
    worker.export(str(tmp_path))
    exported = PolicyWorker(config_for(str(tmp_path)), threads=1)
    exported.setup()
    assert prompt(str(tmp_path), (noise(1),)) == prompt(folder, (noise(1),))
    for (name, one), (_, other) in zip(
        worker.backend.weights(), exported.backend.weights(), strict=True
    ):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_a_critic_reads_images_and_its_gradient_is_that_of_each_row_alone(
    folder: str, backbone: str, tmp_path: Path
) -> None:
    batch = batch_of_images(folder)
    batch.values, batch.returns = torch.zeros(batch.tokens.shape), batch.advantages
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for cfg in (config_for(folder), row_by_row(folder)):
        cfg.trainer.algorithm.advantage_estimator = "gae"
        cfg.trainer.critic.backbone = "shared" if backbone == "shared" else "own"
        worker: Any = (
            PolicyWorker(cfg, threads=1) if backbone == "shared" else CriticWorker(cfg, threads=1)
        )
        worker.setup()
        model: Any = worker.backend.model
        values = worker.values(batch)
        worker.forward_backward(batch)
        found.append(
            (
                values,
                {
                    name: p.grad.clone()
                    for name, p in model.named_parameters()
                    if p.grad is not None
                },
            )
        )
        worker.drop_gradient()
    (values, packed), (expected, alone) = found
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-6)
    assert packed.keys() == alone.keys()
    assert any("vis" in name for name in packed)
    norm = torch.stack([gradient.norm() for gradient in alone.values()]).norm()
    assert all(distance(packed[name], alone[name]) <= 1e-6 * norm for name in alone)
    other = batch.select(torch.arange(len(batch)))
    other.images = tuple(tuple(noise(50 + i) if image is noise(2) else image for i, image in enumerate(row))
                         for row in batch.images or ())  # fmt: skip
    changed = (worker.values(other) - values).abs().sum(1) > 1e-4
    assert changed.tolist() == [False] * 3 + [True] + [False] * 4
    if backbone == "shared":
        worker.export_critic(str(tmp_path))
        exported = CriticWorker(critic_of(str(tmp_path)), threads=1)
        exported.setup()
        torch.testing.assert_close(exported.values(batch), values, rtol=0, atol=1e-6)


def critic_of(folder: str) -> Config:
    cfg = config_for(folder)
    cfg.trainer.algorithm.advantage_estimator = "gae"
    return cfg

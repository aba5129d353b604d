"""Muon orthogonalizes whole matrices, as torch's does, on any ranks; AdamW trains all other parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

from skyasync.config.schema import Config
from skyasync.models.fsdp.optimizers import MOMENTUM, MuonAdamW
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.ranks import split_for_ranks
from tests.workers.calls import load_whole, step_and_save, whole_weights
from tests.workers.conftest import config_for, make_batch
from tests.workers.processes import Rank, Ranks


def muon(path: str) -> Config:
    cfg = config_for(path)
    cfg.trainer.policy.optimizer_config.name = "muon"
    cfg.trainer.policy.optimizer_config.weight_decay = 0.1
    return cfg


def test_steps_are_those_of_torch() -> None:
    torch.manual_seed(0)
    start, other = torch.randn(12, 8), torch.randn(5)
    ours, rest = (torch.nn.Parameter(t.clone()) for t in (start, other))
    theirs, theirs_rest = (torch.nn.Parameter(t.clone()) for t in (start, other))
    groups: list[dict[str, Any]] = [
        {"params": [ours], "muon": True},
        {"params": [rest], "muon": False},
    ]
    found = MuonAdamW(groups, momentum=0.9, lr=0.02, weight_decay=0.1, fused=True)
    expected = [
        torch.optim.Muon(
            [theirs], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW([theirs_rest], lr=0.02, weight_decay=0.1, fused=True),
    ]
    for _ in range(4):
        for mine, yours in ((ours, theirs), (rest, theirs_rest)):
            mine.grad = yours.grad = torch.randn(mine.shape)
        for optimizer in (found, *expected):
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert torch.equal(rest, theirs_rest)
    assert list(found.state[ours]) == [MOMENTUM]


def steps(rank: Rank) -> dict[str, Any]:
    """Weights after two steps, whole."""
    batch = make_batch()
    for _ in range(2):
        rank.worker.update_policy(
            batch.select(split_for_ranks(batch, rank.count)[rank.rank]).trim()
        )
    return {name: tensor.numpy() for name, tensor in whole_weights(rank.worker).items()}


def test_two_ranks_turn_whole_matrices_and_one_goes_on_from_their_checkpoint(
    tied_model: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    cfg = muon(tied_model)
    alone = PolicyWorker(cfg, threads=1)
    alone.setup()
    expected = steps(Rank(0, 1, alone))
    turned = {
        name
        for name, p in alone.backend.model.model.named_parameters()
        if MOMENTUM in alone.backend.optimizer.state[p]
    }
    assert len(turned) == 2 * 7 and not any("embed" in name or "norm" in name for name in turned)
    ranks(2).set_up(PolicyWorker, cfg)
    for found in ranks(2).call(steps):
        for name, values in found.items():
            apart = (torch.from_numpy(values) - torch.from_numpy(expected[name])).abs()
            # Muon iterates matrices in bfloat16, which processors round differently.
            assert float(apart.max()) < 1e-3 and float(apart.mean()) < 1e-4, name
    (saved, _) = ranks(2).call(step_and_save, str(tmp_path))
    assert load_whole(Rank(0, 1, alone), str(tmp_path)) == saved


def matrix(rank: Rank, update: Any) -> Any:
    """Of a step with a given gradient: a matrix whose rows two ranks hold."""
    parameter = rank.worker.backend.model.get_parameter("model.model.layers.0.mlp.up_proj.weight")
    whole = torch.from_numpy(update)
    parameter.grad = distribute_tensor(
        whole, parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    rank.worker.backend.optimizer.step()
    result: Tensor = parameter.full_tensor()
    return result.detach().numpy()


@pytest.mark.parametrize(
    ("count", "tensor"), [(2, 1), (2, 2), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_of_one_gradient_ranks_make_the_weights_of_one_bit_for_bit(
    count: int, tensor: int, tied_model: str, ranks: Callable[[int], Ranks]
) -> None:
    alone = PolicyWorker(muon(tied_model), threads=1)
    alone.setup()
    parameter = alone.backend.model.get_parameter("model.model.layers.0.mlp.up_proj.weight")
    parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    cfg = muon(tied_model)
    cfg.trainer.parallel.tensor = tensor
    ranks(count).set_up(PolicyWorker, cfg)
    found = ranks(count).call(matrix, parameter.grad.numpy())
    alone.backend.optimizer.step()
    assert all(torch.equal(torch.from_numpy(one), parameter.detach()) for one in found)

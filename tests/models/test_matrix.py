"""One optimizer step has one gradient: every way to compute it, for every shape of model, in float32.

Invariant of the library, as a table: shape x adapters x way. The gradient of one rank with packed rows must be that of
all other ways, up to relative 1e-6. Cases of the quick tests (2 ranks of one dimension, no adapters) are not repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from skyasync.config.schema import Config
from skyasync.models.fsdp import backend as fsdp
from skyasync.models.fsdp.sharding import OffloadBuffers
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.ranks import split_for_ranks
from tests.models.parallel.test_parallel import set_adapters
from tests.models.test_shapes import SHAPES, distance, gradient, ragged, settings
from tests.models.test_shapes import shapes as shapes
from tests.workers.processes import Rank, Ranks

pytestmark = [pytest.mark.matrix, pytest.mark.slow]

RELATIVE = 1e-6


@dataclass(frozen=True)
class Way:
    """How a step is computed.

    Args:
        ranks: the data dimension has the ranks that the other dimensions leave.
        replicas: groups of ranks that each shard the weights among themselves.
        recomputed: ``trainer.policy.gradient_checkpointing``.
        reduced: ``trainer.policy.reduce_gradients``.
        tokens, rows: of a micro-batch at most; 0 rows: as many as fit.
        packed: rows share their prompts.
        away: the policy has been in host memory before.
        adapters: trained with low-rank adapters, without, or both.
    """

    ranks: int = 1
    tensor: int = 1
    context: int = 1
    replicas: int = 1
    recomputed: bool | str = False
    reduced: str = "micro_batch"
    tokens: int = 64
    rows: int = 0
    packed: bool = True
    away: bool = False
    adapters: tuple[bool, ...] = (False, True)

    def settings(self, path: str, *, adapters: bool) -> Config:
        cfg = settings(path)
        trainer, policy = cfg.trainer, cfg.trainer.policy
        trainer.micro_batch_tokens, trainer.micro_train_batch_size_per_gpu = self.tokens, self.rows
        trainer.parallel.tensor, trainer.parallel.context = self.tensor, self.context
        policy.gradient_checkpointing, policy.reduce_gradients = self.recomputed, self.reduced
        policy.fsdp_size = self.ranks // self.replicas if self.replicas > 1 else 0
        policy.lora.rank = 4 if adapters else 0
        return cfg

    def rows_packed(self) -> AbstractContextManager[Any]:
        return (
            nullcontext()
            if self.packed
            else patch.object(fsdp, "can_share_prefixes", lambda config: False)
        )


WITHOUT, WITH = (False,), (True,)
ON_ONE_RANK = {
    "row by row": Way(rows=1, packed=False),
    "micro-batches of 24 tokens": Way(tokens=24),
    "one micro-batch": Way(tokens=4096),
    "checkpointing": Way(recomputed=True),
    "selective checkpointing": Way(recomputed="selective"),
    "from host memory": Way(away=True),
}
ON_RANKS = {
    "data 4": Way(4),
    "data 2, selective checkpointing, reduced once": Way(
        2, recomputed="selective", reduced="update", adapters=WITHOUT
    ),
    "data 2": Way(2, adapters=WITH),
    "context 2": Way(2, context=2, adapters=WITH),
    "tensor 2": Way(2, tensor=2, adapters=WITH),
    "context 2, checkpointing": Way(2, context=2, recomputed=True, adapters=WITHOUT),
    "tensor 2, selective checkpointing": Way(2, tensor=2, recomputed="selective", adapters=WITHOUT),
    "data 2 x context 2": Way(4, context=2, adapters=WITHOUT),
    "data 2 x tensor 2, reduced once": Way(4, tensor=2, reduced="update", adapters=WITHOUT),
    "context 2 x tensor 2": Way(4, context=2, tensor=2, adapters=WITHOUT),
    "2 replicas of 2": Way(4, replicas=2),
}


def table(ways: dict[str, Way]) -> pytest.MarkDecorator:
    rows = [
        pytest.param(name, adapters, way, id=f"{way_name}{', adapters' if adapters else ''}-{name}")
        for way_name, way in ways.items()
        for adapters in way.adapters
        for name in SHAPES
    ]
    return pytest.mark.parametrize(("name", "adapters", "way"), rows)


@cache
def expected(path: str, adapters: bool) -> Tensor:
    return alone(path, adapters, Way())


def alone(path: str, adapters: bool, way: Way) -> Tensor:
    with way.rows_packed():
        rank = Rank(0, 1, PolicyWorker(way.settings(path, adapters=adapters), threads=1))
        rank.worker.setup()
        return torch.from_numpy(step(rank, way))


def step(rank: Rank, way: Way) -> Any:
    """The whole gradient of this rank's share of the batch, and of all others'."""
    worker, batch = rank.worker, ragged()
    set_adapters(rank)
    if way.away:
        with patch.object(
            OffloadBuffers,
            "moved",
            lambda buffers, tensor, device, place: buffers.on_host(tensor, place),
        ):
            worker.offload()
        with patch.object(
            OffloadBuffers, "moved", lambda buffers, tensor, device, place: tensor.clone()
        ):
            worker.onload()
    mesh = worker.backend.spec.mesh_shape
    rows = split_for_ranks(batch, mesh.data)[mesh.data_rank(rank.rank)]
    worker.forward_backward(batch.select(rows).trim())
    return gradient(worker).numpy()


@table(ON_ONE_RANK)
def test_one_rank_has_one_gradient_however_it_computes_it(
    shapes: dict[str, str], name: str, adapters: bool, way: Way
) -> None:
    assert distance(alone(shapes[name], adapters, way), expected(shapes[name], adapters)) < RELATIVE


@table(ON_RANKS)
def test_ranks_have_one_ranks_gradient(
    shapes: dict[str, str], name: str, adapters: bool, way: Way, ranks: Callable[[int], Ranks]
) -> None:
    group = ranks(way.ranks)
    group.set_up(PolicyWorker, way.settings(shapes[name], adapters=adapters))
    found = [torch.from_numpy(one) for one in group.call(step, way)]
    assert max(distance(one, expected(shapes[name], adapters)) for one in found) < RELATIVE


@pytest.mark.parametrize("way", [Way(4), Way(4, recomputed="selective", reduced="update")], ids=str)
def test_experts_that_are_fewer_than_ranks_are_cut_without_changing_the_gradient(
    way: Way, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """Three experts on four ranks: each holds a part of every one."""
    config = deepcopy(SHAPES["qwen3_moe"])
    config.num_experts = 3
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ranks(4).set_up(PolicyWorker, way.settings(str(tmp_path), adapters=False))
    for one in ranks(4).call(step, way):
        assert distance(torch.from_numpy(one), expected(str(tmp_path), False)) < RELATIVE

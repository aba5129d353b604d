"""In bfloat16 a step on several ranks differs from one rank's no more than one rank's with another order of sums.

The noise is measured: the orders of one rank are other micro-batches, rows one by one, and the reverse order. The
largest difference among them is the bound for all mesh dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from skyasync.config.schema import Config
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.ranks import split_for_ranks
from tests.models.parallel.test_parallel import set_adapters
from tests.models.test_matrix import Way, table
from tests.models.test_shapes import distance, gradient, ragged
from tests.models.test_shapes import shapes as shapes
from tests.workers.processes import Rank, Ranks

pytestmark = [pytest.mark.matrix, pytest.mark.slow]

ORDERS = {
    "rows one by one": (Way(rows=1), {}),
    "at most three rows": (Way(rows=3), {}),
    "one micro-batch": (Way(tokens=4096), {}),
    "from the last row": (Way(), {"backwards": True}),
}
RECOMPUTED = {
    "checkpointing": Way(recomputed=True),
    "selective checkpointing": Way(recomputed="selective", adapters=(False,)),
}
# One rank of a model with windows attends in bfloat16, slices of its rows attend in float32.
ATTENDS_IN_BFLOAT16 = ("gemma2_capped",)
WAYS = {
    "data 2": Way(2, adapters=(False,)),
    "data 4": Way(4),
    "context 2": Way(2, context=2),
    "tensor 2": Way(2, tensor=2),
    "context 2 x tensor 2": Way(4, context=2, tensor=2, adapters=(False,)),
}


def step(rank: Rank, backwards: bool = False) -> Any:
    worker, batch = rank.worker, ragged()
    set_adapters(rank)
    mesh = worker.backend.spec.mesh_shape
    rows = split_for_ranks(batch, mesh.data)[mesh.data_rank(rank.rank)]
    if backwards:
        rows = rows.flip(0)
    worker.forward_backward(batch.select(rows).trim())
    return gradient(worker).numpy()


def alone(path: str, adapters: bool, way: Way, **how: bool) -> Tensor:
    with way.rows_packed():
        rank = Rank(0, 1, PolicyWorker(in_bfloat16(path, adapters, way), threads=1))
        rank.worker.setup()
        try:
            return torch.from_numpy(step(rank, **how))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def in_bfloat16(path: str, adapters: bool, way: Way) -> Config:
    cfg = way.settings(path, adapters=adapters)
    cfg.trainer.policy.model.dtype = "bfloat16"
    return cfg


@cache
def expected(path: str, adapters: bool) -> Tensor:
    return alone(path, adapters, Way())


@cache
def noise(path: str, adapters: bool) -> float:
    """The largest difference of one rank between these orders."""
    found = (alone(path, adapters, way, **how) for way, how in ORDERS.values())
    return max(distance(one, expected(path, adapters)) for one in found)


@table(RECOMPUTED)
def test_what_is_computed_again_is_the_same_bit_for_bit(
    shapes: dict[str, str], name: str, adapters: bool, way: Way
) -> None:
    assert torch.equal(alone(shapes[name], adapters, way), expected(shapes[name], adapters))


@table(WAYS)
def test_ranks_differ_no_more_than_one_does_from_itself_in_another_order(
    shapes: dict[str, str], name: str, adapters: bool, way: Way, ranks: Callable[[int], Ranks]
) -> None:
    """Also for split matrices, whose partial products are added before they are rounded."""
    path, group = shapes[name], ranks(way.ranks)
    group.set_up(PolicyWorker, in_bfloat16(path, adapters, way))
    found = [torch.from_numpy(one) for one in group.call(step)]
    difference = max(distance(one, expected(path, adapters)) for one in found)
    # One rank attends by rows and adds up the gradients of shared tokens in float32, a slice by a mask in bfloat16.
    bound = noise(path, adapters) * (2 if way.context > 1 else 1)
    if way.context > 1 and name in ATTENDS_IN_BFLOAT16:
        bound *= 4
    print(f"{difference:.2e} from one rank, which is {bound:.2e} from itself")
    assert difference < bound

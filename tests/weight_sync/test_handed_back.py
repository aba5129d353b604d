"""Weights that an engine hands back, for workers that are started again: what it was sent last, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from skyasync.config.load import load_config
from skyasync.errors import UserError
from skyasync.weight_sync.transfers.file import PREFIX, directories, read_weights, remove_weights, write_weights
from skyasync.weight_sync.verify.digests import digests_of
from skyasync.workers import checkpoint
from skyasync.workers.policy import PolicyWorker
from tests.engines.tiny_llama import save_tiny_llama
from tests.weight_sync.pair import running
from tests.workers.conftest import config_for, ranks  # noqa: F401  (a fixture)
from tests.workers.processes import Rank, Ranks

pytestmark = pytest.mark.slow

PROBE = [[*range(1, 60)]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_llama(tmp_path_factory.mktemp("model"), tied=True))


def full(policy: PolicyWorker) -> dict[str, str]:
    return digests_of(checkpoint.full_weights(policy.weights(), policy.dtype, keep=True))


def take(rank: Rank, path: str) -> tuple[bool, dict[str, str]]:
    return rank.worker.take_weights(path), full(rank.worker)


async def test_workers_get_back_what_the_engine_was_sent_and_no_later_update(
    model: str,
    ranks: Callable[[int], Ranks],  # noqa: F811
) -> None:
    async with running("transformers", model, "float32", PROBE) as pair:
        policy = pair.dispatch._policy
        for _ in range(2):
            pair.step()
            await pair.hand_over()
        sent = full(policy)
        pair.step()  # which dies with the workers
        assert full(policy) != sent and await pair.client.held_versions() == {0: 2}
        path = await pair.client.hand_back(0, "")
        assert path is not None
        rounded = write_weights({name: tensor.bfloat16() for name, tensor in read_weights(path).items()})
        assert await pair.dispatch.call("policy", "take_weights", path) == [False]
        assert full(policy) == sent
        assert await pair.dispatch.call("policy", "take_weights", rounded) == [True]
        two = ranks(2)
        two.set_up(PolicyWorker, config_for(model))
        assert two.call(take, path) == [(False, sent)] * 2
        partial = write_weights({"model.norm.weight": torch.ones(3)})
        with pytest.raises(UserError, match=r"only one of them has model\.embed_tokens\.weight"):
            await pair.dispatch.call("policy", "take_weights", partial)
        for left in (path, rounded, partial):
            remove_weights(left)
    assert not [path for folder in directories() for path in folder.glob(f"{PREFIX}{os.getpid()}-*")]


@pytest.mark.parametrize(
    "settings, problem",
    [
        (["generator.backend=vllm"], "needs generator.backend=transformers: generator.backend=vllm cannot give"),
        (
            ["generator.backend=transformers", "trainer.policy.lora.rank=4"],
            r"lora.rank=4: engines hold",
        ),
    ],
)
def test_what_cannot_be_handed_back_is_refused_by_name_at_the_start(settings: list[str], problem: str) -> None:
    with pytest.raises(UserError, match=rf"trainer\.restart_from=engines .*{problem}"):
        load_config(["trainer.restart_from=engines", *settings])

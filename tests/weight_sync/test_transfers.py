"""The table of weight transfers, and a user's transfer in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from skyasync.config import load_config
from skyasync.inference.interface import ENGINES, InferenceEngine
from skyasync.inference.settings import chosen_backend, weight_sync_backend
from skyasync.weight_sync.transfers import TRANSFERS
from skyasync.weight_sync.transfers.base import WeightTransfer
from skyasync.weight_sync.transfers.endpoints import WeightSender
from skyasync.weight_sync.update import WeightUpdate


class ByHand(WeightTransfer):
    """Sends the tensors themselves."""

    sender = "by_hand"

    async def publish(self, version: int) -> WeightUpdate:
        return WeightUpdate(version, self.sender, (await self._ranks("tensors"))[0])

    async def release(self, update: WeightUpdate) -> None: ...

    async def for_late_engine(self, version: int) -> WeightUpdate:
        return await self.publish(version)

    @classmethod
    def new_sender(cls, weights: Callable[[], Any], rank: int) -> ByHandSender:
        return ByHandSender(weights)


class ByHandSender:
    def __init__(self, weights: Callable[[], Any]) -> None:
        self._weights = weights

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._weights())


class ByHandEngine(InferenceEngine):
    weight_sync = ("by_hand",)


@pytest.fixture
def registered() -> Iterator[None]:
    TRANSFERS["by_hand"], ENGINES["by_hand_engine"] = ByHand, ByHandEngine
    yield
    del TRANSFERS["by_hand"], ENGINES["by_hand_engine"]


@pytest.mark.usefixtures("registered")
async def test_its_sender_is_made_on_the_ranks_and_the_engine_chooses_it() -> None:
    weights = {"w": torch.arange(3.0)}
    sender = WeightSender(lambda: weights.items(), lambda: None, 0, torch.device("cpu"))  # type: ignore[arg-type,return-value]

    class Rank:
        async def call(self, method: str, *args: Any) -> list[Any]:
            return [sender.call(*args)]

    cfg: Any = load_config(["generator.backend=by_hand_engine"])
    assert weight_sync_backend(cfg, gpus=False) == "by_hand"
    assert chosen_backend(cfg, gpus=False).startswith(
        "generator.weight_sync_backend=auto is by_hand: "
    )
    transfer = TRANSFERS.find("by_hand").of_run(Rank(), cfg, list, gpus=False)
    update = await transfer.publish(3)
    assert torch.equal(update.info["w"], weights["w"])


@pytest.mark.usefixtures("registered")
def test_an_engine_that_does_not_name_it_is_refused() -> None:
    with pytest.raises(Exception, match=r"generator\.weight_sync_backend=by_hand needs "):
        load_config(["generator.backend=transformers", "generator.weight_sync_backend=by_hand"])


def test_the_ways_between_gpus_are_made_for_the_runs_ranks_and_engines() -> None:
    class Ranks:
        ranks = 3

    cfg: Any = load_config(["generator.backend=vllm", "generator.heartbeat_timeout_s=7"])
    broadcast = vars(TRANSFERS.find("nccl").of_run(Ranks(), cfg, lambda: [1, 2], gpus=True))
    assert (broadcast["_workers"], broadcast["_timeout_s"], broadcast["_recovers"]) == (1, 7, False)
    assert vars(TRANSFERS.find("nccl").of_run(Ranks(), cfg, list, gpus=False))["_recovers"]
    parts = vars(TRANSFERS.find("cuda_ipc").of_run(Ranks(), cfg, lambda: [1, 2], gpus=True))
    assert (parts["_count"], parts["_engines"]()) == (3, [1, 2])

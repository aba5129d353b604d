"""What can be known of the NCCL sync without a GPU: both ends are told the same, and vLLM would accept it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from skyasync.engines.protocol import EngineConfig
from skyasync.engines.vllm.engine import VLLMEngine
from skyasync.weight_sync.transfers.broadcast import NCCLSender, Rendezvous, worker_info

RENDEZVOUS = Rendezvous("127.0.0.1", 29500, engine_workers=6)


def model() -> nn.Module:
    layers = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 3), nn.Linear(4, 11, bias=False))
    layers[2].weight = layers[0].weight  # tied
    layers[1].bias.data = layers[1].bias.data.double()
    return layers


def test_message_and_iteration_enumerate_the_same_parameters() -> None:
    for dtype in (None, torch.bfloat16):
        sender = NCCLSender(model(), RENDEZVOUS, rank=0, dtype=dtype)
        parameters = sender.update(7).info["parameters"]
        sent = list(sender)
        assert parameters["names"] == [name for name, _ in sent] == ["0.weight", "1.weight", "1.bias"]
        assert parameters["shapes"] == [list(tensor.shape) for _, tensor in sent]
        assert [getattr(torch, name) for name in parameters["dtype_names"]] == [tensor.dtype for _, tensor in sent]


def test_of_the_engines_that_live_every_worker_has_a_rank_and_a_latecomer_is_alone() -> None:
    info = NCCLSender(model(), Rendezvous("127.0.0.1", 29500, 4), rank=0).update(1).info
    offsets = [worker_info(info | {"members": [0, 2]}, engine, 2)["rank_offset"] for engine in (0, 2)]
    assert {0, *(offset + worker for offset in offsets for worker in range(2))} == set(range(5))
    assert worker_info(info | {"members": None}, 2, 2)["rank_offset"] == 1


def test_every_worker_of_every_engine_has_a_rank_of_its_own() -> None:
    info = NCCLSender(model(), RENDEZVOUS, rank=0).update(1).info
    offsets = [worker_info(info, engine, workers_per_engine=2)["rank_offset"] for engine in range(3)]
    ranks = {offset + worker for offset in offsets for worker in range(2)}
    assert ranks | {0} == set(range(info["rendezvous"]["world_size"]))


@pytest.mark.vllm
def test_both_ends_get_what_vllms_own_sender_would_tell_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import nccl_engine
    from vllm.distributed.weight_transfer.base import ModuleSource

    told: dict[str, Any] = {}

    class Recorder:
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            told["init"] = init_info

        def start_weight_update(self) -> None: ...

        def update_weights(self, update_info: dict[str, Any]) -> None:
            told["update"] = update_info

        def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: None)
    monkeypatch.setattr(nccl_engine.NCCLTrainerWeightTransferEngine, "_broadcast", lambda *_: None)
    group = nccl_engine.NCCLTrainerInitInfo("127.0.0.1", 29500, 7, rank=0)
    theirs = nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init(
        group, client=Recorder(), source=ModuleSource(model())
    )
    theirs.send_weights()

    info = NCCLSender(model(), RENDEZVOUS, rank=0).update(1).info
    assert info["parameters"] == told["update"]
    nccl_engine.NCCLWeightTransferUpdateInfo(**info["parameters"])
    ours = nccl_engine.NCCLWeightTransferInitInfo(**worker_info(info, 0, 1))
    assert ours == nccl_engine.NCCLWeightTransferInitInfo(**told["init"])


@pytest.mark.vllm
def test_other_trainer_ranks_gather_without_joining_the_group() -> None:
    gathered: list[str] = []

    class Counting(NCCLSender):
        def __iter__(self) -> Any:
            for name, tensor in super().__iter__():
                gathered.append(name)
                yield name, tensor

    sender = Counting(model(), RENDEZVOUS, rank=1)
    sender.send()
    sender.send()
    assert gathered == ["0.weight", "1.weight", "1.bias"] * 2
    sender.close()
    sender.close()


@pytest.mark.vllm
def test_what_the_optimizer_has_queued_is_done_before_vllm_reads_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM packs on streams of its own. Stands in for a GPU: the current stream, and what vLLM does in which order."""
    from vllm.distributed.weight_transfer import nccl_engine

    order: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            order.append("synchronize")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: None)
    for name in ("_broadcast", "_post_send_sync"):
        monkeypatch.setattr(nccl_engine.NCCLTrainerWeightTransferEngine, name, lambda *_, name=name: order.append(name))
    for rank in (0, 1):
        order.clear()
        NCCLSender(model(), RENDEZVOUS, rank=rank).send()
        assert order == ["synchronize", "_broadcast", "_post_send_sync"]


@pytest.mark.vllm
async def test_an_engine_leaves_its_group_before_it_joins_another_and_asks_vllm_for_what_it_has() -> None:
    told: list[Any] = []

    class Core:
        """Stands for vLLM's, which needs GPUs for it."""

        llm: Any

        async def call(self, answer: Any) -> None:
            await answer

        async def collective_rpc(self, method: str) -> None:
            told.append(method)

        async def init_weight_transfer_engine(self, request: Any) -> None:
            told.append((request.init_info["master_port"], request.init_info["rank_offset"]))

    engine = VLLMEngine(EngineConfig("model", max_model_len=8, extra={"engine_index": 1}))
    engine._core = core = Core()  # type: ignore[assignment]
    core.llm = core
    for port, members in ((1, [0, 1]), (1, [0, 1]), (2, [1]), (3, None)):
        info = NCCLSender(model(), Rendezvous("127.0.0.1", port, 2), rank=0).update(1).info
        await engine._join_group(info | {"members": members})
    leave = "shutdown_weight_transfer_engine"
    assert told == [(1, 2), leave, (2, 1), leave, (3, 1)]
    assert f"def {leave}(self)" in source_of_vllms_worker()


def source_of_vllms_worker() -> str:
    from vllm.v1 import worker

    return Path(worker.__path__[0], "gpu_worker.py").read_text()

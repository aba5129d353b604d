"""Training a model from host memory is bitwise identical to training it on its device.

The machine has one device, so the worker's device is called ``cpu:0``, which is another than the host's ``cpu``, and
each moved tensor remembers its device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from skyasync.config.schema import Config
from skyasync.models.fsdp.sharding import OffloadBuffers, process_group_backend
from skyasync.weight_sync.tensors import TensorSpecs
from skyasync.weight_sync.transfers.broadcast import BroadcastSender
from skyasync.workers.frozen import ReferenceWorker
from skyasync.workers.policy import PolicyWorker
from tests.models.fsdp.test_offload import _local
from tests.workers.conftest import config_for, make_batch
from tests.workers.processes import Rank, Ranks

KINDS = ("none", "optimizer", "parameters")
DEVICE = torch.device("cpu", 0)


class Watched(PolicyWorker):
    """``during``: the device of the optimizer state at the beginning of the optimizer's steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device = DEVICE
        self.during: list[set[str]] = []

    def setup(self, *args: Any) -> None:
        super().setup(*args)
        self.backend.optimizer.register_step_pre_hook(
            lambda *_: self.during.append(self.devices()) if self.optimizer_state() else None
        )

    def optimizer_state(self) -> dict[str, Tensor]:
        states = [
            (name, self.backend.optimizer.state[p])
            for name, p in self.backend.model.named_parameters()
            if p.requires_grad
        ]
        return {f"{name}.{k}": v for name, state in states for k, v in state.items()}

    def devices(self) -> set[str]:
        return {getattr(tensor, "place", "") for tensor in self.optimizer_state().values()}

    def bits(self) -> dict[str, Tensor]:
        found = {
            name: p for name, p in self.backend.model.named_parameters() if p.requires_grad
        } | self.optimizer_state()
        return {name: _local(tensor).detach().clone() for name, tensor in found.items()}


def noted(
    buffers: OffloadBuffers, tensor: Tensor, device: torch.device, place: tuple[object, ...]
) -> Tensor:
    there = tensor.clone() if device == DEVICE else buffers.on_host(tensor, place)
    there.place = str(device)  # type: ignore[attr-defined]
    return there


def train(worker: Watched, folder: Path) -> tuple[list[Any], dict[str, Tensor]]:
    """Metrics and digests of two updates, a restored checkpoint, and another update."""
    metrics = []
    for seed in (0, 1):
        metrics.append(worker.update_policy(make_batch(seed=seed)))
    worker.save(str(folder))
    worker.update_policy(make_batch(seed=3))
    worker.load(str(folder))
    if worker.settings.cpu_offload == "optimizer":
        assert worker.devices() == {"cpu"}, "after a restore too"
    worker.offload()  # as engines look up the device
    worker.onload()
    metrics.append(worker.update_policy(make_batch(seed=2)))
    metrics.append(worker.score([[3, 4, 5, 6]]))
    return metrics, worker.bits()


def compare_kinds(process: Rank, cfg: Config, folder: Path) -> None:
    """On each rank: every kind of offloading against none."""
    before = OffloadBuffers.moved
    OffloadBuffers.moved = noted  # type: ignore[method-assign]
    try:
        found = {}
        for kind in KINDS:
            cfg.trainer.policy.cpu_offload = kind
            worker = Watched(copy.deepcopy(cfg), process.rank, process.count, threads=1)
            if process.count > 1 and not dist.is_initialized():
                store = dist.FileStore(str(folder / "store"), process.count)
                dist.init_process_group(
                    "gloo", store=store, rank=process.rank, world_size=process.count
                )
            worker.setup()
            found[kind] = train(worker, folder / kind)
            check_devices(worker, kind)
    finally:
        OffloadBuffers.moved = before  # type: ignore[method-assign]
        if dist.is_initialized():
            dist.destroy_process_group()
    metrics, bits = found["none"]
    for kind in KINDS[1:]:
        assert found[kind][0] == metrics, kind
        assert all(torch.equal(found[kind][1][name], tensor) for name, tensor in bits.items()), kind


def check_devices(worker: Watched, kind: str) -> None:
    shards = [module for module in worker.backend.model.modules() if isinstance(module, FSDPModule)]
    policies = {
        type(module._get_fsdp_state()._fsdp_param_group.offload_policy) for module in shards
    }
    assert (policies == {CPUOffloadPolicy}) == (kind == "parameters")
    if kind == "optimizer":
        assert worker.devices() == {"cpu"}, "between updates they are in host memory"
        assert all(devices == {str(DEVICE)} for devices in worker.during), (
            f"a step finds them on the device: {worker.during}"
        )
    if kind == "parameters":
        assert worker.devices() <= {"", "cpu"}, "they stay in host memory"
    buffers = {getattr(buffer, "place", "") for buffer in worker.backend.model.buffers()}
    assert kind != "parameters" or buffers == {str(DEVICE)}, (
        "parameters that FSDP does not move are on the device"
    )


CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "bfloat16, 8 bits": {"model.dtype": "bfloat16", "optimizer_config.name": "adamw_8bit"},
    "muon": {"optimizer_config.name": "muon"},
    "adapters": {"lora.rank": 4},
    "projected gradients": {"optimizer_config.max_grad_cosine": 0.01},
}


def configured(path: str, case: str) -> Config:
    cfg = config_for(path)
    for key, value in CASES[case].items():
        section, _, name = f"policy.{key}".rpartition(".")
        part: Any = cfg.trainer
        for step in section.split("."):
            part = getattr(part, step)
        setattr(part, name, value)
    return cfg


@pytest.mark.parametrize("case", list(CASES))
def test_offload_changes_no_bit_on_one_rank(tied_model: str, tmp_path: Path, case: str) -> None:
    compare_kinds(Rank(0, 1), configured(tied_model, case), tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("case", ["adamw", pytest.param("muon", marks=pytest.mark.matrix)])
def test_nor_on_two(
    untied_model: str, ranks: Callable[[int], Ranks], tmp_path: Path, case: str
) -> None:
    ranks(2).call(compare_kinds, configured(untied_model, case), tmp_path)


@pytest.mark.matrix
def test_nor_under_a_tensor_axis(
    untied_model: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    cfg = configured(untied_model, "adamw")
    cfg.trainer.parallel.tensor = 2
    ranks(2).call(compare_kinds, cfg, tmp_path)


def test_a_reference_stays_on_the_host(untied_model: str) -> None:
    cfg, found = config_for(untied_model), []
    for kind in ("none", "parameters"):
        cfg.trainer.ref.cpu_offload = kind
        worker = ReferenceWorker(cfg, threads=1)
        worker.setup()
        found.append(worker.score([[3, 4, 5, 6]]))
    assert found[0] == found[1]


def test_weights_of_the_host_are_sent_by_the_device() -> None:
    """NCCL sends tensors on GPUs only."""
    sent: list[torch.Tensor] = []
    rendezvous = {"chunk_bytes": 2**20, "senders": [0]}
    start = lambda sender, tensor: sent.append(tensor)  # noqa: E731
    group = SimpleNamespace(
        join=lambda: None, rendezvous=rendezvous, start=start, finish=lambda sender: None
    )
    group.senders, group.most_in_flight = 1, 2
    layer = torch.nn.Linear(2, 3)
    specs: TensorSpecs = {
        name: (weight.dtype, tuple(weight.shape)) for name, weight in layer.named_parameters()
    }
    sender = BroadcastSender(lambda: None, 0, torch.device("meta"))  # type: ignore[arg-type,return-value]
    sender._group = group  # type: ignore[assignment]
    assert sender.send_tensors(layer.named_parameters(), specs, sums=False) == ""
    assert [(tensor.device.type, tensor.nbytes) for tensor in sent] == [("meta", 4 * (6 + 3))]


def test_ranks_with_weights_on_the_host_have_a_group_for_these_too() -> None:
    """Norms, checkpoints and weight syncs gather tensors in host memory; NCCL takes tensors on GPUs only."""
    assert process_group_backend("cuda", "parameters") == "cpu:gloo,cuda:nccl"
    assert process_group_backend("cuda", "none", colocated=True) == "cpu:gloo,cuda:nccl"
    assert [process_group_backend("cuda", kind) for kind in ("none", "optimizer")] == ["nccl"] * 2
    assert process_group_backend("cpu", "parameters") == "gloo"

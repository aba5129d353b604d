"""A policy that was in host memory meanwhile is bitwise the same policy, and continues as if it had never been moved.

The machine has one device, where moving to it and back would do nothing. Here moving back is a copy to other memory,
which the optimizer, FSDP2 and tied weights have to follow as on a GPU.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from skyasync.config.schema import Config
from skyasync.models.batch import UpdateBatch
from skyasync.models.fsdp.backend import FSDPBackend
from skyasync.models.fsdp.quantized_base import QuantizedRows
from skyasync.models.fsdp.sharding import HOST, OffloadBuffers
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.ranks import RankGroup, WorkerPlacement
from skyasync.workers.roles import ROLES
from tests.workers.conftest import config_for, make_batch


class MovesToNewMemory(PolicyWorker):
    """Every move is to new memory; ``addresses`` are the addresses of parameters and optimizer state."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.to_host, self.host_addresses = False, dict[str, int]()

        def moved(
            buffers: OffloadBuffers, tensor: Tensor, device: torch.device, place: tuple[object, ...]
        ) -> Tensor:
            return buffers.on_host(tensor, place) if self.to_host else tensor.clone()

        OffloadBuffers.moved = moved  # type: ignore[method-assign]

    def offload(self) -> None:
        self.to_host = True
        super().offload()
        self.to_host = False

    def tensors(self) -> dict[str, Tensor]:
        for module in self.backend.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after a forward without gradient its root is gathered
        found = dict(self.backend.model.named_parameters())
        for name, parameter in self.backend.model.named_parameters():
            found |= {f"{name}.{k}": v for k, v in self.backend.optimizer.state[parameter].items()}
        return {name: _local(tensor).detach() for name, tensor in found.items()}

    def bits(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def round_trip(self) -> int:
        """The number of tensors that were moved, gradients dropped."""
        before = {name: tensor.data_ptr() for name, tensor in self.tensors().items()}
        self.offload()
        on_host = {name: tensor.data_ptr() for name, tensor in self.tensors().items()}
        assert on_host == {**on_host, **self.host_addresses}, "each offload goes to the same memory"
        self.host_addresses = on_host
        assert all(parameter.grad is None for parameter in self.backend.model.parameters())
        self.onload()
        back = {name: tensor.data_ptr() for name, tensor in self.tensors().items()}
        return sum(on_host[name] not in (before[name], back[name]) for name in before)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.fixture(params=["float32", "bfloat16"])
def cfg(
    request: pytest.FixtureRequest, model_path: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Config]:
    cfg = config_for(model_path)
    cfg.trainer.policy.model.dtype = request.param  # FSDP2 shards bfloat16, on one rank too
    monkeypatch.setattr(OffloadBuffers, "moved", OffloadBuffers.moved)  # restored afterwards
    return cfg


def started(cfg: Config) -> MovesToNewMemory:
    worker = MovesToNewMemory(cfg, threads=1)
    worker.setup()
    return worker


def batches() -> list[UpdateBatch]:
    return [make_batch(seed=seed) for seed in range(3)]


def test_bits_are_kept_and_updates_go_on_as_without(cfg: Config) -> None:
    stays, travels = started(cfg), started(cfg)
    travels.round_trip()  # before the first update there is no optimizer state
    for batch, other in zip(batches(), batches(), strict=True):
        assert travels.update_policy(other) == stays.update_policy(batch)
        before = travels.bits()
        assert travels.round_trip() > len(before) / 2
        assert all(torch.equal(tensor, before[name]) for name, tensor in travels.tensors().items())
        assert travels.score([[3, 4, 5]]) == stays.score([[3, 4, 5]])
        assert travels.round_trip() > len(before) / 2, (
            "also after log-probabilities, which leave FSDP2's root gathered"
        )
    for name, tensor in stays.tensors().items():
        assert torch.equal(travels.tensors()[name], tensor), name


def test_tied_weights_are_one_tensor_wherever_they_are(
    tied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OffloadBuffers, "moved", OffloadBuffers.moved)
    worker = started(config_for(tied_model))
    worker.offload()
    model = worker.backend.model.model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_checkpoint_can_be_saved_and_loaded_while_the_policy_is_away(
    cfg: Config, tmp_path
) -> None:
    worker = started(cfg)
    worker.update_policy(make_batch())
    worker.offload()
    saved = worker.bits()
    worker.save(str(tmp_path / "away"))
    worker.onload()
    worker.update_policy(make_batch(seed=1))
    worker.offload()
    worker.load(str(tmp_path / "away"))
    worker.onload()
    assert all(
        torch.equal(tensor, saved[name])
        for name, tensor in worker.tensors().items()
        if "step" not in name
    )


def test_from_a_gpu_every_offload_copies_into_pinned_memory_that_the_first_has_allocated() -> None:
    """With fake tensors, which may be on a GPU that the machine does not have."""
    allocated: list[tuple[bool, torch.Size]] = []

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            made = kwargs.get("device") == HOST or (
                func is torch.ops.aten._to_copy.default and result.device == HOST
            )
            if made and result.numel() > 1:
                allocated.append((bool(kwargs.get("pin_memory")), result.shape))
            return result

    cuda, buffers = torch.device("cuda"), OffloadBuffers()
    with FakeTensorMode():
        weights = [torch.zeros(size, device=cuda, requires_grad=True) for size in (3, 4, 4)]
        optimizer = torch.optim.AdamW(weights)
        for weight in weights:
            optimizer.state[weight] = {
                name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")
            }
        for offload in range(3):
            for device in (HOST, cuda):
                with Allocations():
                    weights = [
                        buffers.moved(weight, device, ("weight", i))
                        for i, weight in enumerate(weights)
                    ]
                    buffers.move_optimizer_state(optimizer, device)
                states = [value for state in optimizer.state.values() for value in state.values()]
                assert {tensor.device.type for tensor in (*weights, *states)} == {device.type}
            if not offload:
                assert len(allocated) == 3 + 6 and all(pinned for pinned, _ in allocated)
                allocated.clear()
    assert not allocated


def test_from_a_gpu_and_back_quantized_weights_are_moved_as_codes() -> None:
    cuda, buffers = torch.device("cuda"), OffloadBuffers()
    with FakeTensorMode():
        rows: Tensor = QuantizedRows(
            torch.zeros(4, 12, dtype=torch.uint8, device=cuda), ("int8", 8), (4, 8), torch.float32
        )
        for device in (HOST, cuda):
            rows = buffers.moved(rows, device, ("weight",))
            assert isinstance(rows, QuantizedRows) and rows.packed.shape == (4, 12)
            assert rows.device.type == rows.packed.device.type == device.type


@pytest.mark.parametrize(
    ("device", "colocated", "before", "after"),
    [
        ("cuda", False, {}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ("cuda", True, {}, {}),
        ("cuda", True, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, {}),
        ("cpu", False, {}, {}),
        (
            "cuda",
            False,
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"},
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"},
        ),
    ],
)
def test_a_gpus_segments_grow_unless_engines_read_them(
    model_path: str,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    colocated: bool,
    before: dict[str, str],
    after: dict[str, str],
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    cfg = config_for(model_path)
    cfg.trainer.placement.colocate_all = colocated
    monkeypatch.setattr(FSDPBackend, "_build", lambda backend: None)
    with pytest.raises(AttributeError):  # of the data that replaces the model
        PolicyWorker(cfg, device=device).setup()
    assert {
        name: value for name, value in os.environ.items() if name.endswith("ALLOC_CONF")
    } == after


@pytest.mark.matrix
@pytest.mark.slow
async def test_on_two_ranks_too(
    untied_model: str, bundles: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config_for(untied_model)
    cfg.trainer.policy.threads = 1
    where = WorkerPlacement(bundles, bundles=(0, 1), num_cpus=0.5)
    role = replace(ROLES["policy"], name="elsewhere", worker=f"{__name__}:MovesToNewMemory")
    monkeypatch.setitem(ROLES, "elsewhere", role)
    stays, travels = (RankGroup(role, where) for _ in range(2))
    try:
        await asyncio.gather(stays.start(cfg), travels.start(cfg))
        for seed in range(2):
            batch = UpdateBatch.concatenate([make_batch(seed=seed), make_batch(seed=seed + 9)])
            for ranks in (stays, travels):
                await ranks.on_rows("forward_backward", batch)
                await ranks.call("optimizer_step")
            assert min(await travels.call("round_trip")) > 10
        assert await travels.call("score", [[3, 4, 5, 6]]) == await stays.call(
            "score", [[3, 4, 5, 6]]
        )
    finally:
        stays.kill()
        travels.kill()

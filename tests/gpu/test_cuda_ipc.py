"""A policy's weights by CUDA IPC: another process reads every part on the same GPU, and the memory comes back."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from skyasync.config.schema import Config
from skyasync.weight_sync.tensors import sum_of
from skyasync.weight_sync.transfers import cuda_ipc
from skyasync.weight_sync.transfers.cuda_ipc import message, own_part
from tests.gpu.test_policy import worker_on
from tests.workers.conftest import make_batch

UPDATES = 3


def send(pipe: Connection, cfg: Config, dtype: str) -> None:
    """A policy's process, without the segments that other policies switch on: they cannot be exported."""
    cuda_ipc.PART_BYTES = 10_000
    worker = worker_on("cuda", cfg, dtype)
    for seed in range(UPDATES):
        worker.update_policy(make_batch(seed=seed))
        before = torch.cuda.memory_allocated()
        expected = {name: int(sum_of(tensor)) for name, tensor in worker._engine_weights()}
        worker.transfer_weights("cuda_ipc", "begin", [[0]])
        last = False
        while not last:
            part = own_part(message([worker.transfer_weights("cuda_ipc", "pack")]), 0)
            pipe.send(part)
            pipe.recv()  # it has been read
            last = part["last"]
        worker.transfer_weights("cuda_ipc", "end")
        pipe.send((expected, torch.cuda.memory_allocated() - before))
    pipe.recv()


def read(pipe: Connection) -> None:
    """An engine's process: sums of what arrives, opened as vLLM's worker does."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    while (part := pipe.recv()) is not None:
        handle, size = part["handle"], int(part["handle"]["size"])
        buffer = rebuild_cuda_tensor(
            torch.Tensor, (size,), (1,), 0, torch.storage.TypedStorage, torch.uint8, 0,
            bytes(handle["handle"]), size, int(handle["offset"]), False,
            bytes(handle["counter"]), int(handle["counter_offset"]), bytes(handle["event"]), bool(handle["wait"]),
        )  # fmt: skip
        found, end = {}, 0
        described = zip(
            part["names"], part["dtype_names"], part["shapes"], part["sizes"], strict=True
        )
        for name, dtype, shape, length in described:
            tensor = buffer[end : end + length].clone().view(getattr(torch, dtype)).view(shape)
            found[name], end = int(sum_of(tensor)), end + length
        torch.cuda.synchronize()
        del buffer
        pipe.send((found, str(torch.cuda.get_device_properties(0).uuid)))


def received(pipe: Connection) -> Any:
    assert pipe.poll(180), "no answer"
    return pipe.recv()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_process_reads_every_part(cfg: Config, dtype: str) -> None:
    cfg.trainer.placement.colocate_all = True
    processes = multiprocessing.get_context("spawn")
    (policy, its), (engine, theirs) = processes.Pipe(), processes.Pipe()
    both = [
        processes.Process(target=send, args=(its, cfg, dtype)),
        processes.Process(target=read, args=(theirs,)),
    ]
    for process in both:
        process.start()
    try:
        for _ in range(UPDATES):
            found: dict[str, int] = {}
            parts = 0
            while isinstance(part := received(policy), dict):
                engine.send(part)
                sums, gpu = received(engine)
                assert gpu == part["handle"]["gpu"] and list(sums.values()) == part["sums"]
                found |= sums
                parts += 1
                policy.send(None)
            expected, held = part
            assert found == expected and parts > 2
            assert held <= 0, "the buffer has been freed"
    finally:
        for process in both:
            process.kill()

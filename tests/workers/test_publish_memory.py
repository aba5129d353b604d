"""Ranks publish weights tensor by tensor: no rank has a second whole copy in its own memory.

Memory that a rank maps from files and shared memory does not count. The first calls use a model of a few kilobytes.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from skyasync.workers.policy import PolicyWorker
from tests.models.fsdp.test_loading_memory import ACCOUNT, NARROW, eight, llama, peak_growth
from tests.workers.conftest import config_for
from tests.workers.processes import Rank, Ranks

RANKS = 2
TINY = NARROW | {"num_hidden_layers": 1}


def leave(process: Rank, folder: str, ways: list[str]) -> dict[str, int]:
    """On each rank: the most memory that each transfer added."""
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=process.rank, world_size=RANKS)
    member = type("Member", (PolicyWorker,), {"_join": lambda self, host, port: None})  # has joined

    def worker(path: str) -> PolicyWorker:
        cfg = config_for(path)
        cfg.generator.backend, cfg.generator.weight_sync_dir = "vllm", folder
        if "adapter" in ways:
            cfg.trainer.policy.lora.rank, cfg.trainer.policy.lora.export = 2, "merged"
        found: PolicyWorker = member(cfg, process.rank, RANKS, threads=1)
        found.setup()
        return found

    def out(worker: PolicyWorker, way: str) -> None:
        if way == "export":
            worker.export(f"{folder}/exported")
        elif way == "shared_memory":
            worker.transfer_weights(way, "write")
        else:
            worker.transfer_weights("file", "write", way)

    tiny, large = worker(f"{folder}/tiny"), worker(f"{folder}/large")
    for way in ways:
        out(tiny, way)
    found = {}
    for way in ways:
        ctypes.CDLL(None).malloc_trim(
            0
        )  # the memory that the former transfer freed would hide as much of this one's
        found[way] = peak_growth(lambda way=way: out(large, way))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not ACCOUNT.exists(), reason="reads Linux's account of a process's memory")
@pytest.mark.parametrize(
    ("shape", "ways"),
    [
        (llama, ["full", "export", "delta"]),
        pytest.param(eight, ["full", "shared_memory", "export"], marks=pytest.mark.matrix),
        pytest.param(llama, ["adapter", "full"], marks=pytest.mark.matrix),
    ],
    ids=["llama", "eight experts", "adapters"],
)
def test_no_way_out_has_a_second_copy_of_the_weights(
    fork_socket: Path, shape, ways: list[str]
) -> None:
    with TemporaryDirectory() as folder:
        for name, made in (("tiny", shape(**TINY)), ("large", shape())):
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
            model.to_empty(device="cpu").save_pretrained(f"{folder}/{name}")
        ranks = Ranks(RANKS, fork_socket)
        held = ranks.call(leave, folder, ways)
        ranks.close()
    size = sum(p.numel() for p in model.parameters()) * 4
    shares = {way: round(max(rank[way] for rank in held) / size, 2) for way in ways}
    kept = {"delta": 1, "shared_memory": 1}  # the digests, and the memory that engines read
    assert all(share - kept.get(way, 0) < 0.8 for way, share in shares.items()), shares

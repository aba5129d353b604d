"""Four ranks hold a model about once in all while they load it, whatever its files must be joined to.

What a process holds is its own memory, not what it maps of files; each case has processes of its own, whose memory
nobody has used before. What a first load costs of any size (libraries, threads, groups) is not the model's: a model of
a few kilobytes is loaded first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from skyasync.workers.base import ModelWorker
from skyasync.workers.critic import CriticWorker
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.reference import ReferenceWorker
from tests.workers.conftest import config_for
from tests.workers.processes import Rank, Ranks

RANKS = 4
ACCOUNT = Path("/proc/self/status")

#: As in real models, no weight is a large part of the whole.
SHAPE = {"vocab_size": 2_000, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}


def llama(**changes: int) -> PreTrainedConfig:
    return LlamaConfig(**SHAPE | {"intermediate_size": 1_024, "num_hidden_layers": 16} | changes)


def mixture(experts: int, layers: int, **changes: int) -> PreTrainedConfig:
    own = {"num_experts": experts, "num_experts_per_tok": 1, "moe_intermediate_size": 512, "num_hidden_layers": layers}
    return Qwen3MoeConfig(**SHAPE | own | changes)


eight, three = partial(mixture, 8, 8), partial(mixture, 3, 20)
Shape = Callable[..., PreTrainedConfig]

#: The model, who loads it, and the ranks of its tensor axis.
CASES: dict[str, tuple[Shape, type[ModelWorker], int]] = {
    "llama": (llama, PolicyWorker, 1),
    "llama, tensor 2": (llama, PolicyWorker, 2),
    "eight experts": (eight, PolicyWorker, 1),
    "eight experts, critic": (eight, CriticWorker, 1),
    "eight experts, reference": (eight, ReferenceWorker, 1),
    "eight experts, tensor 2": (eight, PolicyWorker, 2),
    "three experts": (three, PolicyWorker, 1),
}


def load(process: Rank, folder: str, role: type[ModelWorker], tensor: int) -> int:
    """On each of the ranks: what it added to its memory at most."""
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=process.rank, world_size=RANKS)
    member = type("Member", (role,), {"_join": lambda self, host, port: None})  # has joined

    def worker(path: str) -> ModelWorker:
        cfg = config_for(path)
        cfg.trainer.policy.model.dtype = cfg.trainer.critic.model.dtype = "bfloat16"
        cfg.trainer.parallel.tensor = tensor
        found: ModelWorker = member(cfg, process.rank, RANKS, threads=1)
        return found

    worker(f"{folder}/tiny").setup()
    return peak_growth(worker(f"{folder}/large").setup)


def peak_growth(work: Callable[[], object]) -> int:
    """Most bytes of this process's own memory that ``work`` added at a time."""
    done = threading.Event()
    before = most = anonymous_bytes()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, anonymous_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    kept = work()
    done.set()
    watching.join()
    del kept
    return most - before


def anonymous_bytes() -> int:
    rows = (line.split() for line in ACCOUNT.read_text().splitlines())
    return sum(int(row[1]) * 1024 for row in rows if row[0] in ("RssAnon:", "RssShmem:"))


@pytest.mark.slow
@pytest.mark.skipif(not ACCOUNT.exists(), reason="reads Linux's account of a process's memory")
@pytest.mark.parametrize("case", list(CASES))
def test_four_ranks_hold_a_model_about_once_in_all_while_they_load_it(warm_processes: Path, case: str) -> None:
    shape, role, tensor = CASES[case]
    with TemporaryDirectory() as folder:  # on the disk: what is read from memory would count as held
        for name, made in (("tiny", shape(**TINY)), ("large", shape())):
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
            model.to_empty(device="cpu").save_pretrained(f"{folder}/{name}")
        ranks = Ranks(RANKS, warm_processes)
        held = ranks.call(load, folder, role, tensor)
        ranks.close()
    kept = torch.bfloat16 if role is ReferenceWorker else torch.float32
    size = sum(p.numel() for p in model.parameters()) * kept.itemsize
    found = ", ".join(f"{part / 1e6:.0f}" for part in held)
    assert sum(held) < 1.3 * size, f"{sum(held) / size:.2f} times the model's {size / 1e6:.0f} MB: {found}"

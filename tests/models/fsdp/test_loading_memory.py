"""Four ranks together need the memory of about one model to load it, whatever its files must be merged into.

Memory is a process's own, without mapped files; each case has new processes. A small part of the memory is independent
of the model's size (libraries, threads, groups; module and parameter objects, of which adapters take 0.3 MB per layer
and rank), so a model of the same depth and a few kilobytes is loaded first.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from skyasync.workers.critic import CriticWorker
from skyasync.workers.frozen import ReferenceWorker, RewardWorker
from skyasync.workers.model_worker import ModelWorker
from skyasync.workers.policy import PolicyWorker
from tests.workers.conftest import config_for
from tests.workers.processes import Rank, Ranks

RANKS = 4
ACCOUNT = Path("/proc/self/status")

#: As in real models, no weight is a large part of the whole.
SHAPE = {
    "vocab_size": 2_000,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
NARROW = {"vocab_size": 64, "hidden_size": 32, "head_dim": 8}


def llama(**changes: int) -> PreTrainedConfig:
    return LlamaConfig(
        **SHAPE
        | {"intermediate_size": 4 * changes.get("hidden_size", 256), "num_hidden_layers": 16}
        | changes
    )


def moe_config(experts: int, layers: int, **changes: int) -> PreTrainedConfig:
    inner = 2 * changes.get("hidden_size", 256)
    own = {
        "num_experts": experts,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": inner,
        "num_hidden_layers": layers,
    }
    return Qwen3MoeConfig(**SHAPE | own | changes)


eight, three = partial(moe_config, 8, 8), partial(moe_config, 3, 20)
Shape = Callable[..., PreTrainedConfig]


@dataclass(frozen=True)
class Case:
    """A model, the role that loads it, its settings, and the dtype of its weights."""

    shape: Shape
    role: type[ModelWorker] = PolicyWorker
    settings: dict[str, Any] = field(default_factory=dict)
    kept: torch.dtype = torch.float32


FROZEN = torch.bfloat16
ADAPTERS = {"trainer.policy.lora.rank": 4}

CASES = {
    "llama": Case(llama),
    "llama, tensor 2": Case(llama, settings={"trainer.parallel.tensor": 2}),
    "llama, adapters": Case(llama, settings=ADAPTERS, kept=FROZEN),
    "llama, nf4": Case(
        llama, settings=ADAPTERS | {"trainer.policy.lora.base_dtype": "nf4"}, kept=FROZEN
    ),
    "llama, int8": Case(
        llama, settings=ADAPTERS | {"trainer.policy.lora.base_dtype": "int8"}, kept=FROZEN
    ),
    "llama, reward model": Case(llama, RewardWorker, kept=FROZEN),
    "eight experts": Case(eight),
    "eight experts, critic": Case(eight, CriticWorker),
    "eight experts, reference": Case(eight, ReferenceWorker, kept=FROZEN),
    "eight experts, tensor 2": Case(eight, settings={"trainer.parallel.tensor": 2}),
    "three experts": Case(three),
}
QUICK = ["llama"]


def load(process: Rank, folder: str, case: Case) -> int:
    """On each rank: the most memory that loading added."""
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=process.rank, world_size=RANKS)

    def worker(path: str) -> ModelWorker:
        cfg = config_for(path)
        for role in (cfg.trainer.policy, cfg.trainer.critic, cfg.trainer.reward):
            role.model.path, role.model.dtype = path, "bfloat16"
        for key, value in case.settings.items():
            section, _, name = key.rpartition(".")
            setattr(attrgetter(section)(cfg), name, value)
        return case.role(cfg, process.rank, RANKS, threads=1)

    worker(f"{folder}/narrow").setup()
    gc.collect()
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
@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.matrix) for case in CASES],
)
def test_four_ranks_hold_a_model_about_once_in_all_while_they_load_it(
    fork_socket: Path, case: str
) -> None:
    shape, kept = CASES[case].shape, CASES[case].kept
    if case.endswith("nf4"):
        pytest.importorskip("bitsandbytes")
    saved = (
        AutoModelForSequenceClassification
        if CASES[case].role is RewardWorker
        else AutoModelForCausalLM
    )
    with (
        TemporaryDirectory() as folder
    ):  # on the disk: files in memory would count as the process's own
        for name, made in (("narrow", shape(**NARROW)), ("large", shape())):
            made.num_labels = 1
            with torch.device("meta"):
                model = saved.from_config(made, dtype=torch.bfloat16)
            model.to_empty(device="cpu").tie_weights()
            model.save_pretrained(f"{folder}/{name}")
        ranks = Ranks(RANKS, fork_socket)
        held = ranks.call(load, folder, CASES[case])
        ranks.close()
    size = sum(p.numel() for p in model.parameters()) * kept.itemsize
    found = ", ".join(f"{part / 1e6:.0f}" for part in held)
    assert sum(held) < 1.3 * size, (
        f"{sum(held) / size:.2f} times the model's {size / 1e6:.0f} MB: {found}"
    )

"""Tokens per second of a policy's update on one GPU, and its peak memory compared with the plan's.

    python -m benchmarks.gpu               # Qwen3 of 0.6B and 1.7B parameters with random weights, bfloat16
    python -m benchmarks.gpu --only 0.6B
    python -m benchmarks.gpu --toy         # a model of 60,000 parameters, also on a CPU

Needs torch and transformers, and neither Ray nor vLLM: the worker is called directly. Rows have
log-normal lengths, the longest eight times the mean. "packed" is the library's default, packed
sequences; "padded" is micro-batches whose rows are all as long as the longest. Every line is a
worker in a process of its own: a warm-up update, then the median of the rest. The share of the
card's peak counts 6 floating-point operations per parameter and token, and attention's;
recomputation by checkpointing is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

PEAKS = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "4090": 165e12,
}
"""Floating-point operations per second of dense bfloat16, by the makers' data sheets."""

QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "1.7B": {**QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
    "toy": {**QWEN3, "vocab_size": 400, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 16, "hidden_size": 32, "intermediate_size": 64},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    shape: str
    packed: bool
    checkpointing: bool
    rows: int
    mean: int
    micro_batch_tokens: int
    updates: int


@dataclass(frozen=True)
class Result:
    tokens: int
    seconds: float
    share: float
    peak: int
    planned: int


def cases(only: str, *, toy: bool) -> list[Case]:
    size = {"rows": 8, "mean": 16, "micro_batch_tokens": 256, "updates": 1}
    if not toy:
        size = {"rows": 128, "mean": 512, "micro_batch_tokens": 16384, "updates": 5}
    if toy:
        names = ["toy"]
    else:
        names = [name for name in ("0.6B", "1.7B") if name.startswith(only)]
    return [
        Case(name, packed, again, **size)
        for name, packed, again in product(names, (True, False), (False, True))
    ]


def measure(case: Case, folder: str) -> Result:
    """In a new process."""
    import torch

    from benchmarks.update_speed import ragged_batch
    from skyasync.workers.policy import PolicyWorker

    device = "cuda" if torch.cuda.is_available() else "cpu"
    cfg = config(case, folder)
    worker = PolicyWorker(cfg, device=device)
    worker.setup()
    backend: Any = worker.backend
    batch = ragged_batch(case.rows, case.mean)
    if not case.packed:
        backend.model.packs = False
        filled = batch.attention_mask.shape[1]
        cfg.trainer.micro_train_batch_size_per_gpu = max(1, case.micro_batch_tokens // filled)
    seconds = []
    for _ in range(case.updates + 1):
        began = time.perf_counter()
        worker.update_policy(batch)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    tokens = int(batch.attention_mask.sum())
    taken = statistics.median(seconds[1:])
    lengths = batch.attention_mask.sum(1).double()
    work = 6 * trained(backend.model) * tokens + attention(case, float(lengths.square().sum()))
    return Result(
        tokens, taken, work / taken / peak_of(device), resident(device), planned(cfg, device)
    )


def config(case: Case, folder: str) -> Any:
    from skyasync.config.schema import Config

    cfg = Config()
    cfg.trainer.policy.model.path = folder
    cfg.trainer.policy.model.dtype = "bfloat16"
    cfg.trainer.policy.gradient_checkpointing = case.checkpointing
    cfg.trainer.micro_batch_tokens = case.micro_batch_tokens
    cfg.trainer.train_batch_size = cfg.trainer.policy_mini_batch_size = case.rows
    cfg.generator.n_samples_per_prompt = 1
    cfg.trainer.max_prompt_length = case.mean
    cfg.generator.sampling_params.max_generate_length = 7 * case.mean
    return cfg


def trained(model: Any) -> int:
    """Parameters that a token passes through: tied embeddings once, as the head."""
    return sum(parameter.numel() for parameter in model.parameters())


def attention(case: Case, squares: float) -> float:
    """Of causal attention over rows whose lengths' squares sum up to ``squares``, forward and
    backward."""
    shape = SHAPES[case.shape]
    return (
        6 * shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"] * squares
    )


def peak_of(device: str) -> float:
    if device == "cpu":
        return float("nan")
    import torch

    name = torch.cuda.get_device_name()
    return next((peak for card, peak in PEAKS.items() if card in name), float("nan"))


def resident(device: str) -> int:
    """The most bytes that tensors had."""
    import torch

    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return 0


def planned(cfg: Any, device: str) -> int:
    from skyasync.planning.measure import measure as measure_rank
    from skyasync.workers.roles import POLICY, ROLES

    return sum(measure_rank(cfg, ROLES[POLICY], 1, gpus=device == "cuda").updating.values())


def make(shape: str, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**SHAPES[shape]), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="shapes whose names begin like this")
    parser.add_argument("--toy", action="store_true", help="a tiny shape and few tokens")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(asdict(measure(Case(**json.loads(arguments.one[0])), arguments.one[1]))))
        return
    print(
        f"{'shape':6} {'rows':7} {'checkpointing':13} {'tokens/s':>10} {'of peak':>8} {'peak GiB':>9} {'planned':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(arguments.only, toy=arguments.toy):
            path = Path(folder, case.shape)
            if not path.exists():
                make(case.shape, path)
            command = [
                sys.executable,
                "-m",
                "benchmarks.gpu",
                "--one",
                json.dumps(asdict(case)),
                str(path),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            how = f"{case.shape:6} {'packed' if case.packed else 'padded':7} {'on' if case.checkpointing else 'off':13}"
            if done.returncode:
                print(
                    how, done.stderr.strip().splitlines()[-1], flush=True
                )  # out of memory, for instance
                continue
            found = Result(**json.loads(done.stdout.splitlines()[-1]))
            print(
                f"{how} {found.tokens / found.seconds:10,.0f} {found.share:8.1%} {found.peak / 2**30:9.2f} "
                f"{found.planned / 2**30:8.2f}", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()

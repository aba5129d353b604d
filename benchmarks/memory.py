"""The memory plan, which allocates nothing, against the memory of a policy's ranks on CPUs.

    python -m benchmarks.memory                  # all shapes, one rank each, and two ranks
    python -m benchmarks.memory --only llama
    python -m benchmarks.memory --exact          # without the allocators' caches, which the plan does not model

Every line is a process of its own per rank that runs the library's own worker: load,
log-probabilities, publish, two optimizer steps of two micro-batches. A phase's peak is the kernel's
(VmHWM, reset before each phase) minus the base line: the memory of the same process after the same
calls with a toy model (interpreter, torch, transformers, caches).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

RESPONSE = 192
PROMPT = 64
MMAP_THRESHOLD = (
    -3
)  # of malloc.h: larger blocks are mapped from the kernel, and unmapped when they are freed
ROWS = 8
"""Rows of a rank's batch: every one is its own group, so that no prompt is shared and the widths
are known."""


@dataclass(frozen=True)
class Case:
    """A model's config.json, and how it is trained."""

    name: str
    model: dict[str, Any]
    ranks: int = 1
    dtype: str = "float32"
    checkpointing: bool = False
    micro_batch_tokens: int = 1024
    rows: int = field(default=ROWS)
    prompt: int = PROMPT
    response: int = RESPONSE
    lora: int = 0
    optimizer: str = "adamw"
    rounded: bool = False


LLAMA = {
    "model_type": "llama", "vocab_size": 16000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6,
    "num_attention_heads": 12, "num_key_value_heads": 4, "tie_word_embeddings": False, "max_position_embeddings": 2048,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 48000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "vocab_size": 32000, "hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 10,
    "num_attention_heads": 10, "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 2048,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 24000,
    "n_embd": 640,
    "n_layer": 8,
    "n_head": 10,
    "n_positions": 1024,
}
MOE = {
    "model_type": "qwen3_moe", "vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1024,
    "moe_intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4, "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}  # fmt: skip

TOY = Case("toy", LLAMA | {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1}, rows=2, micro_batch_tokens=256,
)  # fmt: skip

CASES = (
    Case("llama", LLAMA),
    Case("llama, checkpointing", LLAMA, checkpointing=True),
    Case("llama, bfloat16", LLAMA, dtype="bfloat16"),
    Case("llama, 8-bit moments", LLAMA, optimizer="adamw_8bit"),
    Case("llama, rounded by chance", LLAMA, dtype="bfloat16", rounded=True),
    Case("llama, both", LLAMA, dtype="bfloat16", rounded=True, optimizer="adamw_8bit"),
    Case("llama, muon", LLAMA, optimizer="muon"),
    Case("llama, two ranks", LLAMA, ranks=2),
    Case("llama, adapters", LLAMA, lora=16),
    Case("llama, adapters, bfloat16", LLAMA, lora=16, dtype="bfloat16"),
    Case("llama, adapters, two ranks", LLAMA, lora=16, ranks=2),
    Case("qwen3, tied", QWEN3),
    Case("qwen2, deep", QWEN2),
    Case("gpt2", GPT2),
    Case("qwen3_moe", MOE),
)


def measured(case: Case, *, exact: bool = False, python: str = sys.executable) -> dict[str, int]:
    """Peak bytes above the base line per phase, of the rank with the most.

    Args:
        exact: every tensor's memory goes back to the kernel with it. C's allocator keeps holes
            otherwise, which change the result of the same run by 10%.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = json.dumps(asdict(case))
        command = [python, "-m", "benchmarks.memory", *["--exact"] * exact, "--rank", told, folder]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
            for rank in range(case.ranks)
        ]
        answers = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    return {phase: max(answer[phase] for answer in answers) for phase in answers[0]}


def run_rank(case: Case, folder: str, rank: int, *, exact: bool) -> dict[str, int]:
    """In a new process: this rank's peaks."""
    from skyasync.models.fsdp import backend
    from skyasync.workers.policy import PolicyWorker

    if exact:
        backend.keep_freed = lambda: None
        ctypes.CDLL("libc.so.6").mallopt(MMAP_THRESHOLD, 1 << 16)
    peaks: dict[str, int] = {}
    if rank == 0:
        _make(case, folder)
    else:
        _wait_for(Path(folder, "made"))
    toy = replace(
        TOY, lora=case.lora, dtype=case.dtype, optimizer=case.optimizer, rounded=case.rounded
    )
    _phases(PolicyWorker(_config(toy, f"{folder}/toy"), 0, 1, "cpu", 1), toy, {}, "", 0)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    base = _resident("VmRSS")
    worker = PolicyWorker(_config(case, f"{folder}/model"), rank, case.ranks, "cpu", 1)
    _phases(worker, case, peaks, folder, rank)
    return {phase: peak - base for phase, peak in peaks.items()}


def _phases(worker: Any, case: Case, peaks: dict[str, int], folder: str, rank: int) -> None:
    batch = _batch(case)

    def phase(name: str, work: Any) -> Any:
        Path("/proc/self/clear_refs").write_text("5")
        result = work()
        peaks[name] = _resident("VmHWM")
        return result

    port = Path(folder, "port")
    if worker.world_size == 1:
        phase("load", worker.setup)
    elif rank == 0:
        temporary = port.with_suffix(".writing")
        temporary.write_text(str(worker.open_rendezvous("127.0.0.1")))
        temporary.rename(port)
        phase("load", lambda: worker.setup("127.0.0.1", int(port.read_text())))
    else:
        _wait_for(port)
        phase("load", lambda: worker.setup("127.0.0.1", int(port.read_text())))
    # Weights are mapped, and a row of the embeddings that no token uses would never be read.
    phase("held", lambda: [weight.sum() for weight in worker.backend.model.parameters()])
    phase("log-probabilities", lambda: worker.logprobs(batch))
    written = phase("publish", lambda: worker.transfer_weights("file", "write"))
    if written:
        worker.transfer_weights("file", "remove", written[0])
    phase("first update", lambda: worker.update_policy(batch))
    phase("update", lambda: worker.update_policy(batch))


def _batch(case: Case) -> Any:
    import torch

    from skyasync.models.batch import UpdateBatch

    length = case.prompt + case.response
    shape = (case.rows, length)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    loss_mask[:, case.prompt :] = True
    return UpdateBatch(
        tokens=torch.randint(0, 64, shape),
        attention_mask=torch.ones(shape, dtype=torch.bool),
        loss_mask=loss_mask,
        group_ids=torch.arange(case.rows),
        behaviour_logprobs=torch.full(shape, -6.0) * loss_mask,
        versions=torch.where(loss_mask, 0, -1),
        truncated=torch.zeros(case.rows, dtype=torch.bool),
        rewards=torch.zeros(shape),
        advantages=torch.randn(shape) * loss_mask,
        loss_weights=loss_mask / loss_mask.sum(),
        proximal_logprobs=torch.full(shape, -6.0) * loss_mask,
    )


def _config(case: Case, path: str) -> Any:
    from skyasync.config.schema import Config

    cfg = Config()
    cfg.trainer.policy.model.path = path
    cfg.trainer.policy.model.dtype = case.dtype
    cfg.trainer.policy.gradient_checkpointing = case.checkpointing
    cfg.trainer.policy.lora.rank = case.lora
    cfg.trainer.policy.optimizer_config.name = case.optimizer
    cfg.trainer.policy.optimizer_config.bf16_stochastic_round = case.rounded
    cfg.trainer.micro_batch_tokens = case.micro_batch_tokens
    cfg.trainer.placement.policy_num_gpus_per_node = case.ranks
    cfg.trainer.max_prompt_length = case.prompt
    cfg.generator.sampling_params.max_generate_length = case.response
    cfg.generator.n_samples_per_prompt = 2
    cfg.trainer.train_batch_size = case.rows * case.ranks // 2
    return cfg


def _make(case: Case, folder: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, settings in (("model", case.model), ("toy", TOY.model)):
        config = AutoConfig.for_model(**settings)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
            f"{folder}/{name}"
        )
    Path(folder, "made").touch()


def _wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.05)


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def estimated(case: Case) -> dict[str, int]:
    """The plan's bytes of the same phases; before the first optimizer step there are no moments."""
    from transformers import AutoConfig

    from skyasync.models.rank_memory import OPTIMIZER_STATE
    from skyasync.planning.measure import measure
    from skyasync.workers.roles import POLICY, ROLES

    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(**case.model).save_pretrained(folder)
        use = measure(_config(case, folder), ROLES[POLICY], case.ranks, gpus=False)
    early = {"log-probabilities": use.scoring, "publish": use.publishing}
    before_step = {
        name: sum(lines.values()) - lines[OPTIMIZER_STATE] for name, lines in early.items()
    }
    return before_step | {"update": sum(use.updating.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose names begin like this")
    parser.add_argument("--exact", action="store_true", help="without what allocators keep")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        case, folder, rank = arguments.rank
        print(
            json.dumps(run_rank(Case(**json.loads(case)), folder, int(rank), exact=arguments.exact))
        )
        return
    print(f"{'case':24} {'phase':18} {'planned MiB':>12} {'measured MiB':>13} {'ratio':>6}")
    for case in (case for case in CASES if case.name.startswith(arguments.only)):
        found = measured(case, exact=arguments.exact)
        for phase, size in estimated(case).items():
            there = found[phase]
            print(
                f"{case.name:24} {phase:18} {size >> 20:12} {there >> 20:13} {size / there:6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Speed and memory of an update whose ranks divide rows, columns, matrices or experts
(``trainer.parallel``).

    OMP_NUM_THREADS=1 python -m benchmarks.parallelism [--only mixture] [--updates 3] [--toy]

Every line is the same model, batch and library, on 1, 2 or 4 ranks: processes of one thread each,
over gloo.

- CPU s: CPU seconds of an update, the mean over ranks (of medians): less than one rank's if work is
  divided. Waiting for other ranks is not counted, so it estimates ranks with a core each that never
  wait.
- s: wall-clock seconds, which depend on this machine's cores and its other load.
- MiB: peak of resident memory of the fullest rank in an update, minus that of a toy model.
- norm: of the gradient, which is the same however it is divided.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.memory import _resident, _wait_for

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 8000, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False, "max_position_embeddings": 2048,
}  # fmt: skip
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 8000, "hidden_size": 256, "intermediate_size": 512, "head_dim": 32,
    "moe_intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "num_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False, "max_position_embeddings": 2048,
}  # fmt: skip
TOY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
}


@dataclass(frozen=True)
class Case:
    """How a model is divided; the data dimension has the remaining ranks."""

    name: str
    model: dict[str, Any]
    ranks: int = 1
    context: int = 1
    tensor: int = 1
    kind: str = "ulysses"
    rows: int = 8
    mean: int = 128
    updates: int = 3

    @property
    def mesh(self) -> str:
        """In words; experts are divided among the ranks of the tensor dimension."""
        sizes = {
            "data": self.ranks // self.context // self.tensor,
            "context": self.context,
            "tensor": self.tensor,
        }
        if "num_experts" in self.model:
            sizes["expert"] = self.tensor
        words = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
        if words:
            return ", ".join(words) + (", ring" if self.kind == "ring" else "")
        return "one rank"


@dataclass(frozen=True)
class Result:
    cpu: float
    seconds: float
    peak: int
    norm: float


def cases(*, toy: bool, updates: int) -> Iterator[Case]:
    size: dict[str, Any] = {"rows": 4, "mean": 16} if toy else {}
    for name, model in (("llama", LLAMA), ("mixture", MOE)):
        shape = model | TOY if toy else model
        one = Case(name, shape, updates=updates, **size)
        yield from (
            one,
            replace(one, ranks=2),
            replace(one, ranks=2, context=2),
            replace(one, ranks=2, tensor=2),
        )
        if name == "llama":
            yield replace(one, ranks=2, context=2, kind="ring")
        yield from (
            replace(one, ranks=4),
            replace(one, ranks=4, context=2),
            replace(one, ranks=4, tensor=2),
        )
        yield from (replace(one, ranks=4, context=2, tensor=2), replace(one, ranks=4, tensor=4))


def measured(case: Case, folder: str) -> Result:
    """Of all ranks, which are forks of this process."""
    forks = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as meeting:
        pipes = []
        ranks = []
        for rank in range(case.ranks):
            mine, theirs = forks.Pipe()
            pipes.append(mine)
            ranks.append(
                forks.Process(target=_tell, args=(theirs, case, folder, meeting, rank), daemon=True)
            )
            ranks[-1].start()
            theirs.close()  # so that a failed rank closes its pipe
        found = [pipe.recv() for pipe in pipes]
        for process in ranks:
            process.join()
    return Result(
        statistics.fmean(each.cpu for each in found), max(each.seconds for each in found),
        max(each.peak for each in found), found[0].norm,
    )  # fmt: skip


def _tell(pipe: Connection, case: Case, folder: str, meeting: str, rank: int) -> None:
    pipe.send(of_rank(case, folder, meeting, rank))


def of_rank(case: Case, folder: str, meeting: str, rank: int) -> Result:
    """The figures of one rank, in a process of its own."""
    import torch

    from skyasync.workers.policy import PolicyWorker

    torch.set_num_threads(1)
    toy = replace(
        case, model=case.model | TOY, ranks=1, context=1, tensor=1, kind="ulysses", rows=2, mean=16
    )
    first = PolicyWorker(config(toy, f"{folder}/toy"), 0, 1, "cpu", 1)
    first.setup()
    first.update_policy(rows_of(toy, first))
    del first
    gc.collect()
    base = _resident("VmRSS")
    worker = PolicyWorker(config(case, f"{folder}/{case.name}"), rank, case.ranks, "cpu", 1)
    _set_up(worker, Path(meeting, "port"))
    batch = rows_of(case, worker)
    worker.update_policy(batch)
    Path("/proc/self/clear_refs").write_text("5")
    cpu = []
    clock = []
    for _ in range(case.updates):
        began = time.process_time(), time.perf_counter()
        told = worker.update_policy(batch)
        cpu.append(time.process_time() - began[0])
        clock.append(time.perf_counter() - began[1])
    return Result(
        statistics.median(cpu),
        statistics.median(clock),
        _resident("VmHWM") - base,
        told["grad_norm"],
    )


def _set_up(worker: Any, port: Path) -> None:
    if worker.world_size == 1:
        worker.setup()
        return
    if worker.rank == 0:
        port.with_suffix(".writing").write_text(str(worker.open_rendezvous("127.0.0.1")))
        port.with_suffix(".writing").rename(port)
    _wait_for(port)
    worker.setup("127.0.0.1", int(port.read_text()))


def rows_of(case: Case, worker: Any) -> Any:
    """This rank's rows of a batch; the longest row has twice the mean length."""
    from benchmarks.update_speed import ragged_batch
    from skyasync.workers.ranks import split_for_ranks

    batch = ragged_batch(case.rows, case.mean, longest=2)
    batch.tokens %= case.model["vocab_size"]
    mesh = worker.backend.spec.mesh_shape
    return batch.select(split_for_ranks(batch, mesh.data)[mesh.data_rank(worker.rank)]).trim()


def config(case: Case, path: str) -> Any:
    from skyasync.config.schema import Config

    cfg = Config()
    cfg.trainer.policy.model.path = path
    cfg.trainer.policy.optimizer_config.lr = 0.0  # every update has the same gradient
    cfg.trainer.placement.policy_num_gpus_per_node = case.ranks
    cfg.trainer.micro_batch_tokens = 512
    parallel = cfg.trainer.parallel
    parallel.context = case.context
    parallel.tensor = case.tensor
    parallel.context_kind = case.kind
    return cfg


def make(case: Case, folder: str) -> None:
    """Create the models, with random weights, in another process: the parent of forks must not
    compute anything."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    for name, model in ((case.name, case.model), ("toy", case.model | TOY)):
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**model)).save_pretrained(
            f"{folder}/{name}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="models whose names begin like this")
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--toy", action="store_true", help="tiny models and few tokens")
    arguments = parser.parse_args()
    from skyasync.workers import policy  # noqa: F401  # once, for all ranks

    print(
        "| model | ranks | mesh | CPU s | of one rank's | s | MiB | of one rank's | norm |\n|---"
        + "|---" * 8
        + "|"
    )
    one: Result | None = None
    for case in cases(toy=arguments.toy, updates=arguments.updates):
        if not case.name.startswith(arguments.only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            maker = multiprocessing.get_context("fork").Process(target=make, args=(case, folder))
            maker.start()
            maker.join()
            found = measured(case, folder)
        one = found if case.ranks == 1 or one is None else one
        print(
            f"| {case.name} | {case.ranks} | {case.mesh} | {found.cpu:.2f} | {found.cpu / one.cpu:.2f} "
            f"| {found.seconds:.1f} | {found.peak >> 20} | {found.peak / one.peak:.2f} | {found.norm:.6f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

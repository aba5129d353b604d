"""The cost of a weight sync on this machine, part by part, relative to one plain copy of the
weights.

    OMP_NUM_THREADS=1 uv run -m benchmarks.weight_sync [--model FOLDER] [--dtype float32]
    [--backends transformers vllm]
        [--engines 1 2] [--ways memory file]

Policy and engines with one thread each; medians of some syncs, in milliseconds:

- memcpy: one copy of the weights from memory to memory, the unit of the rest;
- reload: vLLM's own, of tensors in the memory of its worker, in all engines at the same time:
  nothing is read, and nothing verified;
- publish: the trainer gathers, converts, digests and writes them;
- update: the engines read them, load them and verify them (if the embedded engine computes on the
  trainer's buffer, the trainer reads it again meanwhile, in sync);
- sync: both, as a run does them: the wait of a step; and the CPU time of this process, and of those
  of the engines, meanwhile, which other programs on the machine change less (as do the columns with
  ", CPU");
- over, over CPU: the time of a sync beyond vLLM's own reload, in memcpys per engine; the same of
  CPU time;

and of that sync, in CPU time of all engines together:

- own: vLLM's own functions; asking: comparing each layer's weights; digests: of bytes that it read;
- write, prove: the trainer's copy and its digests, and its second digests of the buffer, both once
  for all engines;
- parts: all but vLLM's own, in memcpys per engine: the rest is messages, and processes that wait;

- digest: one of all weights;
- probe: the comparison of log-probabilities, in the first two syncs and every
  ``generator.verify_interval``-th.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import product
from statistics import median
from typing import Any

import psutil
import torch

from benchmarks.vllm_reload import counted, hold, in_workers, reload, spent, watch
from skyasync.config.schema import Config
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import ENGINES, EngineConfig
from skyasync.weight_sync.sync import WeightSync
from skyasync.weight_sync.tensors import digests_of
from skyasync.weight_sync.transfers.file import directories, remove_weights, write_weights
from skyasync.weight_sync.verify.log_probabilities import BFLOAT16, FLOAT32
from skyasync.workers.dispatch import LocalDispatch

PROBE = [list(range(1 + i, 52 + i)) for i in range(5)]
COLUMNS = (
    "memcpy", "reload", "publish", "update", "sync", "over",
    "memcpy, CPU", "reload, CPU", "sync, CPU", "over, CPU",
    "own", "asking", "digests", "write", "prove", "parts", "digest", "probe",
)  # fmt: skip


async def timed(call: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    """Milliseconds, and the answer."""
    start = time.perf_counter()
    answer = await call()
    return 1000 * (time.perf_counter() - start), answer


class Bench:
    """A policy and some engines of one model.

    Args:
        folder: weights are sent by a file in it, as to remote engines; empty: by shared memory.
    """

    def __init__(self, backend: str, engines: int, path: str, dtype: str, folder: str) -> None:
        cfg = Config()
        cfg.generator.weight_sync_dir = folder
        cfg.trainer.policy.model.path = path
        cfg.trainer.policy.model.dtype = dtype
        cfg.trainer.policy.threads = 1
        cfg.generator.backend = backend
        self.dispatch = LocalDispatch(cfg)
        config = EngineConfig(
            path, dtype=dtype, threads=1, max_model_len=512, max_num_seqs=64, kv_cache_gb=0.5
        )
        self.client = InferenceClient([ENGINES[backend](config) for _ in range(engines)])
        self.sync = WeightSync(
            self.dispatch, self.client, PROBE, rounding=FLOAT32 if dtype == "float32" else BFLOAT16
        )
        self.sync.expects_late_engines = (
            True  # as in a run that replaces failed engines, which is the default
        )
        model = self.dispatch._policy.backend.model.model
        self.weights = {
            name: p.detach().to(getattr(torch, dtype)) for name, p in model.named_parameters()
        }
        self.copies = [torch.zeros_like(tensor) for tensor in self.weights.values()]
        self.reloads = backend == "vllm"
        self.spent: Counter[str] = Counter()

    async def row(self, version: int) -> dict[str, float]:
        sync = self.sync
        row = {}
        used = time.process_time()
        row["memcpy"], _ = await timed(self.copy)
        row["memcpy, CPU"] = 1000 * (time.process_time() - used)
        row["digest"], _ = await timed(self.digest)
        row["reload"], row["reload, CPU"] = await self.reload() if self.reloads else (0.0, 0.0)
        row["publish"], update = await timed(lambda: sync.source.transfer.publish(version))
        row["update"], _ = await timed(lambda: sync.destination.update_weights(update))
        await sync.source.transfer.release(update)
        await self.parts()
        used = cpu_seconds()
        row["sync"], _ = await timed(lambda: sync.sync(version))
        row["sync, CPU"] = 1000 * (cpu_seconds() - used)
        row |= await self.parts()
        ours = row["asking"] + row["digests"] + row["write"] + row["prove"]
        row["parts"] = ours / row["memcpy, CPU"] / len(self.client.engines)
        for what in ("", ", CPU"):
            beyond = row["sync" + what] - row["reload" + what]
            row["over" + what] = beyond / row["memcpy" + what] / len(self.client.engines)
        row["probe"], _ = await timed(lambda: sync.verify(version))
        return row

    async def start(self) -> None:
        await self.client.start()
        writer: Any = self.dispatch._policy.weight_sender.shared_memory.writer
        for name in ("write", "prove"):
            setattr(writer, name, counted(self.spent, name, getattr(writer, name)))
        if self.reloads:
            await in_workers(self.client.engines, watch)

    async def parts(self) -> dict[str, float]:
        """CPU milliseconds by kind since the last call, of all engines together."""
        kinds = ("own", "asking", "digests", "write", "prove")
        if self.reloads:
            engines = await in_workers(self.client.engines, spent)
        else:
            engines = []
        own = {kind: 1000 * self.spent.pop(kind, 0.0) for kind in kinds}
        return {
            kind: own[kind] + sum(engine.get(kind, 0.0) for engine in engines) for kind in kinds
        }

    async def copy(self) -> None:
        for into, tensor in zip(self.copies, self.weights.values(), strict=True):
            into.copy_(tensor)

    async def digest(self) -> None:
        digests_of(self.weights)

    async def reload(self) -> tuple[float, float]:
        path = write_weights({name: tensor.contiguous() for name, tensor in self.weights.items()})
        try:
            await in_workers(self.client.engines, hold, path)
        finally:
            remove_weights(path)
        used = cpu_seconds()
        took, _ = await timed(lambda: in_workers(self.client.engines, reload))
        return took, 1000 * (cpu_seconds() - used)


def cpu_seconds() -> float:
    """Of this process and of all its descendants."""
    used = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            used += sum(process.cpu_times()[:2])
    return used


async def measure(
    backend: str, engines: int, way: str, options: argparse.Namespace
) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory(dir=directories()[0]) as folder:
        bench = Bench(
            backend, engines, options.model, options.dtype, folder if way == "file" else ""
        )
        await bench.start()
        try:
            return [await bench.row(version) for version in range(1, options.syncs + 1)][1:]
        finally:
            await bench.client.shutdown()
            await bench.dispatch.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a Hugging Face folder; without it, SmolLM2 from the cache")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--backends", nargs="+", default=["transformers", "vllm"])
    parser.add_argument("--engines", nargs="+", type=int, default=[1], help="of each kind; in turn")
    parser.add_argument("--ways", nargs="+", default=["memory"], choices=("memory", "file"))
    parser.add_argument("--syncs", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # ``reload`` runs in its workers
    from examples.smollm2.model import build

    options.model = options.model or build()
    print(f"| engines, {options.dtype} | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}")
    for backend, engines, way in product(options.backends, options.engines, options.ways):
        rows = asyncio.run(measure(backend, engines, way, options))
        cells = [
            f"{median(r[c] for r in rows):.{1 if c.startswith(('over', 'parts')) else 0}f}"
            for c in COLUMNS
        ]
        print(f"| {engines} x {backend}, by {way} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

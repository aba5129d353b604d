"""Pause of engines by in-flight weight updates, and a check that no request is lost.

    OMP_NUM_THREADS=1 uv run -m benchmarks.update_stall [--backends transformers vllm] [--hidden
    256] [--swaps 5]

A Llama of 6 layers, 64 requests of 200 tokens in flight, a weight update every 30 tokens, one
thread. Weights are sent as in a run: published into memory that the engine has mapped, while it
computes; then it is paused. The buffer is verified before the pause if the engine computes on it,
otherwise while it loads. Per engine:

- load: ``update_weights`` on the idle engine, the minimum of an update;
- stall: for updates that keep the cache, by how much the gap between two tokens is longer than
  usual;
- keep: from ``pause`` to the return of ``resume`` of these updates, including the rest of the
  current decode step;
- recompute: from ``cut`` to the return of ``resume``; the requests then continue from their tokens;
- load and stall, CPU: of this process, which has the whole embedded engine; other load changes it
  little. With vLLM it is the cost of messages alone.

Every request must come back whole: all its tokens, each with a version, in rising order.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from torch import Tensor

from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import (
    ENGINES,
    EngineConfig,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
)
from skyasync.weight_sync.transfers.shared_memory import BufferWriter
from skyasync.weight_sync.update import WeightUpdate

REQUESTS = 64
TOKENS = 200
TOKENS_PER_UPDATE = 30  # of every request


class Moment(NamedTuple):
    """Wall-clock seconds, and CPU seconds."""

    clock: float
    used: float

    @classmethod
    def now(cls) -> Moment:
        return cls(time.perf_counter(), time.process_time())

    def since(self, earlier: Moment) -> Moment:
        return Moment(self.clock - earlier.clock, self.used - earlier.used)


def make_model(folder: str, hidden: int) -> dict[str, Tensor]:
    """Its weights."""
    from transformers import AutoModelForCausalLM

    from examples.tiny.model import build

    build(
        out=folder,
        progress=False,
        steps=1,
        tied=False,
        layers=6,
        hidden=hidden,
        intermediate=3 * hidden,
    )
    return {
        name: weight.detach()
        for name, weight in AutoModelForCausalLM.from_pretrained(folder).named_parameters()
    }


class Bench:
    def __init__(self, backend: str, folder: str, weights: dict[str, Tensor], swaps: int) -> None:
        config = EngineConfig(
            folder, threads=1, max_model_len=512, max_num_seqs=REQUESTS, kv_cache_gb=2.0
        )
        self.engine: Any = ENGINES[backend](config)
        self.client = InferenceClient([self.engine])
        self.weights = weights
        self.swaps = swaps
        self.version = 0
        self.specs = {name: (weight.dtype, tuple(weight.shape)) for name, weight in weights.items()}
        self.computed_on = ENGINES.about(backend).can["computes_on_mapped_weights"]
        self.writer = BufferWriter(two_buffers=self.computed_on)

    async def publish(self) -> WeightUpdate:
        self.version += 1
        info = await asyncio.to_thread(self.writer.write, self.specs, self.weights.items())
        if self.computed_on:
            await asyncio.to_thread(self.writer.prove)
        return WeightUpdate(self.version, "shared_memory", info)

    async def take(self, update: WeightUpdate) -> None:
        if self.computed_on:
            proving = []
        else:
            proving = [asyncio.to_thread(self.writer.prove)]
        await asyncio.gather(self.client.update_weights(update), *proving)
        self.writer.release(update.info["path"])

    async def load(self) -> Moment:
        update = await self.publish()
        start = Moment.now()
        await self.take(update)
        return Moment.now().since(start)

    async def stalls(self, stop: Callable[[], Awaitable[None]]) -> list[tuple[float, float]]:
        """When each update began and ended; ``stop`` is the call before the weights."""
        before = (await self.client.stats())[0].generated_tokens
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        first = self.version
        requests = [
            GenerationRequest(f"r{first}-{i}", [1 + i, 2, 3], sampling) for i in range(REQUESTS - 1)
        ]
        tasks = [asyncio.create_task(self.client.generate(request)) for request in requests]
        found = []
        for update in range(1, self.swaps + 1):
            while (await self.client.stats())[  # noqa: ASYNC110
                0
            ].generated_tokens < before + update * TOKENS_PER_UPDATE * REQUESTS:
                await asyncio.sleep(0.005)
            update = await self.publish()
            start = time.perf_counter()
            await stop()
            await self.take(update)
            await self.client.resume()
            found.append((start, time.perf_counter()))
        for answer in await asyncio.gather(*tasks):
            assert_whole(answer)
        return found

    async def silences(self) -> tuple[list[float], list[Moment]]:
        """For updates that keep the cache: seconds of each, and how long the engine reported no
        token."""
        at: list[Moment] = []

        async def listen() -> None:
            request = GenerationRequest(
                f"s{self.version}", [1, 2, 3], SamplingParams(max_tokens=TOKENS, ignore_eos=True)
            )
            answering = asyncio.create_task(self.client.generate(request))
            while not answering.done():
                if await self.engine.progress():
                    at.append(Moment.now())

        listening = asyncio.create_task(listen())
        swaps = await self.stalls(lambda: self.client.pause("keep"))
        await listening
        gaps = [later.since(earlier) for earlier, later in pairwise(at)]
        usual = Moment(*(median(values) for values in zip(*gaps, strict=True)))
        across = [_across(at, gaps, update) for update in swaps]
        return [end - start for start, end in swaps], [
            gap.since(usual) for gap in across if gap is not None
        ]


def _across(at: list[Moment], gaps: list[Moment], update: tuple[float, float]) -> Moment | None:
    """The longest gap between two tokens around an update; None after the last token."""
    met = [
        gap
        for (a, b), gap in zip(pairwise(at), gaps, strict=True)
        if a.clock < update[1] and b.clock > update[0]
    ]
    return max(met, default=None)


def assert_whole(answer: GenerationOutput) -> None:
    assert len(answer.token_ids) == len(answer.logprobs) == len(answer.versions) == TOKENS, (
        "tokens are lost"
    )
    assert (answer.versions[1:] >= answer.versions[:-1]).all()
    assert len(set(answer.versions)) > 1, "no update fell into this request"


async def measure(backend: str, folder: str, weights: dict[str, Tensor], swaps: int) -> str:
    bench = Bench(backend, folder, weights, swaps)
    await bench.client.start()
    try:
        loads = [await bench.load() for _ in range(3 + swaps)][3:]  # the first ones map the memory
        keep, stalls = await bench.silences()
        recompute = [end - start for start, end in await bench.stalls(bench.client.cut)]
    finally:
        await bench.client.shutdown()
    load, load_used = (median(values) for values in zip(*loads, strict=True))
    stall, stall_used = zip(*stalls, strict=True)
    cells = [
        f"{1000 * median(t):.1f} ms ({median(t) / load:.2f})" for t in (stall, keep, recompute)
    ]
    cells += [
        f"{max(stall) / load:.2f}",
        f"{1000 * load_used:.1f} ms",
        f"{1000 * median(stall_used):.1f} ms",
    ]
    return f"| {backend} | {1000 * load:.1f} ms | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", nargs="+", default=["transformers", "vllm"])
    parser.add_argument(
        "--hidden", type=int, default=256, help="size of the hidden state, a multiple of 64"
    )
    parser.add_argument("--swaps", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = f"{folder}/model"
        weights = make_model(folder, options.hidden)
        lines = [
            asyncio.run(measure(backend, folder, weights, options.swaps))
            for backend in options.backends
        ]
    parameters = sum(weight.numel() for weight in weights.values())
    print(
        f"{parameters / 1e6:.1f} million parameters; medians, in brackets as multiples of the load"
    )
    print(
        "| engine | load | stall | keep | recompute | longest stall, in loads | load, CPU | stall, CPU |"
    )
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

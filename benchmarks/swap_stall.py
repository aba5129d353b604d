"""How long engines stand still while weights are swapped under requests in flight, and whether any is lost.

    OMP_NUM_THREADS=1 uv run -m benchmarks.swap_stall [--backends transformers vllm] [--hidden 256] [--swaps 5]

A Llama of 6 layers, 64 requests of 200 tokens in flight, a swap every 30 tokens, one thread. Per engine:

- load: ``update_weights`` on the idle engine, the least that a swap can take;
- stall: for swaps that keep the cache, how much longer than usual one streamed request waits for its next token;
- keep: from ``pause`` to the return of ``resume`` of these swaps, the rest of the decode step under way included;
- recompute: from ``cut`` to the return of ``resume``; the requests are then continued from their tokens.

Every request must come back whole: all its tokens, each with a version, the versions rising.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from statistics import median
from typing import Any

from skyasync.engines.client import InferenceClient
from skyasync.engines.protocol import ENGINES, EngineConfig, GenerationOutput, GenerationRequest, SamplingParams
from skyasync.weight_sync.shared_memory import remove_weights, write_weights
from skyasync.weight_sync.update import WeightUpdate

REQUESTS = 64
TOKENS = 200
TOKENS_PER_SWAP = 30  # of every request


def make_model(folder: str, hidden: int) -> tuple[int, str]:
    """Its parameters, and the path of its weights as a trainer publishes them."""
    from transformers import AutoModelForCausalLM

    from examples.tiny.model import build

    build(out=folder, progress=False, steps=1, tied=False, layers=6, hidden=hidden, intermediate=3 * hidden)
    weights = {
        name: weight.detach() for name, weight in AutoModelForCausalLM.from_pretrained(folder).named_parameters()
    }
    return sum(weight.numel() for weight in weights.values()), write_weights(weights)


class Bench:
    def __init__(self, backend: str, folder: str, path: str, swaps: int) -> None:
        config = EngineConfig(folder, threads=1, max_model_len=512, max_num_seqs=REQUESTS, kv_cache_gb=2.0)
        self.engine: Any = ENGINES[backend](config)
        self.client = InferenceClient([self.engine])
        self.path, self.swaps, self.version = path, swaps, 0

    async def load(self) -> float:
        start = time.perf_counter()
        self.version += 1
        await self.client.update_weights(WeightUpdate(self.version, "shared_memory", {"path": self.path}))
        return time.perf_counter() - start

    async def stalls(self, stop: Callable[[], Awaitable[None]]) -> list[float]:
        """Seconds of each swap; ``stop`` is what comes before the weights."""
        before = (await self.client.stats())[0].generated_tokens
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        first = self.version
        requests = [GenerationRequest(f"r{first}-{i}", [1 + i, 2, 3], sampling) for i in range(REQUESTS - 1)]
        tasks = [asyncio.create_task(self.client.generate(request)) for request in requests]
        found = []
        for swap in range(1, self.swaps + 1):
            while (await self.client.stats())[0].generated_tokens < before + swap * TOKENS_PER_SWAP * REQUESTS:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            start = time.perf_counter()
            await stop()
            await self.load()
            await self.client.resume()
            found.append(time.perf_counter() - start)
        for answer in await asyncio.gather(*tasks):
            assert_whole(answer)
        return found

    async def silences(self) -> tuple[list[float], list[float]]:
        """For swaps that keep the cache: seconds of each, and how long a streamed request has stood still."""
        at: list[float] = []

        async def listen() -> None:
            request = GenerationRequest(
                f"s{self.version}", [1, 2, 3], SamplingParams(max_tokens=TOKENS, ignore_eos=True)
            )
            async for _ in self.engine.stream(request):
                at.append(time.perf_counter())

        listening = asyncio.create_task(listen())
        swaps = await self.stalls(lambda: self.client.pause("keep"))
        await listening
        gaps = sorted(later - earlier for earlier, later in pairwise(at))
        return swaps, [gap - median(gaps) for gap in gaps[-self.swaps :]]


def assert_whole(answer: GenerationOutput) -> None:
    assert len(answer.token_ids) == len(answer.logprobs) == len(answer.versions) == TOKENS, "tokens are lost"
    assert (answer.versions[1:] >= answer.versions[:-1]).all()
    assert len(set(answer.versions)) > 1, "no swap fell into this request"


async def measure(backend: str, folder: str, path: str, swaps: int) -> str:
    bench = Bench(backend, folder, path, swaps)
    await bench.client.start()
    try:
        load = median([await bench.load() for _ in range(6)][1:])
        keep, stall = await bench.silences()
        recompute = await bench.stalls(bench.client.cut)
    finally:
        await bench.client.shutdown()
    cells = [f"{1000 * median(t):.0f} ms ({median(t) / load:.2f})" for t in (stall, keep, recompute)]
    return f"| {backend} | {1000 * load:.0f} ms | " + " | ".join(cells) + f" | {max(stall) / load:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["transformers", "vllm"])
    parser.add_argument("--hidden", type=int, default=256, help="size of the hidden state, a multiple of 64")
    parser.add_argument("--swaps", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = f"{folder}/model"
        parameters, path = make_model(folder, options.hidden)
        try:
            lines = [asyncio.run(measure(backend, folder, path, options.swaps)) for backend in options.backends]
        finally:
            remove_weights(path)
    print(f"{parameters / 1e6:.1f} million parameters; medians, in brackets as multiples of the load")
    print("| engine | load | stall | keep | recompute | longest stall, in loads |\n|---|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

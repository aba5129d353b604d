"""Which core for the embedded engine? The engine's own loop against what transformers offers, on
one CPU core.

Every core answers the same requests of a 0.45 M parameter Llama (prompts of 30 to 50 tokens,
responses of 6 to 24, 15 on average) and records tokens, behaviour log-probabilities and versions,
as training needs them:

- ``generate``: the library's ``generate`` on a padded batch; one logits processor samples and
  records, one stopping criterion ends rows. Finished rows are computed until the last one ends.
- ``continuous``: the library's continuous batching manager with log-probabilities.
- ``engine``: ``TransformersEngine``.

"In groups of 16": each prompt has 16 samples, as in training. Figures are tokens per second of CPU
time, which other work on the machine distorts less than the clock.

Run: ``OMP_NUM_THREADS=1 python -m benchmarks.embedded_engine [--requests 64 1024] [--repeats 3]``
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    StoppingCriteria,
)

from skyasync.arrays import ints
from skyasync.inference.backends.transformers.decoder import DecodingRow
from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.backends.transformers.sampling import BatchSampler
from skyasync.inference.interface import EngineConfig, GenerationRequest, SamplingParams

Run = Callable[
    [Sequence[GenerationRequest]], int
]  # answers the requests, returns how many tokens that were


def make_model(folder: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_requests(count: int, samples: int, tag: str) -> list[GenerationRequest]:
    rng = random.Random(0)
    prompts = [
        [rng.randrange(1, 400) for _ in range(rng.randint(30, 50))]
        for _ in range(-(-count // samples))
    ]
    return [
        GenerationRequest(
            f"{tag}-{i}", ints(prompts[i // samples]), SamplingParams(max_tokens=rng.randint(6, 24))
        )
        for i in range(count)
    ]


class SampleAndRecord(LogitsProcessor):
    """Samples for every row and leaves scores whose largest is the sampled token."""

    def __init__(self, rows: list[DecodingRow]) -> None:
        self.rows = rows
        self._sampler = BatchSampler(rows, torch.device("cpu"))
        self._step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens, logprobs = self._sampler(scores, np.full(len(self.rows), self._step))
        self._step += 1
        for row, token, logprob in zip(self.rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if row.finish_reason is None:
                row.record(token, logprob, 0)
        return torch.zeros_like(scores).scatter_(1, tokens[:, None], 1.0)


class RowsAreDone(StoppingCriteria):
    def __init__(self, rows: list[DecodingRow]) -> None:
        self._rows = rows

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        return torch.tensor([row.finish_reason is not None for row in self._rows])


def with_generate(model: LlamaForCausalLM) -> Run:
    @torch.inference_mode()
    def run(requests: Sequence[GenerationRequest]) -> int:
        rows = [
            DecodingRow(
                r,
                r.prompt_token_ids.tolist(),
                key=i,
                limit=r.sampling.max_tokens,
                stop_ids=frozenset(),
            )
            for i, r in enumerate(requests)
        ]
        longest = max(len(row.prompt) for row in rows)
        tokens = torch.tensor([[0] * (longest - len(row.prompt)) + row.prompt for row in rows])
        model.generate(
            tokens,
            attention_mask=(tokens != 0).long(),
            do_sample=False,
            max_new_tokens=max(row.limit for row in rows),
            logits_processor=[SampleAndRecord(rows)],
            stopping_criteria=[RowsAreDone(rows)],
        )
        return sum(len(row.token_ids) for row in rows)

    return run


def with_continuous_batching(model: LlamaForCausalLM) -> Run:
    config = ContinuousBatchingConfig(
        page_size=64, num_blocks=2048, max_batch_tokens=4096, return_logprobs=True
    )

    def run(requests: Sequence[GenerationRequest]) -> int:
        sampling = GenerationConfig(
            do_sample=True, max_new_tokens=24, eos_token_id=-1, pad_token_id=0
        )
        with model.continuous_batching_context_manager(
            generation_config=sampling, continuous_batching_config=config
        ) as manager:
            for request in requests:
                manager.add_request(
                    request.prompt_token_ids.tolist(),
                    request.request_id,
                    request.sampling.max_tokens,
                )
            count = 0
            for _ in requests:
                result = manager.get_result(timeout=600)
                assert result is not None and result.is_finished() and not result.error, result
                count += len(result.generated_tokens)
        return count

    return run


def with_engine(folder: str) -> Run:
    runner = asyncio.Runner()
    engine = TransformersEngine(EngineConfig(folder, threads=torch.get_num_threads()))
    runner.run(engine.start())

    async def answer(requests: Sequence[GenerationRequest]) -> int:
        return sum(
            [
                len(output.token_ids)
                async for outputs in engine.generate(requests)
                for output in outputs
            ]
        )

    return lambda requests: runner.run(answer(requests))


def tokens_per_second(run: Run, count: int, samples: int, repeats: int) -> float:
    """Tokens per CPU second: the best of ``repeats`` runs after one to warm up."""
    best = 0.0
    for repeat in range(repeats + 1):
        requests = make_requests(count, samples, f"{samples}-{repeat}")
        started = time.process_time()
        tokens = run(requests)
        if repeat:
            best = max(best, tokens / (time.process_time() - started))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--skip", nargs="*", default=[], help="cores to leave out, for example: continuous"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        cores = {
            "generate": with_generate(model),
            "continuous": with_continuous_batching(model),
            "engine": with_engine(folder),
        }
        table = Table(
            "core",
            *[
                f"{n} requests, {kind}"
                for n in options.requests
                for kind in ("alone", "in groups of 16")
            ],
        )
        for name, run in cores.items():
            if name not in options.skip:
                cells = [
                    f"{tokens_per_second(run, n, samples, options.repeats):,.0f} tokens/s"
                    for n in options.requests
                    for samples in (1, 16)
                ]
                table.add_row(name, *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()

"""Several engines draw as many different samples as one: they share weights, not random numbers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from skyasync.inference.backends.vllm.setup import engine_arguments
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import (
    ENGINES,
    EngineConfig,
    GenerationOutput,
    GenerationRequest,
    InferenceEngine,
    SamplingParams,
)
from tests.inference.backends.vllm.models import save_model

GROUPS, SAMPLES, LENGTH = 4, 8, 12


def config(path: str, index: int = 0, **extra: object) -> EngineConfig:
    return EngineConfig(
        path, max_model_len=64, max_num_seqs=64, threads=1, kv_cache_gb=0.1, seed=42,
        extra={"engine_index": index, **extra},
    )  # fmt: skip


def test_every_vllm_engine_has_a_seed_of_its_own_and_the_first_one_that_of_the_run() -> None:
    seeds = [engine_arguments(config("m", index), cpu=False)["seed"] for index in range(64)]
    others = [
        engine_arguments(EngineConfig("m", seed=43, extra={"engine_index": i}), cpu=True)["seed"]
        for i in range(64)
    ]
    assert seeds[0] == 42
    assert others[0] == 43
    assert len({*seeds, *others}) == 128, "nor do engines of two runs draw the same samples"
    assert all(0 <= seed < 2**32 for seed in seeds), "within numpy's range of seeds"


async def groups(engines: list[InferenceEngine], batch: int) -> list[list[GenerationOutput]]:
    """Each engine gets its share of every group at once, as the client divides them."""
    share = SAMPLES // len(engines)
    ask = SamplingParams(max_tokens=LENGTH, ignore_eos=True)

    async def part(index: int) -> list[GenerationOutput]:
        asked = [
            GenerationRequest(f"b{batch}-g{group}-r{index * share + sample}", [2, 3, 4 + group], ask)
            for group in range(GROUPS) for sample in range(share)
        ]  # fmt: skip
        answers = {
            o.request_id: o async for outputs in engines[index].generate(asked) for o in outputs
        }
        return [answers[request.request_id] for request in asked]

    parts = await asyncio.gather(*(part(index) for index in range(len(engines))))
    return [
        [o for p in parts for o in p[group * share : (group + 1) * share]]
        for group in range(GROUPS)
    ]


def check_distinct(found: list[list[GenerationOutput]]) -> None:
    assert [len({tuple(o.token_ids) for o in group}) for group in found] == [SAMPLES] * GROUPS


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.matrix])]
)
async def test_groups_over_two_and_four_engines_have_as_many_different_samples_as_one_engine_gives(
    backend: str, engines_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probabilities are spread out: two equal samples of 12 tokens are no coincidence."""
    monkeypatch.setenv(
        "TORCH_COMPILE_DISABLE", "1"
    )  # otherwise vLLM would compile its sampler four times
    save_model(tmp_path, tied=False)
    engines = [ENGINES[backend](config(str(tmp_path), index)) for index in range(4)]
    client = InferenceClient(engines)
    try:
        await client.start()
        for batch, count in enumerate([1, 2, 4, 2, 4]):
            check_distinct(await groups(engines[:count], batch))
    finally:
        await client.shutdown()

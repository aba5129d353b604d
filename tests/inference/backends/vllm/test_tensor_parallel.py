"""One vLLM engine on two ranks, in one Ray actor of a placement group, is equivalent to an engine on one rank."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from transformers import LlamaForCausalLM

from skyasync.inference.backends.vllm.engine import VLLMEngine
from skyasync.inference.interface import (
    ENGINES,
    EngineConfig,
    EngineFailedError,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
)
from skyasync.inference.ray_engine import RayEngine
from skyasync.weight_sync.tensors import as_message, specs_of
from skyasync.weight_sync.transfers.file import remove_weights
from skyasync.weight_sync.transfers.shared_memory import BufferWriter
from skyasync.weight_sync.update import WeightUpdate
from tests.inference.backends.vllm.models import perturb, publish, save_model, token_logprobs
from tests.weight_sync.policy_and_engine import SWAPPED
from tests.weight_sync.worker_faults import BIT_OF, inject_fault, update_with

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
]

TOLERANCE = 1e-4
PROBES = [[5, 6, 7, 8, 9, 10, 11], list(range(2, 90))]
#: Weights whose digest shows what a rank computes with. A CPU's kernels have packed those of linear layers, so their
#: arrival is tested by log-probabilities, to which each rank adds its half.
PLAIN = ["model.embed_tokens.weight", "model.norm.weight", "model.layers.1.input_layernorm.weight"]
#: Values of ``generator.engine_kwargs`` that must not change a token.
OPTIONS = {"enable_prefix_caching": False, "block_size": 64}
PROMPTS = [[2, 3, 4, 5], [7, 8, 9], [40, 41, 42, 43, 44, 45]]


class Inspected(VLLMEngine):
    """Reports a digest of each rank's part of each weight, by rank and name. Faults can be injected into its ranks."""

    async def start(self) -> None:
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = (
            "1"  # functions of ours are run in the workers
        )
        await super().start()

    async def with_fault(
        self, fault: str, info: dict[str, Any], rank: int | None = None
    ) -> list[str]:
        """Each rank's answer to an update with a fault in all ranks or in one."""
        answers: list[str] = await self.llm.collective_rpc(update_with, args=(fault, info, rank))
        return answers

    async def inject_fault(self, fault: str, rank: int) -> None:
        await self.llm.collective_rpc(inject_fault, args=(fault, rank))

    async def digests(self) -> dict[str, str]:
        return {
            name: digest
            for rank in await self.llm.compute_weight_checksums()
            for name, digest in rank.items()
        }


class Pair:
    def __init__(self, model: LlamaForCausalLM, engines: list[RayEngine]) -> None:
        self.model, (self.whole, self.halves) = model, engines


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(
    engines_on_ray: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Pair]:
    """The same weights on one rank and on two; each engine in a bundle, as a run places it."""
    ENGINES["inspected"] = Inspected
    folder = tmp_path_factory.mktemp("model")
    model = save_model(folder, tied=True)
    group = placement_group([{"CPU": 1}, {"CPU": 1}])
    ray.get(group.ready(), timeout=60)
    config = EngineConfig(
        str(folder), max_model_len=256, max_num_seqs=64, threads=2, kv_cache_gb=0.1
    )
    engines = [
        RayEngine(
            "inspected",
            replace(config, tensor_parallel_size=ranks, extra={"engine_kwargs": options}),
            {
                "num_cpus": 1,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=ranks - 1
                ),
            },
        )
        for ranks, options in ((1, {}), (2, OPTIONS))
    ]
    try:
        await asyncio.gather(*(engine.start() for engine in engines))
        yield Pair(model, engines)
    finally:
        await asyncio.gather(*(engine.shutdown() for engine in engines))
        remove_placement_group(group)
        del ENGINES["inspected"]


async def greedy(engine: RayEngine, name: str) -> list[GenerationOutput]:
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    asked = [GenerationRequest(f"{name}-{i}", prompt, sampling) for i, prompt in enumerate(PROMPTS)]
    answers = {o.request_id: o async for outputs in engine.generate(asked) for o in outputs}
    return [answers[request.request_id] for request in asked]


def gap(found: list[list[float]], expected: list[list[float]]) -> float:
    return max(
        (torch.tensor(f) - torch.tensor(e)).abs().max().item()
        for f, e in zip(found, expected, strict=True)
    )


async def check_equal(pair: Pair, name: str) -> None:
    one, two = await greedy(pair.whole, name), await greedy(pair.halves, name)
    assert [o.token_ids.tolist() for o in two] == [o.token_ids.tolist() for o in one]
    assert gap([o.logprobs.tolist() for o in two], [o.logprobs.tolist() for o in one]) <= TOLERANCE
    scores = await pair.halves.score(PROBES)
    assert gap(scores, await pair.whole.score(PROBES)) <= TOLERANCE
    assert (
        gap(scores, [token_logprobs(pair.model, probe).tolist() for probe in PROBES]) <= TOLERANCE
    )


async def test_tokens_and_logprobs_are_those_of_one_rank_and_stay_so_over_weight_syncs(
    pair: Pair,
) -> None:
    await check_equal(pair, "start")
    digests: dict[str, Any] = await pair.halves._actor.call.remote("digests")
    ranks = {name.split(":tp")[1][0] for name in digests}
    assert ranks == {"0", "1"}
    for version in (1, 2):
        perturb(pair.model, seed=version)
        update = publish(pair.model, version)
        for engine in (pair.whole, pair.halves):
            assert await engine.update_weights(update) == [], (
                "each rank has compared its part of every tensor"
            )
        remove_weights(update.info["path"])
        await check_equal(pair, f"version-{version}")
        before, digests = digests, await pair.halves._actor.call.remote("digests")
        assert digests.keys() == before.keys()
        received = {name for name in digests if digests[name] != before[name]}
        assert {f"dp0:pp0:pcp0:tp{rank}:{name}" for rank in ranks for name in PLAIN} <= received


@pytest.mark.parametrize("rank", [None, 0, 1], ids=["both", "first", "second"])
@pytest.mark.parametrize("fault", ["stale layer", "swapped pair", "head left behind"])
async def test_each_rank_finds_a_fault_in_its_part_in_the_very_sync(
    pair: Pair, fault: str, rank: int | None
) -> None:
    for seed, with_fault in ((11, ""), (12, fault), (13, "")):
        perturb(pair.model, seed=seed, size=1e-5)
        update = publish(pair.model, seed)
        answers = await pair.halves._actor.call.remote("with_fault", with_fault, update.info, rank)
        remove_weights(update.info["path"])
        for each, answer in enumerate(answers):
            assert (
                bool(answer)
                == ("engine holds" in answer)
                == (bool(with_fault) and rank in (None, each))
            ), answers
        assert len(answers) == 2


@pytest.fixture(scope="module")
def writer() -> BufferWriter:
    """Writes weights into memory that the engines map."""
    return BufferWriter(two_buffers=False)


def written(writer: BufferWriter, model: LlamaForCausalLM, version: int) -> WeightUpdate:
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return WeightUpdate(version, "shared_memory", writer.write(specs_of(weights), weights.items()))


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_bit_that_flips_on_its_way_to_one_rank_is_named_by_that_one(
    pair: Pair, writer: BufferWriter, rank: int
) -> None:
    """Through a file, and through shared memory."""
    perturb(pair.model, seed=20 + rank, size=1e-5)
    file, mapped = publish(pair.model, 20), written(writer, pair.model, 20)
    for info in (file.info, as_message(mapped.info)):
        for fault, expected in (
            ("flipped bit", f"the vLLM engine received.* in {SWAPPED[0]}$"),
            ("", "^$"),
        ):
            answers = await pair.halves._actor.call.remote("with_fault", fault, info, rank)
            assert re.search(expected, answers[rank]) and not answers[1 - rank], answers
    remove_weights(file.info["path"])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("name", "updates"),
    [
        ("model.embed_tokens.weight", 1),
        ("model.norm.weight", 1),
        (
            "model.layers.0.self_attn.o_proj.weight",
            4,
        ),  # a rank's part has 32 columns; each update compares 8
        ("model.layers.1.mlp.gate_proj.weight", 8),
    ],
)
async def test_a_bit_that_is_wrong_in_one_ranks_part_is_named_when_its_column_is_looked_at(
    pair: Pair, writer: BufferWriter, name: str, updates: int, rank: int
) -> None:
    """The bit flips after the checks of received bytes. It is found at once in norms and embeddings, otherwise
    within the number of updates that covers all columns.
    """
    info = as_message(written(writer, pair.model, 30).info)
    assert await pair.halves._actor.call.remote("with_fault", "", info) == ["", ""]
    for _ in range(updates):
        answers = await pair.halves._actor.call.remote("with_fault", BIT_OF + name, info, rank)
        assert not answers[1 - rank]
        if answers[rank]:
            break
    assert re.search(f"the vLLM engine holds.* in {name}", answers[rank]), answers
    assert await pair.halves._actor.call.remote("with_fault", "", info) == ["", ""]


async def test_one_ranks_bit_ends_the_sync_in_the_tensors_name(
    pair: Pair, writer: BufferWriter
) -> None:
    """The last test of the file: an engine with wrong weights shuts down."""
    await pair.halves._actor.call.remote("inject_fault", "flipped bit", 1)
    with pytest.raises(
        Exception, match=f"the vLLM engine received other weights .* in {SWAPPED[0]}"
    ):
        await pair.halves.update_weights(written(writer, pair.model, 40))
    with pytest.raises(EngineFailedError, match=SWAPPED[0]):
        await pair.halves.score(PROBES)

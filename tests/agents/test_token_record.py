"""Token in, token out: training uses exactly the engine's tokens, over several turns.

The embedded engine, the client, the pool, the generator, the parallel lists and the training batch are real; the
engine's answers are recorded in between.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from skyasync.envs.pool import local_pool
from skyasync.examples.tiny.model import Recipe
from skyasync.examples.tiny_models import llama_config
from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import EngineConfig, GenerationOutput, GenerationRequest
from skyasync.rollout.collate import collate
from skyasync.rollout.generator import EpisodeGenerator, EpisodeLimits
from skyasync.rollout.generator_api import run_generator
from skyasync.weight_sync.transfers.file import remove_weights, write_weights
from skyasync.weight_sync.update import WeightUpdate
from tests.rollout.episodes import RecordedEnv, prompt, registered, requests, tokenizer

TURNS, SAMPLES = 5, 3


class Talks(RecordedEnv):
    """Five turns, each with its number as reward."""

    def answer(self, action):
        said = [{"role": "user", "content": f"turn {self.turns}, you said {len(action)} letters"}]
        return {
            "observations": said,
            "reward": float(self.turns),
            "done": self.turns == TURNS,
            "metadata": {},
        }


class Recording(TransformersEngine):
    """Keeps requests and answers, and gets new weights after the first few."""

    def __init__(self, config: EngineConfig, update: WeightUpdate) -> None:
        super().__init__(config)
        self.update, self.asked, self.answered = update, {}, {}

    async def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncIterator[list[GenerationOutput]]:
        self.asked |= {request.request_id: list(request.prompt_token_ids) for request in requests}
        async for outputs in super().generate(requests):
            self.answered |= {output.request_id: replace(output) for output in outputs}
            if self.update.version == 1 and len(self.answered) > 2 * SAMPLES:
                await self.update_weights(self.update)
                self.update = replace(self.update, version=2)
            yield outputs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        llama_config(Recipe(hidden=64, head_dim=32, intermediate=64), tokenizer())
    )


async def test_a_trajectory_of_five_turns_is_the_engines_own_record(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    path = write_weights(
        {name: 1.5 * parameter.detach() for name, parameter in model.named_parameters()}
    )
    config = EngineConfig(str(tmp_path), max_model_len=512, threads=1)
    engine = Recording(config, WeightUpdate(1, "shared_memory", {"path": path}))
    client = InferenceClient([engine])
    await client.start()
    try:
        asked = [prompt(0, registered(Talks))]
        generator = EpisodeGenerator(client, local_pool(), tokenizer(), 512, EpisodeLimits(TURNS))
        ((group,), _) = await run_generator(generator, requests(asked, SAMPLES, 6), 0)
        current = await engine.score([trajectory.tokens for trajectory in group.trajectories])
    finally:
        await client.shutdown()
        remove_weights(path)
    batch, versions = collate([group]), set()
    for row, trajectory in enumerate(group.trajectories):
        at, mask = 0, [False] * batch.tokens.shape[1]
        for turn in range(TURNS):
            read, wrote = (
                record[f"{trajectory.id}-t{turn}"] for record in (engine.asked, engine.answered)
            )
            span = slice(len(read), len(read) + len(wrote.token_ids))
            assert batch.tokens[row, : span.stop].tolist() == [
                *read,
                *wrote.token_ids,
            ]  # from all tokens before
            assert span.start > at
            assert batch.behaviour_logprobs[row, span].tolist() == pytest.approx(
                wrote.logprobs, abs=1e-5
            )
            assert batch.versions[row, span].tolist() == wrote.versions.tolist()
            assert batch.rewards[row, span].tolist() == [0.0] * (len(wrote.token_ids) - 1) + [
                turn + 1.0
            ]
            mask[span] = [True] * len(wrote.token_ids)
            versions |= set(wrote.versions)
            at = span.stop
        scored = [
            current[row][t - 1] for t in range(span.start, span.stop)
        ]  # requested after the update
        assert scored == pytest.approx(wrote.logprobs, abs=1e-5)
        assert batch.loss_mask[row].tolist() == mask  # without the prompt and the observations
        assert batch.rewards[row].sum() == sum(range(1, TURNS + 1))
    assert versions == {0, 1}

"""Episodes with images, in the prompt and in later turns, by a real engine, up to the trained model."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from skyasync.config.schema import Config
from skyasync.data.datasets import as_prompt
from skyasync.envs import BaseTextEnv
from skyasync.envs.episodes import EnvSettings, Episodes
from skyasync.envs.pool import EnvPool, local_pool
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import ENGINES, EngineConfig, GenerationOutput, GenerationRequest
from skyasync.models.heads import load_causal_lm
from skyasync.models.token_model import TokenModel
from skyasync.rollout.collate import collate
from skyasync.rollout.generator import EpisodeGenerator, EpisodeLimits
from skyasync.rollout.tokenizer import load_tokenizer
from skyasync.rollout.types import Group
from skyasync.utils.rpc import Answer, Call, LocalTransport
from tests.models.tiny_vision import FAMILIES, logprobs, noise, save_tiny
from tests.rollout.episodes import registered, requests

pytestmark = pytest.mark.slow


class ShowsImages(BaseTextEnv):
    """Two more images, one at each turn."""

    def step(self, action: str) -> Any:
        self.turns += 1
        url = {"url": f"file:{self.extras['folder']}/{self.turns}.png"}
        content = [{"type": "text", "text": "And now?"}, {"type": "image_url", "image_url": url}]
        observations = [{"role": "user", "content": content}] if self.turns < 3 else []
        return {
            "observations": observations,
            "reward": 1.0,
            "done": self.turns == 3,
            "metadata": {},
        }


@pytest.mark.parametrize("family", FAMILIES)
async def test_images_of_later_turns_are_trained_on_as_they_were_sampled(
    family: str, tmp_path: Path
) -> None:
    folder = save_tiny(family, tmp_path / family)
    for turn in (1, 2):
        (tmp_path / f"{turn}.png").write_bytes(noise(turn, 56 * turn, 56).data)
    row = {"prompt": "How many discs?", "images": [noise(9).data], "folder": str(tmp_path)}
    cfg = Config()
    cfg.environment.env_class = registered(ShowsImages)
    prompt = as_prompt(0, row, cfg)
    engine = ENGINES["transformers"](EngineConfig(folder, threads=1, max_model_len=256))
    client = InferenceClient([engine])
    await client.start()
    try:
        limits = EpisodeLimits(3)
        generator = EpisodeGenerator(client, local_pool(), load_tokenizer(folder), 256, limits)
        trajectories = await generator.generate_trajectories(
            requests([prompt], samples=3, max_tokens=6)
        )
        await generator.close()
    finally:
        await client.shutdown()

    for trajectory in trajectories:
        kinds = [segment.kind for segment in trajectory.segments]
        assert kinds == ["prompt", "action", "observation", "action", "observation", "action"]
        shown = [segment.images for segment in trajectory.segments if segment.kind != "action"]
        assert shown == [(noise(9),), (noise(1),), (noise(2, 112, 56),)]
    batch = collate([Group(prompt, pickle.loads(pickle.dumps(trajectories)))])
    assert batch.images == ((noise(9), noise(1), noise(2, 112, 56)),) * 3
    model = TokenModel(load_causal_lm(folder, torch.float32))
    with torch.no_grad():
        trained = logprobs(model, batch, 200)
    assert (trained - batch.behaviour_logprobs)[batch.loss_mask].abs().max() < 1e-5


class Looks(BaseTextEnv):
    """One turn; it keeps the initial conversation, as every environment does."""

    def step(self, action: str) -> Any:
        return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}


class CountedEngine:
    """A real engine with serialized messages, as in Ray."""

    def __init__(self, engine: Any, messages: list[bytes]) -> None:
        self.engine, self.messages = engine, messages

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncIterator[list[GenerationOutput]]:
        self.messages.append(pickle.dumps(list(requests)))
        async for outputs in self.engine.generate(pickle.loads(self.messages[-1])):
            yield outputs


async def test_sixty_four_samples_of_an_image_send_it_once(tmp_path: Path) -> None:
    folder, image = save_tiny("qwen3_vl", tmp_path / "model"), noise(9)
    to_engines: list[bytes] = []
    to_environments: list[bytes] = []
    from_environments: list[bytes] = []

    class CountedTransport(LocalTransport):
        async def exchange(self, calls: Sequence[Call]) -> tuple[list[Answer], int]:
            to_environments.append(pickle.dumps([tuple(call) for call in calls]))
            answers, hung = await super().exchange(calls)
            from_environments.append(pickle.dumps([tuple(answer) for answer in answers]))
            return answers, hung

    cfg, settings = Config(), EnvSettings({})
    cfg.environment.env_class = registered(Looks)
    prompt = as_prompt(0, {"prompt": "How many discs?", "images": [image.data]}, cfg)
    pool = EnvPool(lambda: CountedTransport(Episodes(settings)), 1, settings)
    client = InferenceClient(
        [CountedEngine(ENGINES["transformers"](EngineConfig(folder, threads=1)), to_engines)]
    )
    await client.start()
    try:
        generator = EpisodeGenerator(client, pool, load_tokenizer(folder), 256, EpisodeLimits(1))
        trajectories = await generator.generate_trajectories(
            requests([prompt], samples=64, max_tokens=2)
        )
        await generator.close()
    finally:
        await client.shutdown()

    batch = collate([Group(prompt, trajectories)])
    assert batch.images == ((image,),) * 64
    halves = [
        pickle.dumps(batch.select(torch.arange(start, start + 32))) for start in (0, 32)
    ]  # of two ranks
    for messages, copies in (
        (to_engines, 1),
        (to_environments, 1),
        (from_environments, 1),
        (halves, 2),
    ):
        assert sum(message.count(image.data) for message in messages) == copies

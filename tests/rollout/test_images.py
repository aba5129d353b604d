"""Episodes with images, in the prompt and in later turns, by a real engine, up to the trained model."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from skyasync.config.schema import Config
from skyasync.data.datasets import as_prompt
from skyasync.envs import BaseTextEnv
from skyasync.envs.pool import local_pool
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import ENGINES, EngineConfig
from skyasync.models.heads import load_causal_lm
from skyasync.models.token_model import TokenModel
from skyasync.rollout.collate import collate
from skyasync.rollout.generator import EpisodeGenerator, EpisodeLimits
from skyasync.rollout.tokenizer import load_tokenizer
from skyasync.rollout.types import Group
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
        return {"observations": observations, "reward": 1.0, "done": self.turns == 3, "metadata": {}}


@pytest.mark.parametrize("family", FAMILIES)
async def test_images_of_later_turns_are_trained_on_as_they_were_sampled(family: str, tmp_path: Path) -> None:
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
        trajectories = await generator.generate_trajectories(requests([prompt], samples=3, max_tokens=6))
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

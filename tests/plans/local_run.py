"""A whole run in one process: the real policy, the embedded engine, environments, and any plan; no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from skyasync.config.schema import Config
from skyasync.engines.client import InferenceClient
from skyasync.engines.protocol import EngineConfig
from skyasync.engines.transformers_engine import TransformersEngine
from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyasync.envs.pool import local_pool
from skyasync.rollout.generator import EpisodeGenerator
from skyasync.rollout.types import Prompt, PromptId
from skyasync.trainer import RayPPOTrainer
from skyasync.weight_sync.sync import WeightSync
from skyasync.weight_sync.update import WeightUpdate
from skyasync.workers.batch import TrainingBatch
from skyasync.workers.policy import PolicyWorker

CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


class OddBytes(BaseTextEnv):
    """Rewards odd characters, so that the rewards of a group differ."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = sum(ord(character) % 2 for character in action) / 10
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}


class LocalDispatch:
    """One policy worker in a thread of its own; remembers what it was trained on."""

    def __init__(self, cfg: Config) -> None:
        self._worker = PolicyWorker(cfg, threads=1)
        self._worker.setup()
        self.batches: list[TrainingBatch] = []

    async def update_policy(self, batch: TrainingBatch) -> dict[str, float]:
        self.batches.append(batch)
        return await asyncio.to_thread(self._worker.update_policy, batch)

    async def policy_logprobs(self, batch: TrainingBatch) -> Any:
        return await asyncio.to_thread(self._worker.logprobs, batch)

    async def publish_weights(self, version: int) -> WeightUpdate:
        return WeightUpdate(version, "shared_memory", {"path": self._worker.publish()})

    async def release_weights(self, update: WeightUpdate) -> None:
        self._worker.release(update.info["path"])

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._worker.score(sequences)

    async def save(self, folder: Path) -> None:
        self._worker.save(str(folder))

    async def load(self, folder: Path) -> None:
        self._worker.load(str(folder))

    async def stats(self) -> dict[str, float]:
        return {"busy_s": 0.0}

    def score_under(self, weights: dict[str, Any], tokens: list[int]) -> list[float]:
        """Log-probability of each token after the first under these weights."""
        now = self.weights()
        self._put(weights)
        try:
            return self._worker.score([tokens])[0]
        finally:
            self._put(now)

    def _put(self, weights: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self._worker.model.named_parameters():
                parameter.copy_(weights[name])

    def weights(self) -> dict[str, Any]:
        return {name: parameter.detach().clone() for name, parameter in self._worker.model.named_parameters()}


class Rows:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.rows.setdefault(step, {}).update(metrics)

    def close(self) -> None: ...


def config(model: str, steps: int = 4, train_length: int = 12, **trainer: Any) -> Config:
    """``steps``: 0 runs all epochs; ``train_length``: most tokens of a response in training."""
    cfg = Config()
    cfg.trainer.policy.model.path = model
    cfg.trainer.policy.optimizer_config.lr = 1e-2
    cfg.trainer.train_batch_size, cfg.trainer.max_training_steps = 4, steps
    cfg.trainer.eval_before_train, cfg.trainer.eval_interval = False, 2
    cfg.generator.n_samples_per_prompt = 4
    cfg.generator.sampling_params.max_generate_length = train_length
    cfg.generator.eval_sampling_params.max_generate_length = 12
    cfg.trainer.epochs = 100
    for name, value in trainer.items():
        assert hasattr(cfg.trainer, name)
        setattr(cfg.trainer, name, value)
    return cfg


def prompts(count: int) -> list[Prompt]:
    env = f"{__name__}:OddBytes"
    return [
        Prompt(PromptId(0, i), [{"role": "user", "content": "ab" * (1 + i % 5) + str(i)}], env) for i in range(count)
    ]


class LocalRun:
    """``train()`` runs the plan to its end; what happened is in ``tracker.rows`` and ``dispatch``."""

    def __init__(self, plan: type[RayPPOTrainer], cfg: Config, client: type[InferenceClient] = InferenceClient) -> None:
        self.cfg = cfg
        tokenizer = AutoTokenizer.from_pretrained(cfg.trainer.policy.model.path)
        tokenizer.chat_template = CHAT
        self.engine = TransformersEngine(EngineConfig(cfg.trainer.policy.model.path, threads=1, max_model_len=64))
        self.client = client([self.engine], 60)
        self.dispatch, self.tracker = LocalDispatch(cfg), Rows()
        self.trainer = plan.get_trainer(
            cfg=cfg,
            tracker=self.tracker,
            tokenizer=tokenizer,
            train_dataset=prompts(10),
            eval_dataset=prompts(3),
            inference_engine_client=self.client,
            generator=EpisodeGenerator(self.client, local_pool(), tokenizer, 64),
        )
        probe = [[1, 2, 3, 4, 5], [9, 8, 7]]
        self.trainer.attach(self.dispatch, WeightSync(self.dispatch, self.client, probe, 1e-3))

    async def train(self) -> LocalRun:
        await self.client.start()
        try:
            await self.trainer.train()
        finally:
            await self.client.shutdown()
        return self

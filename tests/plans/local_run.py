"""A whole run in one process: the real policy, the embedded engine, environments, and any plan; no Ray."""

from __future__ import annotations

import asyncio
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
from skyasync.workers.batch import TrainingBatch
from skyasync.workers.local import LocalDispatch

CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


class OddBytes(BaseTextEnv):
    """Rewards odd characters, so that the rewards of a group differ."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = sum(ord(character) % 2 for character in action) / 10
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}


class RecordingDispatch(LocalDispatch):
    """Remembers what it was trained on, and lets one look at the weights."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.batches: list[TrainingBatch] = []

    async def update_policy(self, batch: TrainingBatch) -> dict[str, float]:
        self.batches.append(batch)
        return await super().update_policy(batch)

    def score_under(self, weights: dict[str, Any], tokens: list[int]) -> list[float]:
        """Log-probability of each token after the first under these weights."""
        now = self.weights()
        self._put(weights)
        try:
            return self._policy.score([tokens])[0]
        finally:
            self._put(now)

    def _put(self, weights: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self._policy.model.named_parameters():
                parameter.copy_(weights[name])

    def weights(self) -> dict[str, Any]:
        return {name: parameter.detach().clone() for name, parameter in self._policy.model.named_parameters()}


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
    cfg.trainer.policy.model.path, cfg.trainer.policy.threads = model, 1
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


def without_times(rows: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """What does not depend on the clock, nor is known to one plan alone."""
    foreign = ("time/", "idle/", "throughput/", "rollout/")
    return {step: {k: v for k, v in row.items() if not k.startswith(foreign)} for step, row in rows.items()}


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
        self.dispatch, self.tracker = RecordingDispatch(cfg), Rows()
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
            await asyncio.gather(self.client.shutdown(), self.dispatch.shutdown())
        return self

"""A whole run in one process: the real policy, the embedded engine, environments, and any plan; no Ray."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import AutoTokenizer

from skyasync.config.schema import Config
from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyasync.envs.pool import local_pool
from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.client import InferenceClient
from skyasync.inference.inflight import InflightRequest
from skyasync.inference.interface import EngineConfig, GenerationOutput
from skyasync.models.batch import UpdateBatch
from skyasync.rollout.generator import EpisodeGenerator, EpisodeLimits
from skyasync.rollout.types import Group, Prompt, PromptId, Rollout
from skyasync.trainer import RayPPOTrainer
from skyasync.weight_sync.colocation import Colocation
from skyasync.weight_sync.sync import WeightSync
from skyasync.workers.dispatch import LocalDispatch
from skyasync.workers.roles import POLICY, roles_with_ranks

CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


class OddBytes(BaseTextEnv):
    """Rewards odd characters, so that the rewards of a group differ."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = sum(ord(character) % 2 for character in action) / 10
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}


class RecordingDispatch(LocalDispatch):
    """Keeps its training batches, and gives access to the weights."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg, roles=[role.name for role in roles_with_ranks(cfg)])
        self.batches: list[UpdateBatch] = []

    async def start(self, total_steps: int = 0) -> None: ...

    async def forward_backward(self, batch: UpdateBatch, role: str = POLICY) -> None:
        if role == POLICY:
            self.batches.append(batch)
        await super().forward_backward(batch, role)

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
            for name, parameter in self._policy.backend.model.named_parameters():
                parameter.copy_(weights[name])

    def weights(self, role: str = POLICY) -> dict[str, Any]:
        return {
            name: parameter.detach().clone()
            for name, parameter in self.worker(role).backend.model.named_parameters()
        }

    def worker(self, role: str) -> Any:
        group: Any = self._groups[role]
        return group.worker


class Rows:
    """A tracker that keeps its rows."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.rows.setdefault(step, {}).update(metrics)

    def close(self) -> None: ...


class Memory(RayPPOTrainer):
    """Keeps trained groups, and the weights of every version; works with any plan."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self.trained: list[list[Group]] = []
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    async def train_on(self, rollout: Rollout) -> dict[str, float]:
        self.trained.append(rollout.groups)
        self.weights[self.global_step] = self.dispatch.weights()
        return await super().train_on(rollout)

    @property
    def trained_ids(self) -> list[PromptId]:
        return [group.prompt.id for groups in self.trained for group in groups]


class RecordingClient(InferenceClient):
    """Records every part of a response that an engine returns."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pieces: dict[str, list[GenerationOutput]] = {}

    def _take(self, piece: InflightRequest) -> GenerationOutput | None:
        if isinstance(piece.result, GenerationOutput):
            self.pieces.setdefault(piece.caller_id, []).append(piece.result)
        return super()._take(piece)


def check_tokens(run: LocalRun) -> int:
    """Training uses exactly the engine's tokens and log-probabilities; counts trajectories with two versions."""
    mixed = 0
    for group in (group for groups in run.trainer.trained for group in groups):
        for trajectory in group.trajectories:
            pieces = run.client.pieces[f"{trajectory.id}-t0"]
            (action,) = trajectory.actions
            assert action.tokens.tolist() == [
                t for piece in pieces for t in piece.token_ids.tolist()
            ]
            assert action.logprobs.tolist() == [
                p for piece in pieces for p in piece.logprobs.tolist()
            ]
            assert action.versions.tolist() == [
                v for piece in pieces for v in piece.versions.tolist()
            ]
            assert (action.versions[1:] >= action.versions[:-1]).all()
            assert len(action.tokens) <= run.cfg.generator.sampling_params.max_generate_length
            mixed += len(set(action.versions)) > 1
    for batch in run.dispatch.batches:
        assert torch.equal(batch.versions >= 0, batch.loss_mask)
    return mixed


def config(model: str, steps: int = 4, train_length: int = 12, **trainer: Any) -> Config:
    """``steps``: 0 runs all epochs; ``train_length``: most tokens of a response in training."""
    cfg = Config()
    cfg.trainer.policy.model.path, cfg.trainer.policy.threads = model, 1
    cfg.generator.backend = (
        "transformers"  # the engine computes on the trainer's buffer: there are two
    )
    cfg.trainer.policy.optimizer_config.lr = 1e-2
    cfg.trainer.train_batch_size, cfg.trainer.max_training_steps = 4, steps
    cfg.trainer.eval_before_train, cfg.trainer.eval_interval = False, 2
    cfg.generator.n_samples_per_prompt = 4
    cfg.generator.sampling_params.max_generate_length = train_length
    cfg.generator.eval_sampling_params["max_generate_length"] = 12
    cfg.trainer.epochs = 100
    for name, value in trainer.items():
        assert hasattr(cfg.trainer, name)
        setattr(cfg.trainer, name, value)
    return cfg


def without_times(rows: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """The metrics that do not depend on the clock and that all plans have."""
    foreign = ("time/", "idle/", "throughput/", "rollout/")
    return {
        step: {k: v for k, v in row.items() if not k.startswith(foreign)}
        for step, row in rows.items()
    }


def prompts(count: int, env: str = f"{__name__}:OddBytes") -> list[Prompt]:
    return [
        Prompt(PromptId(0, i), [{"role": "user", "content": "ab" * (1 + i % 5) + str(i)}], env)
        for i in range(count)
    ]


def engine_config(model: str) -> EngineConfig:
    return EngineConfig(model, threads=1, max_model_len=64, max_num_seqs=64, kv_cache_gb=0.1)


class LocalRun:
    """``train()`` runs the plan to its end; the results are in ``tracker.rows`` and ``dispatch``."""

    def __init__(
        self,
        plan: type[RayPPOTrainer],
        cfg: Config,
        client: type[InferenceClient] = InferenceClient,
        engine: Any = None,  # one that has started already, and is not shut down
        dispatch: Any = None,  # other workers than one in this process
        env: str = f"{__name__}:OddBytes",
    ) -> None:
        self.cfg, self._engine_is_up = cfg, engine is not None
        tokenizer = AutoTokenizer.from_pretrained(cfg.trainer.policy.model.path)
        tokenizer.chat_template = CHAT
        rules = EpisodeLimits(
            spares=cfg.generator.oversample_per_prompt, on_nonfinite=cfg.trainer.on_nonfinite
        )
        own = replace(
            engine_config(cfg.trainer.policy.model.path),
            max_num_seqs=min(64, cfg.generator.max_num_seqs),
        )
        self.engine: Any = engine or TransformersEngine(own)
        hybrid = range(1, 1 + cfg.generator.hybrid_engines)
        self.client = client([self.engine, *(TransformersEngine(own) for _ in hybrid)], 60)
        self.dispatch, self.tracker = dispatch or RecordingDispatch(cfg), Rows()
        self.trainer = plan.get_trainer(
            cfg=cfg,
            tracker=self.tracker,
            tokenizer=tokenizer,
            train_dataset=prompts(10, env),
            eval_dataset=prompts(3, env),
            inference_engine_client=self.client,
            generator=EpisodeGenerator(self.client, local_pool(), tokenizer, 64, rules),
        )
        probe = [[1, 2, 3, 4, 5], [9, 8, 7]]
        colocation = self.colocation = (
            Colocation(self.dispatch, self.client, probe, hybrid)
            if cfg.trainer.placement.colocate_all or hybrid
            else None
        )
        source, destination = (
            (colocation.source, colocation.destination)
            if colocation
            else (self.dispatch, self.client)
        )
        self.weight_sync = WeightSync(source, destination, probe, 1e-3)
        if colocation and hybrid:
            colocation.weights, self.weight_sync.expects_late_engines = self.weight_sync, True
        self.trainer.attach(self.dispatch, self.weight_sync, colocation=colocation)

    async def train(self) -> LocalRun:
        if self.colocation:
            await self.colocation.start()
        elif not self._engine_is_up:
            await self.client.start()
        try:
            await self.trainer.run()
        finally:
            await self.dispatch.shutdown()
            if not self._engine_is_up:
                await self.client.shutdown()
        return self

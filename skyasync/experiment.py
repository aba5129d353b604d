"""The experiment: one factory method per part, and ``run()``.

Invariant: every part of a run is made by exactly one method here, so overriding that method swaps the part
and nothing else. Factories run in the controller process, in the order of ``build``; none of them waits for
a model to load (``start`` does that for all parts at once).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

from skyasync.config.check import config_warnings
from skyasync.config.load import dump_config
from skyasync.config.paths import model_path, refuse_foreign_checkpoints
from skyasync.config.sampling import backend
from skyasync.engines.protocol import EngineConfig
from skyasync.engines.settings import engine_config, sync_tolerance
from skyasync.observe.run_dir import RunDirectory, default_run_name
from skyasync.registry import absolute_reference, resolve_reference
from skyasync.rewards.settings import settle_references
from skyasync.rollout.sources import absolute
from skyasync.trainer import RayPPOTrainer

PROBES = 8  # prompts whose log-probabilities prove a weight sync


class BasePPOExp:
    """Everything a run is made of. ``run()`` is called by the program; the rest is there to be overridden.

    Args:
        cfg: a ``skyasync.config.Config`` (or a subclass of it with keys of one's own).
    """

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self.run_dir: RunDirectory | None = None
        self.gpus = False
        self.placement_name = f"skyasync-{uuid4().hex}"
        self._placement: Any = None
        self._dispatch: Any = None
        self._client: Any = None
        self._generator: Any = None
        self._tracker: Any = None  # until a trainer runs, which closes it

    # ---------------------------------------------------------------- parts

    def get_tokenizer(self) -> Any:
        from skyasync.rollout.tokenizer import load_tokenizer

        return load_tokenizer(self.cfg.trainer.policy.model.path)

    def get_train_dataset(self) -> Sequence[Any]:
        return self._prompts(self.cfg.data.train_data)

    def get_eval_dataset(self) -> Sequence[Any] | None:
        return self._prompts(self.cfg.data.val_data, held_out=True) if self.cfg.data.val_data else None

    def get_tracker(self) -> Any:
        from skyasync.observe.trackers import MultiTracker

        trainer = self.cfg.trainer
        assert self.run_dir is not None
        return MultiTracker(trainer.logger, self.run_dir, asdict(self.cfg), project_name=trainer.project_name)

    def get_callbacks(self) -> list[Any]:
        """Callbacks of the trainer; see ``skyasync.callbacks``."""
        return []

    def get_colocate_pg(self, timeout: float = 180) -> Any:
        """The placement of all workers and engines, granted by Ray within ``timeout`` seconds."""
        from skyasync.workers.placement import plan_slots, reserve

        slots = plan_slots(self.cfg, gpus=self.gpus, with_reference=self.needs_reference())
        return reserve(slots, timeout, self.placement_name)

    def get_inference_client(self) -> Any:
        """The client in front of the engines, whose processes start; their models load in ``start``."""
        from skyasync.engines.client import InferenceClient
        from skyasync.engines.ray_engine import RayEngine

        generator, config = self.cfg.generator, self.engine_config()
        engines = [
            RayEngine(
                backend(self.cfg),
                replace(config, extra={**config.extra, "engine_index": index}),
                self._placement.options("engines", index),
                generator.engine_start_timeout_s,
            )
            for index in range(generator.num_inference_engines)
        ]
        return InferenceClient(engines, generator.request_timeout_s, lambda: self._tokenizer)

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:
        """What turns prompts into trajectories: environments, or the program of ``generator.agent_program``."""
        if cfg.generator.agent_program:
            return self.get_agent_generator(cfg, tokenizer, inference_engine_client)
        from skyasync.envs.episodes import EnvSettings
        from skyasync.envs.pool import ray_pool
        from skyasync.rewards.settings import env_settings
        from skyasync.rollout.early_end import decider
        from skyasync.rollout.generator import EpisodeGenerator, EpisodeRules

        pool = ray_pool(EnvSettings.of(cfg, env_settings(cfg.environment)), cfg.environment.num_workers)
        return EpisodeGenerator(
            inference_engine_client,
            pool,
            tokenizer,
            self.engine_config().max_model_len,
            EpisodeRules.of(cfg),
            cfg.data.apply_chat_template,
            decider(cfg.trainer.algorithm.dynamic_sampling),
        )

    def get_agent_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:
        """What plays agent programs through the endpoint."""
        from skyasync.rollout.agent_generator import AgentGenerator
        from skyasync.rollout.agent_pool import AgentPool, ray_processes
        from skyasync.rollout.endpoint import Endpoint
        from skyasync.rollout.rules import EpisodeRules

        host = cfg.generator.endpoint_host
        endpoint = Endpoint(inference_engine_client, tokenizer, self.engine_config().max_model_len, host)
        processes = ray_processes(
            cfg.generator.agent_program, cfg.environment.env_config, cfg.generator.agent_env, host
        )
        pool = AgentPool(processes, cfg.environment.num_workers)
        return AgentGenerator(endpoint, pool, tokenizer, EpisodeRules.of(cfg))

    def get_dispatch(self) -> Any:
        """The policy's and the reference model's processes; their models load in ``start``."""
        from skyasync.workers.dispatch import RayWorkerDispatch

        return RayWorkerDispatch(self.cfg, self._placement.ranks("policy"), self._placement.ranks("reference"))

    def get_weight_sync(self, dispatch: Any, inference_engine_client: Any, probe: Sequence[Sequence[int]]) -> Any:
        """The way of the weights from the policy to the engines."""
        from skyasync.weight_sync.sync import WeightSync

        probe = probe if self.cfg.generator.verify_weight_sync else ()
        return WeightSync(dispatch, inference_engine_client, probe, sync_tolerance(self.cfg, gpus=self.gpus))

    def get_trainer(self, cfg: Any, tracker: Any, tokenizer: Any, train_dataset: Any, eval_dataset: Any,
                    inference_engine_client: Any, generator: Any, colocate_pg: Any) -> RayPPOTrainer:  # fmt: skip
        """The plan: by default the one that ``trainer.plan`` names."""
        from skyasync.plans import PLANS

        plan = cfg.trainer.plan
        trainer_class = resolve_reference(plan, kind="plan") if ":" in plan else PLANS[plan]
        return trainer_class.get_trainer(
            cfg=cfg,
            tracker=tracker,
            tokenizer=tokenizer,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            inference_engine_client=inference_engine_client,
            generator=generator,
            colocate_pg=colocate_pg,
        )

    # ---------------------------------------------------------------- run

    def run(self) -> dict[str, float] | None:
        """Train on a Ray cluster; returns the last metrics, or None if the run was stopped."""
        from skyasync.controller import run_in_controller
        from skyasync.workers.cluster import cluster

        self.prepare()
        with cluster(self.cfg, with_reference=self.needs_reference()) as gpus:
            self.gpus = gpus
            try:
                return run_in_controller(self, progress=self.cfg.trainer.progress)
            finally:
                self._report()

    def _report(self) -> None:
        from skyasync.observe.plots import plot_reward
        from skyasync.observe.summary import print_summary

        assert self.run_dir is not None
        if self.run_dir.metrics.exists():  # the run may have ended before its first step
            plot_reward(self.run_dir.metrics, self.run_dir.reward_plot)
            print_summary(self.run_dir.metrics)
        print(f"run folder: {os.path.relpath(self.run_dir.path)}")

    def prepare(self) -> None:
        """What must be settled before any process starts: the model's folder and the run's folder."""
        from skyasync.envs.openrlhf import settle_agent_file

        for line in config_warnings(self.cfg):
            print(f"warning: {line}", file=sys.stderr)
        settle_agent_file(self.cfg)
        trainer = self.cfg.trainer
        trainer.policy.model.path = model_path(trainer.policy.model.path)
        trainer.ref.model.path = model_path(trainer.ref.model.path or trainer.policy.model.path)
        for name in ("ckpt_path", "export_path"):
            if getattr(trainer, name):
                setattr(trainer, name, str(Path(getattr(trainer, name)).expanduser().resolve()))
        refuse_foreign_checkpoints(trainer)
        for name in ("train_data", "val_data"):
            setattr(self.cfg.data, name, [absolute(source) for source in getattr(self.cfg.data, name)])
        settle_references(self.cfg.environment)
        self.cfg.generator.agent_program = absolute_reference(self.cfg.generator.agent_program)
        name = trainer.run_name or default_run_name(trainer.plan)
        self.run_dir = RunDirectory(trainer.runs_dir, name, resume=trainer.resume_mode == "latest")
        self.run_dir.save_config(dump_config(self.cfg))

    def build(self) -> RayPPOTrainer:
        """Make every part. Blocks on Ray, so the controller calls it off its event loop.

        The processes of engines and models come first: importing their libraries takes each of them seconds.
        """
        from skyasync.rollout.datasets import warn_of_overlap

        cfg = self.cfg
        self._placement = self.get_colocate_pg(cfg.trainer.placement.timeout_s)
        self._client = self.get_inference_client()
        self._dispatch = self.get_dispatch()
        tokenizer = self._tokenizer
        train_dataset, eval_dataset = self.get_train_dataset(), self.get_eval_dataset()
        warn_of_overlap(train_dataset, eval_dataset or [])
        tracker = self._tracker = self.get_tracker()
        generator = self._generator = self.get_generator(cfg, tokenizer, self._client)
        trainer = self.get_trainer(
            cfg=cfg,
            tracker=tracker,
            tokenizer=tokenizer,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            inference_engine_client=self._client,
            generator=generator,
            colocate_pg=self._placement,
        )
        trainer.callbacks.extend(self.get_callbacks())
        self._share_threads(trainer.asynchronous)
        return trainer

    async def start(self, trainer: RayPPOTrainer) -> None:
        """Load all models, at the same time, and hand them to the trainer."""
        from skyasync.observe.timeline import Timeline
        from skyasync.rollout.chat import ChatTokenizer
        from skyasync.together import run_together

        await run_together(self._client.start(), self._dispatch.start(trainer.total_updates))
        chat = ChatTokenizer(trainer.tokenizer, self.cfg.data.apply_chat_template)
        probe = [chat.prompt(trainer.prompts.prompt(p).messages) for p in range(min(PROBES, trainer.dataset_size))]
        weight_sync = self.get_weight_sync(self._dispatch, self._client, probe)
        assert self.run_dir is not None
        trainer.attach(self._dispatch, weight_sync, timeline=Timeline(self.run_dir.timeline), run_dir=self.run_dir)
        self._tracker = None

    async def close(self) -> None:
        """Shut every part down; parts that were never made are skipped."""
        if self._tracker is not None:
            self._tracker.close()
        if hasattr(self._generator, "close"):  # first: it still asks the engines
            await self._generator.close()
        parts = [part for part in (self._client, self._dispatch) if part is not None]
        await asyncio.gather(*(part.shutdown() for part in parts), return_exceptions=True)

    # ---------------------------------------------------------------- what the parts share

    @cached_property
    def _tokenizer(self) -> Any:
        return self.get_tokenizer()

    def needs_reference(self) -> bool:
        algorithm = self.cfg.trainer.algorithm
        return algorithm.use_kl_loss or algorithm.use_kl_in_reward

    def engine_config(self) -> EngineConfig:
        return engine_config(self.cfg, gpus=self.gpus)

    def _share_threads(self, overlap: bool) -> None:
        from skyasync.workers.placement import share_threads

        policy, engine = share_threads(self.cfg, os.cpu_count() or 1, overlap=overlap)
        self.cfg.trainer.policy.threads = policy
        for part in getattr(self._client, "engines", []):
            if hasattr(part, "set_threads"):
                part.set_threads(engine)

    def _prompts(self, sources: Sequence[str], *, held_out: bool = False) -> Sequence[Any]:
        from skyasync.rollout.datasets import load_prompts

        return load_prompts(sources, self.cfg, self._tokenizer, held_out=held_out)

"""The experiment: one factory method per part, and ``run()``.

Invariant: every part of a run is made by exactly one method here, so overriding that method swaps the part
and nothing else. Factories run in the controller process, in the order of ``build``; none of them waits for
a model to load (``start`` does that for all parts at once).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from traceback import format_exception
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from skyasync.config.check import config_warnings
from skyasync.config.frozen import freeze
from skyasync.config.load import dump_config
from skyasync.config.paths import refuse_foreign_checkpoints
from skyasync.config.resume import Resume, checkpoints_of, go_on_beside, settle_resume_mode
from skyasync.config.sampling import backend
from skyasync.config.schema import Config
from skyasync.config.secrets import Secrets, hidden
from skyasync.engines.protocol import EngineConfig, InferenceEngine
from skyasync.engines.settings import chosen_backend, engine_config, engines_per_device, not_replaced, rounding
from skyasync.engines.vllm.server_check import KEY_VARIABLE, check_servers
from skyasync.engines.wanted import FILE as ENGINES_FILE
from skyasync.observe.run_dir import RunDirectory, check_name, default_run_name, shown
from skyasync.plans import PLANS
from skyasync.preflight.data import check_data, check_lengths
from skyasync.preflight.devices import without_gpus
from skyasync.preflight.folders import check_folders, check_resuming
from skyasync.preflight.judges import check_judges
from skyasync.preflight.parts import check_callbacks, check_parts, plans_named_by
from skyasync.preflight.settling import settle_models, settle_references
from skyasync.restarting import Restarting
from skyasync.rollout.tokenizer import quick_tokenizer, told
from skyasync.trainer import RayPPOTrainer
from skyasync.workers.roles import POLICY, ROLES, Role

if TYPE_CHECKING:  # what these import is loaded where it is used
    from skyasync.callbacks import TrainerCallback
    from skyasync.cluster.placement import Placement
    from skyasync.cluster.watch import Watch
    from skyasync.engines.client import InferenceClient
    from skyasync.engines.membership import Membership
    from skyasync.engines.revival import Revival
    from skyasync.observe.timeline import Timeline
    from skyasync.observe.trackers import Tracker
    from skyasync.rollout.contract import Generator
    from skyasync.rollout.judging import Judges
    from skyasync.rollout.tokenizer import Tokenizer
    from skyasync.rollout.types import Prompt
    from skyasync.training.parts import Client
    from skyasync.weight_sync.sync import Destination, Source, WeightSync
    from skyasync.weight_sync.turns import DeviceTurns
    from skyasync.workers.dispatch import RayWorkerDispatch

RELEASE_S = 10.0  # for the policy to remove the weights that it has kept
PROBE_TOKENS = 256  # of the prompts whose log-probabilities prove a weight sync


class BasePPOExp:
    """Everything a run is made of. ``run()`` is called by the program; the rest is there to be overridden.

    Args:
        cfg: a ``skyasync.config.Config`` (or a subclass of it with keys of one's own).
    """

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.run_dir: RunDirectory | None = None
        self.gpus = False
        self.placement_name = f"skyasync-{uuid4().hex}"
        self._placement: Any = None
        self._dispatch: Any = None
        self._client: Any = None
        self._generator: Any = None
        self._revival: Revival | None = None
        self._membership: Membership | None = None
        self._judge_keys: dict[str, str] = {}  # of judges' servers, from the program's environment; written nowhere
        self._engines_key = os.environ.get(KEY_VARIABLE, "")
        self._weight_sync: Any = None
        self.restarting: Restarting | None = None
        self._watch: Watch | None = None
        self._rows: dict[str, Any] = {}  # of data sources that are functions, which are called once
        self._began_s: float | None = None  # since 1970, when ``run`` was called
        self._begun = False  # processes of the run's own have been started
        self._tracker: Tracker | None = None  # until a trainer runs, which closes it

    # ---------------------------------------------------------------- parts

    def get_tokenizer(self) -> Tokenizer:
        from skyasync.rollout.tokenizer import load_tokenizer

        return load_tokenizer(self.cfg.trainer.policy.model.path)

    def get_train_dataset(self) -> Sequence[Prompt]:
        return self._prompts(self.cfg.data.train_data)

    def get_eval_dataset(self) -> Sequence[Prompt] | None:
        from skyasync.data.datasets import load_eval_prompts

        return load_eval_prompts(self.cfg, self._tokenizer, known=self._rows) or None

    def get_tracker(self) -> Tracker:
        from skyasync.observe.trackers import MultiTracker

        trainer = self.cfg.trainer
        assert self.run_dir is not None
        return MultiTracker(trainer.logger, self.run_dir, hidden(asdict(self.cfg)), project_name=trainer.project_name)

    def get_callbacks(self) -> list[TrainerCallback]:
        """Callbacks of the trainer; see ``skyasync.callbacks``."""
        return []

    def get_colocate_pg(self, timeout: float = 180) -> Placement:
        """The placement of all workers and engines, granted by Ray within ``timeout`` seconds."""
        from skyasync.cluster.placement import plan_slots, reserve

        slots = plan_slots(self.cfg, gpus=self.gpus, roles=self.roles())
        return reserve(slots, timeout, self.placement_name)

    def get_inference_client(self) -> InferenceClient:
        """The client in front of the engines, whose processes start; their models load in ``start``."""
        from skyasync.engines.client import InferenceClient
        from skyasync.engines.ray_engine import RayEngine

        generator, config = self.cfg.generator, self.engine_config()
        if generator.engines:
            return InferenceClient(self.get_servers(config), generator.request_timeout_s, lambda: self._tokenizer)
        engines = [
            RayEngine(
                backend(self.cfg),
                replace(config, extra={**config.extra, "engine_index": index}),
                self._placement.options("engines", index),
                generator.engine_start_timeout_s,
            )
            for index in range(generator.num_inference_engines)
        ]
        slots = self._placement.slots
        devices = len(slots.of.get(POLICY, ()))
        at_once = devices if engines_per_device(self.cfg) > 1 else 0  # the first of each device, and so on
        return InferenceClient(engines, generator.request_timeout_s, lambda: self._tokenizer, at_once)

    def get_servers(self, config: EngineConfig) -> list[InferenceEngine]:
        """Engines that others have started, at the addresses of ``generator.engines``."""
        return [self._server(config, url) for url in self.cfg.generator.engines]

    def _server(self, config: EngineConfig, url: str) -> InferenceEngine:
        from skyasync.engines.vllm.server import VLLMServerEngine

        own = {"url": url, "start_s": self.cfg.generator.engine_start_timeout_s, "key": self._engines_key}
        return VLLMServerEngine(replace(config, extra=config.extra | own))

    async def get_newcomer(self, name: str) -> InferenceEngine:
        """An engine that joins while the run goes on: the server with this address, or one more of the run's own.

        Raises:
            UserError: if it is not fit, or there is no room for it.
        """
        generator, config = self.cfg.generator, self.engine_config()
        if generator.engines:
            await asyncio.to_thread(check_servers, [name], config, generator.weight_sync_dir)
            return self._server(config, name)
        from skyasync.engines.ray_engine import another

        return await asyncio.to_thread(another, self._client.engines, generator.devices_per_engine if self.gpus else 0)

    def get_generator(self, cfg: Config, tokenizer: Tokenizer, inference_engine_client: InferenceClient) -> Generator:
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
            cfg.data.chat_history == "template",
            decider(cfg.trainer.algorithm.dynamic_sampling),
            self.get_judges(cfg, tokenizer, inference_engine_client),
        )

    def get_judges(self, cfg: Config, tokenizer: Tokenizer, inference_engine_client: InferenceClient) -> Judges | None:
        """The models of ``environment.judges``, which judge what has been played; None without any."""
        from skyasync.rollout.judging import Judges

        if not cfg.environment.judges:
            return None
        length = self.engine_config().max_model_len
        return Judges.of(cfg, self._judge_keys, inference_engine_client, tokenizer, length)

    def get_agent_generator(
        self, cfg: Config, tokenizer: Tokenizer, inference_engine_client: InferenceClient
    ) -> Generator:
        """What plays agent programs through the endpoint."""
        from skyasync.endpoint.assembly import agent_generator

        folder = self.run_dir.path if self.run_dir else None
        return agent_generator(cfg, tokenizer, inference_engine_client, self.engine_config().max_model_len, folder)

    def get_dispatch(self) -> RayWorkerDispatch:
        """The processes of all roles; their models load in ``start``."""
        from skyasync.workers.dispatch import RayWorkerDispatch

        return RayWorkerDispatch(
            self.cfg,
            {role.name: self._placement.ranks(role.name) for role in self.roles()},
            self.engine_config().weight_sync_backend,
        )

    def get_weight_sync(
        self, dispatch: Source, inference_engine_client: Destination, probe: Sequence[Sequence[int]]
    ) -> WeightSync:
        """The way of the weights from the policy to the engines."""
        from skyasync.weight_sync.sync import WeightSync

        generator = self.cfg.generator
        return WeightSync(
            dispatch,
            inference_engine_client,
            probe if generator.verify_weight_sync else (),
            tolerance=generator.weight_sync_tolerance,
            rounding=rounding(self.cfg, gpus=self.gpus),
            interval=generator.verify_interval,
        )

    def get_revival(self, weight_sync: WeightSync, timeline: Timeline) -> Revival | None:
        """What replaces engines that die; None where the first death ends the run."""
        from skyasync.engines.client import InferenceClient
        from skyasync.engines.revival import Revival

        generator = self.cfg.generator
        ours = isinstance(self._client, InferenceClient) and hasattr(weight_sync, "between_syncs")
        if not generator.max_engine_restarts or not ours:
            return None
        if line := not_replaced(self.cfg, gpus=self.gpus):
            print(line)
            return None
        weight_sync.keeper = self._dispatch
        return Revival(
            self._client,
            weight_sync,
            max_restarts=generator.max_engine_restarts,
            heartbeat_s=generator.heartbeat_s,
            heartbeat_timeout_s=generator.heartbeat_timeout_s,
            limit_s=self.cfg.trainer.step_timeout_s,
            timeline=timeline,
        )

    def get_membership(self, weight_sync: WeightSync, revival: Revival) -> Membership:
        """What lets engines join and leave while the run goes on."""
        from skyasync.engines.membership import Membership

        assert self.run_dir is not None
        generator = self.cfg.generator
        names = generator.engines or [str(index) for index in range(generator.num_inference_engines)]
        return Membership(
            self._client, weight_sync, revival, self.get_newcomer, names, self.run_dir.path / ENGINES_FILE,
            interval_s=generator.heartbeat_s, limit_s=self.cfg.trainer.step_timeout_s,
        )  # fmt: skip

    def get_trainer(self, cfg: Config, tracker: Tracker, tokenizer: Tokenizer, train_dataset: Sequence[Prompt],
                    eval_dataset: Sequence[Prompt] | None, inference_engine_client: Client, generator: Generator,
                    colocate_pg: object) -> RayPPOTrainer:  # fmt: skip
        """The plan: by default the one that ``trainer.plan`` names."""
        return PLANS.find(cfg.trainer.plan).get_trainer(
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
        from skyasync.observe.status import told
        from skyasync.observe.timeline import to_the_end

        self.prepare()
        assert self.run_dir is not None
        self._began_s = time.time()
        try:
            with told(self.run_dir.path), to_the_end(self.run_dir.timeline):
                return self._run()
        except (Exception, KeyboardInterrupt) as error:
            if not self._begun:
                self.run_dir.discard()
            elif isinstance(error, Exception) and not self.run_dir.error.exists():
                self.run_dir.save_error("".join(format_exception(error)))
            raise
        finally:
            self._make_page()

    def _run(self) -> dict[str, float] | None:
        from skyasync.cluster.logs import ProcessLogs
        from skyasync.cluster.ray_cluster import cluster
        from skyasync.controller import run_in_controller

        assert self.run_dir is not None
        self.restarting = Restarting(self, self.run_dir.path)
        (self.run_dir.path / ENGINES_FILE).unlink(missing_ok=True)  # of a run that was killed
        logs = ProcessLogs(self.run_dir.logs, hide=self.run_dir.secrets.hide_all)
        with cluster(self.cfg, roles=self.roles(), logs=logs) as gpus:
            self.gpus, self._begun = gpus, True
            if line := chosen_backend(self.cfg, gpus=gpus):
                print(line)
            try:
                return run_in_controller(self, logs)
            finally:
                self._report()

    def _report(self) -> None:
        from skyasync.observe.plots import plot_reward
        from skyasync.observe.summary import print_summary

        assert self.run_dir is not None
        if self.run_dir.metrics.exists():  # the run may have ended before its first step
            plot_reward(self.run_dir.metrics, self.run_dir.reward_plot)
            print_summary(self.run_dir.metrics)
            print(f"run folder: {shown(self.run_dir.path)}")

    def _make_page(self) -> None:
        """Behind all else: what the page says of the run's end is then written down."""
        from skyasync.observe.report.page import write_report

        assert self.run_dir is not None
        if self.cfg.trainer.report and self.run_dir.metrics.exists():
            write_report(self.run_dir.path)

    def prepare(self) -> None:
        """Settle and check what can be before any process starts; the run's folder is made last.

        From then on the configuration is read-only: parts are made from it.

        Raises:
            UserError: for the first thing that is wrong. Nothing is left behind then.
        """
        for line in config_warnings(self.cfg):
            print(f"warning: {line}", file=sys.stderr)
        trainer = self.cfg.trainer
        settle_references(self.cfg)
        ours = self._is_ours("get_trainer")
        check_parts(self.cfg, [PLANS.find(trainer.plan)] if ours else plans_named_by(type(self).get_trainer))
        go_on_beside(trainer)
        name = trainer.run_name or default_run_name(trainer.plan.rpartition(":")[2])
        check_name(trainer.runs_dir, name)
        refuse_foreign_checkpoints(trainer)
        check_folders(trainer)
        if without_gpus(self.cfg.ray.address):
            engine_config(self.cfg, gpus=False)
        if self.cfg.generator.engines:
            check_servers(self.cfg.generator.engines, self.engine_config(), self.cfg.generator.weight_sync_dir)
        prompts = check_data(
            self.cfg, self._rows, train=self._is_ours("get_train_dataset"), held_out=self._is_ours("get_eval_dataset")
        )
        settle_models(self.cfg, self.roles(), own_tokenizer=not self._is_ours("get_tokenizer"))
        if self._is_ours("get_tokenizer") and Path(trainer.policy.model.path, "tokenizer.json").is_file():
            own = quick_tokenizer(trainer.policy.model.path)
            check_lengths(prompts, told(own, self.cfg.data.chat_template, self.cfg.data.chat_template_kwargs), self.cfg)
        check_resuming(self.cfg)
        if self._is_ours("get_judges"):
            self._judge_keys = check_judges(self.cfg)
        if line := settle_resume_mode(trainer):
            print(line)
        self.run_dir = RunDirectory(trainer.runs_dir, name, resume=Resume.of(trainer).within(checkpoints_of(trainer)))
        self.run_dir.secrets = Secrets.of(self.cfg)
        self.run_dir.save_config(dump_config(self.cfg, secrets=False))
        freeze(self.cfg)

    def _is_ours(self, factory: str) -> bool:
        """Whether a factory is the library's own, not a subclass's."""
        return getattr(type(self), factory) is getattr(BasePPOExp, factory)

    def build(self) -> RayPPOTrainer:
        """Make every part. Blocks on Ray, so the controller calls it off its event loop.

        The processes of engines and models come first: importing their libraries takes each of them seconds.
        """
        freeze(self.cfg)  # what comes to another process comes as a copy, which is free
        self._placement = self.get_colocate_pg(self.cfg.trainer.placement.timeout_s)
        self._client = self.get_inference_client()
        self._dispatch = self.get_dispatch()
        return self.make_trainer()

    def make_trainer(self) -> RayPPOTrainer:
        from skyasync.data.datasets import warn_of_overlap

        cfg, tokenizer = self.cfg, self._tokenizer
        train_dataset, eval_dataset = self.get_train_dataset(), self.get_eval_dataset()
        warn_of_overlap(train_dataset, eval_dataset or [])
        tracker = self._tracker = self.get_tracker()
        if self._generator is None:
            self._generator = self.get_generator(cfg, tokenizer, self._client)
        trainer = self.get_trainer(
            cfg=cfg,
            tracker=tracker,
            tokenizer=tokenizer,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            inference_engine_client=self._client,
            generator=self._generator,
            colocate_pg=self._placement,
        )
        callbacks = self.get_callbacks()
        check_callbacks([type(callback) for callback in callbacks])
        trainer.callbacks.extend(callbacks)
        self._share_threads(trainer.asynchronous)
        return trainer

    async def start(self, trainer: RayPPOTrainer) -> None:
        """Load all models, at the same time unless they share devices, and hand them to the trainer."""
        from skyasync.cluster.watch import watching
        from skyasync.observe.timeline import Timeline
        from skyasync.rollout.chat import ChatTokenizer
        from skyasync.together import run_together
        from skyasync.weight_sync.gaps import choose_probe
        from skyasync.weight_sync.turns import DeviceTurns

        chat = ChatTokenizer(trainer.tokenizer, self.cfg.data.apply_chat_template)
        prompts = (
            chat.prompt(trainer.prompts.prompt(place).messages).tolist() for place in range(trainer.prompts.rows)
        )
        probe, turns = choose_probe(prompts, PROBE_TOKENS), None
        if self.cfg.trainer.placement.colocate_all:
            asked = probe if self.cfg.generator.verify_weight_sync else ()
            turns = DeviceTurns(self._dispatch, self._client, asked)
            await turns.start(trainer.total_updates)
        else:
            await run_together(self._client.start(), self._dispatch.start(trainer.total_updates))
        source, destination = (turns.source, turns.destination) if turns else (self._dispatch, self._client)
        weight_sync = self._weight_sync = self.get_weight_sync(source, destination, probe)
        async with asyncio.timeout(self.cfg.trainer.step_timeout_s):
            if not self.cfg.generator.engines:  # else they have weights of a run before, perhaps
                await weight_sync.measure_floor()
        assert self.run_dir is not None
        timeline = Timeline(self.run_dir.timeline, began=self._began_s)
        timeline.add_span("start", "trainer", self._began_s or timeline.now(), timeline.now())
        trainer_cfg = self.cfg.trainer
        self._watch = watching(self.run_dir.path, trainer_cfg.ckpt_path, copies=trainer_cfg.ckpt_async)
        self._revival = self.get_revival(weight_sync, timeline)
        if self._revival is not None:
            self._membership = self.get_membership(weight_sync, self._revival)
        self.attach(trainer, timeline, turns)

    def attach(self, trainer: RayPPOTrainer, timeline: Timeline, turns: DeviceTurns | None = None) -> None:
        if self._watch is not None:
            trainer.callbacks.insert(0, self._watch)  # those behind it see its metrics
        if self._revival is not None:
            trainer.callbacks.append(self._revival)
        if self._membership is not None:
            trainer.callbacks.append(self._membership)
        trainer.attach(self._dispatch, self._weight_sync, timeline=timeline, run_dir=self.run_dir, turns=turns)
        self._tracker = None

    async def close(self) -> None:
        """Shut every part down; parts that were never made are skipped."""
        if self._tracker is not None:
            self._tracker.close()
        if self._watch is not None:
            self._watch.close()
        if hasattr(self._generator, "close"):  # first: it still asks the engines
            await self._generator.close()
        if self._membership is not None:
            await self._membership.close()
        if self._revival is not None:  # before the engines: those that end now are not to be replaced
            await self._revival.close()
        if self.cfg.generator.weight_sync_dir and self._weight_sync is not None:
            with contextlib.suppress(Exception):  # the run may have ended because the policy did
                async with asyncio.timeout(RELEASE_S):
                    await self._weight_sync.release_kept()
        parts = [part for part in (self._client, self._dispatch) if part is not None]
        await asyncio.gather(*(part.shutdown() for part in parts), return_exceptions=True)

    # ---------------------------------------------------------------- what the parts share

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return told(self.get_tokenizer(), self.cfg.data.chat_template, self.cfg.data.chat_template_kwargs)

    def roles(self) -> list[Role]:
        """The run's roles, the policy first: by the table, or as a method ``needs_<role>`` of the experiment says."""

        def needed(role: Role) -> bool:
            own = getattr(self, f"needs_{role.name}", None)
            return own() if own else role.wanted(self.cfg)

        return [role for role in ROLES.values() if needed(role)]

    def needs_reference(self) -> bool:
        return ROLES["reference"].wanted(self.cfg)

    def engine_config(self) -> EngineConfig:
        return engine_config(self.cfg, gpus=self.gpus)

    def _share_threads(self, overlap: bool) -> None:
        from skyasync.cluster.placement import share_threads

        policy, engine = share_threads(self.cfg, os.cpu_count() or 1, overlap=overlap)
        parts = [(self._dispatch, policy), *((part, engine) for part in getattr(self._client, "engines", []))]
        for part, threads in parts:
            if hasattr(part, "set_threads"):
                part.set_threads(threads)

    def _prompts(self, sources: Sequence[str]) -> Sequence[Prompt]:
        from skyasync.data.datasets import load_prompts, stream_prompts

        if self.cfg.data.streaming:
            return stream_prompts(sources, self.cfg, self._tokenizer)
        return load_prompts(sources, self.cfg, self._tokenizer, known=self._rows)

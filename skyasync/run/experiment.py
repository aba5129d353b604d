"""The experiment: one factory method per component, and ``run()``.

Invariant: every component of a run is made by exactly one method here, so overriding that method
replaces the component and nothing else. Factories run in the process that trains, in the order of
``components``; none of them waits for a model to load.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, cast
from uuid import uuid4

from skyasync.config.keys import Keys
from skyasync.config.load import dump_config
from skyasync.config.schema import Config
from skyasync.config.schema.sampling import backend
from skyasync.config.secrets import hidden
from skyasync.inference.elastic import FILE as ENGINES_FILE
from skyasync.inference.interface import ENGINES, EngineConfig, InferenceEngine
from skyasync.inference.origin_check import KEY_VARIABLE
from skyasync.inference.remote import check_servers
from skyasync.inference.settings import engine_config, engines_per_device, rounding
from skyasync.observability.jsonl import replace_text
from skyasync.observability.run_dir import RunDirectory
from skyasync.preflight.prepare import prepare
from skyasync.rollout.generator_api import TrajectoryGenerator
from skyasync.rollout.tokenizer import with_template
from skyasync.rollout.types import GeneratorInput, Trajectory
from skyasync.run import launch
from skyasync.run.components import Components
from skyasync.run.recovery import Recovery
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans import PLANS
from skyasync.workers.roles import POLICY, ROLES, Role

if TYPE_CHECKING:
    from skyasync.callbacks import RunExtension
    from skyasync.inference.client import InferenceClient
    from skyasync.inference.elastic import ElasticEngines
    from skyasync.inference.interface import EngineStats
    from skyasync.inference.supervisor import EngineSupervisor
    from skyasync.observability.timeline import Timeline
    from skyasync.observability.trackers import Tracker
    from skyasync.rollout.generator import Judges
    from skyasync.rollout.generator_api import Generator
    from skyasync.rollout.tokenizer import Tokenizer
    from skyasync.rollout.types import Prompt
    from skyasync.run.placement import Placement
    from skyasync.trainer.context import Client
    from skyasync.weight_sync.sync import Destination, Paused, Source, WeightSync
    from skyasync.workers.dispatch import RayWorkerDispatch


log = logging.getLogger(__name__)


class BasePPOExp:
    """The factories of a run's components.

    The program calls ``run()``; subclasses override any other method.

    Args:
        cfg: a ``skyasync.config.Config`` (or a subclass of it with further keys).
    """

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.run_dir: RunDirectory | None = None
        self.gpus = False
        self.placement_name = f"skyasync-{uuid4().hex}"
        self.components = Components(self)
        self.callbacks: list[RunExtension] = []  # the argument of ``main``
        self.restarting: Recovery | None = None
        self.began_s: float | None = None
        """Time of the call of ``run``, in seconds since 1970."""
        # Rows by data source, of sources that are functions, which are called once.
        self.data_rows: dict[str, Any] = {}
        self.judge_keys: dict[str, str] = {}
        """Keys of judges' servers, from the program's environment. They are in no file."""
        self._engines_key = os.environ.get(KEY_VARIABLE, "")

    # ---------------------------------------------------------------- components

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the policy's model, with its chat template."""
        from skyasync.rollout.tokenizer import load_tokenizer

        return load_tokenizer(self.cfg.trainer.policy.model.path)

    def get_train_dataset(self) -> Sequence[Prompt]:
        """The training prompts, by default those of ``data.train_data``."""
        from skyasync.data.datasets import load_prompts, stream_prompts

        data = self.cfg.data
        if data.streaming:
            return stream_prompts(data.train_data, self.cfg, self.tokenizer)
        return load_prompts(data.train_data, self.cfg, self.tokenizer, loaded_rows=self.data_rows)

    def get_eval_dataset(self) -> Sequence[Prompt] | None:
        """The validation prompts, by default of ``data.val_data`` and ``data.val_sets``, or None."""
        from skyasync.data.datasets import load_eval_prompts

        return load_eval_prompts(self.cfg, self.tokenizer, loaded_rows=self.data_rows) or None

    def get_tracker(self) -> Tracker:
        """The tracker of the metrics of every step, by default those of ``trainer.logger``."""
        from skyasync.observability.trackers import MultiTracker

        trainer = self.cfg.trainer
        assert self.run_dir is not None
        settings = hidden(asdict(self.cfg))  # without secrets
        return MultiTracker(
            trainer.logger, self.run_dir, settings, project_name=trainer.project_name
        )

    def get_callbacks(self) -> list[RunExtension]:
        """Callbacks besides those of ``main``; see ``skyasync.callbacks``."""
        return []

    def get_colocate_pg(self, timeout: float = 180) -> Placement:
        """The placement of all workers and engines, granted by Ray within ``timeout`` seconds."""
        from skyasync.run.placement import plan_slots, reserve

        slots = plan_slots(self.cfg, gpus=self.gpus, roles=self.roles())
        return reserve(slots, timeout, self.placement_name)

    def get_inference_client(self) -> InferenceClient:
        """The client of the engines. Their processes start here; their models load in ``start``."""
        from skyasync.inference.ray_engine import RayEngine
        from skyasync.run.placement import engine_start_limit

        generator = self.cfg.generator
        config = self.engine_config()
        if generator.engines:
            servers = [self._server(config, url) for url in generator.engines]
            return self._client(servers)
        placement = self.components.placement
        processes = len(placement.slots.bundles)
        start_limit_s = engine_start_limit(self.cfg, processes, os.cpu_count() or 1, gpus=self.gpus)
        engines = []
        for index in range(generator.own_engines):
            numbered_config = replace(config, extra={**config.extra, "engine_index": index})
            options = placement.engine_options(index)
            engine = RayEngine(backend(self.cfg), numbered_config, options, start_limit_s)
            engines.append(engine)
        # Engines of one device start one after the other: each measures the free memory.
        at_once = 0
        if engines_per_device(self.cfg) > 1:
            at_once = len(placement.slots.by_role.get(POLICY, ()))
        return self._client(engines, at_once)

    def _client(self, engines: Sequence[InferenceEngine], at_once: int = 0) -> InferenceClient:
        from skyasync.inference.client import InferenceClient

        generator = self.cfg.generator
        limit_s = generator.request_timeout_s
        adaptive = generator.adaptive_concurrency
        return InferenceClient(engines, limit_s, lambda: self.tokenizer, at_once, adaptive=adaptive)

    def _server(self, config: EngineConfig, url: str) -> InferenceEngine:
        """An engine of another program, at this address."""
        extra = {
            **config.extra,
            "url": url,
            "start_s": self.cfg.generator.engine_start_timeout_s,
            "key": self._engines_key,
        }
        return ENGINES.make(backend(self.cfg), replace(config, extra=extra))

    async def get_joining_engine(self, name: str) -> InferenceEngine:
        """An engine that joins during the run.

        Args:
            name: a server's address if the run's engines are servers; else one more engine of the
                run is started.

        Raises:
            UserError: if the server does not match the run, or no devices are free.
        """
        generator = self.cfg.generator
        config = self.engine_config()
        if generator.engines:
            await asyncio.to_thread(
                check_servers, [name], config, generator.weight_sync_dir, backend(self.cfg)
            )
            return self._server(config, name)
        from skyasync.inference.ray_engine import RayEngine

        devices = generator.devices_per_engine if self.gpus else 0
        may_grow = bool(self.cfg.ray.address)  # the cluster on this machine cannot
        client = self.components.client
        return await asyncio.to_thread(
            RayEngine.one_more, client.engines, client.pool.router.left, devices, may_grow=may_grow
        )

    def get_generator(
        self, cfg: Config, tokenizer: Tokenizer, inference_engine_client: InferenceClient
    ) -> Generator:
        """The generator of trajectories, with environments or ``generator.agent_program``."""
        if cfg.generator.agent_program:
            return self.get_agent_generator(cfg, tokenizer, inference_engine_client)
        from skyasync.envs.episodes import EnvSettings
        from skyasync.envs.pool import ray_pool
        from skyasync.rewards.settings import env_settings
        from skyasync.rollout.generator import EpisodeGenerator, EpisodeLimits
        from skyasync.rollout.group_sampling import early_stop_rule

        settings = EnvSettings.of(cfg, env_settings(cfg.environment))
        pool = ray_pool(settings, cfg.environment.num_workers)
        return EpisodeGenerator(
            inference_engine_client,
            pool,
            tokenizer,
            self.engine_config().max_model_len,
            EpisodeLimits.of(cfg),
            cfg.data.apply_chat_template,
            cfg.data.chat_history == "template",
            early_stop_rule(cfg.trainer.algorithm.dynamic_sampling),
            self.get_judges(cfg, tokenizer, inference_engine_client),
        )

    def get_judges(
        self, cfg: Config, tokenizer: Tokenizer, inference_engine_client: InferenceClient
    ) -> Judges | None:
        """The models of ``environment.judges``, which grade finished episodes; None without any."""
        from skyasync.rollout.generator import Judges

        if not cfg.environment.judges:
            return None
        length = self.engine_config().max_model_len
        return Judges.of(cfg, self.judge_keys, inference_engine_client, tokenizer, length)

    def get_agent_generator(
        self, cfg: Config, tokenizer: Tokenizer, inference_engine_client: InferenceClient
    ) -> Generator:
        """The generator that runs agent programs through the endpoint."""
        from skyasync.agents.generator import agent_generator

        folder = self.run_dir.path if self.run_dir else None
        return agent_generator(
            cfg, tokenizer, inference_engine_client, self.engine_config().max_model_len, folder
        )

    def get_dispatch(self) -> RayWorkerDispatch:
        """The processes of all roles; their models load in ``start``."""
        from skyasync.workers.rank_actors import with_actors

        placements = {}
        for role in self.roles():
            ranks = self.components.placement.ranks(role.name)
            placements[role.name] = with_actors(role, ranks)
        # After the processes have started: this imports torch, as they do at the same time.
        from skyasync.workers.dispatch import RayWorkerDispatch

        return RayWorkerDispatch(
            self.cfg,
            placements,
            self.engine_config().weight_sync_backend,
            self._healthy_engines,
            self._engine_nodes,
        )

    def _healthy_engines(self) -> list[int]:
        if self.components.engines:
            return self.components.client.pool.awake
        # A client of the user does not tell: all count as healthy.
        return list(range(self.cfg.generator.own_engines))

    def _engine_nodes(self) -> dict[int, str]:
        """Ray's names of the healthy engines' nodes, by engine; engines of servers have none."""
        engines = self.components.engines
        nodes = {}
        for index in self._healthy_engines():
            if index < len(engines) and engines[index].node:
                nodes[index] = engines[index].node
        return nodes

    def get_weight_sync(
        self, dispatch: Source, inference_engine_client: Destination, probe: Sequence[Sequence[int]]
    ) -> WeightSync:
        """The weight sync from the policy to the engines."""
        from skyasync.weight_sync.sync import WeightSync

        generator = self.cfg.generator
        return WeightSync(
            dispatch,
            inference_engine_client,
            probe if generator.verify_weight_sync else (),
            tolerance=generator.weight_sync_tolerance,
            rounding=rounding(self.cfg, gpus=self.gpus),
            interval=generator.verify_interval,
            adapted=bool(self.cfg.trainer.policy.lora.rank),
        )

    def get_engine_supervisor(
        self, weight_sync: WeightSync, timeline: Timeline
    ) -> EngineSupervisor | None:
        """The supervisor that replaces failed engines; None if the first failure ends the run."""
        from skyasync.inference.client import InferenceClient
        from skyasync.inference.supervisor import EngineSupervisor
        from skyasync.weight_sync.sync import WeightSync

        generator = self.cfg.generator
        client = self.components.client
        if not generator.max_engine_restarts:
            return None
        if not isinstance(client, InferenceClient) or not isinstance(weight_sync, WeightSync):
            log.warning(
                "engines that fail are not replaced: that takes a client that is an InferenceClient and a weight sync "
                "that is a WeightSync, and these are %s and %s",
                type(client).__name__,
                type(weight_sync).__name__,
            )
            return None
        weight_sync.expects_late_engines = True
        return EngineSupervisor(
            client,
            weight_sync,
            max_restarts=generator.max_engine_restarts,
            heartbeat_s=generator.heartbeat_s,
            heartbeat_timeout_s=generator.heartbeat_timeout_s,
            limit_s=self.cfg.trainer.step_timeout_s,
            timeline=timeline,
            colocation=self.components.colocation,
        )

    def get_elastic_engines(
        self, weight_sync: WeightSync, supervisor: EngineSupervisor
    ) -> ElasticEngines:
        """The component by which engines join and leave during the run."""
        from skyasync.inference.elastic import ElasticEngines

        assert self.run_dir is not None
        generator = self.cfg.generator
        names = generator.engines or list(map(str, range(generator.num_inference_engines)))
        return ElasticEngines(
            self.components.client,
            weight_sync,
            supervisor,
            self.get_joining_engine,
            names,
            self.run_dir.path / ENGINES_FILE,
            interval_s=generator.heartbeat_s,
            limit_s=self.cfg.trainer.step_timeout_s,
        )

    def get_trainer(
        self,
        cfg: Config,
        tracker: Tracker,
        tokenizer: Tokenizer,
        train_dataset: Sequence[Prompt],
        eval_dataset: Sequence[Prompt] | None,
        inference_engine_client: Client,
        generator: Generator,
        colocate_pg: object,
    ) -> RayPPOTrainer:
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
        self.began_s = time.time()
        self.prepare()
        assert self.run_dir is not None
        return launch.run(self, self.run_dir)

    def prepare(self) -> None:
        """Settle and check all settings before any process starts; make the run's folder last.

        From then on the configuration is read-only: components are made from it.

        Raises:
            UserError: for the first problem. Nothing is left on disk then.
        """
        self.run_dir = prepare(self)

    def is_ours(self, factory: str) -> bool:
        """Whether a factory is the library's, not overridden by a subclass."""
        return getattr(type(self), factory) is getattr(BasePPOExp, factory)

    def build(self) -> RayPPOTrainer:
        """Make every component, in the controller's process."""
        return self.components.build()

    async def start(self, trainer: RayPPOTrainer) -> None:
        """Load all models, and attach the trainer to them."""
        await self.components.start(trainer)

    async def close(self) -> None:
        """Shut every component down."""
        await self.components.close()

    # ---------------------------------------------------------------- shared by the components

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return with_template(
            self.get_tokenizer(), self.cfg.data.chat_template, self.cfg.data.chat_template_kwargs
        )

    def roles(self) -> list[Role]:
        """The run's roles, the policy first.

        A method ``needs_<role>`` of the experiment decides, or else the settings.
        """
        roles = []
        for role in ROLES.values():
            needs_role = getattr(self, f"needs_{role.name}", None)
            needed = needs_role() if needs_role else role.has_ranks(self.cfg)
            if needed:
                roles.append(role)
        return roles

    def engine_config(self) -> EngineConfig:
        return engine_config(self.cfg, gpus=self.gpus)


class ReplacingExperiment(BasePPOExp):
    """An experiment that replaces settings which have no effect in it.

    The run's ``config.yaml`` has the user's values.
    """

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self._original_cfg = deepcopy(cfg)

    def prepare(self) -> None:
        # Before ``prepare``, which settles further settings that are to be written.
        original_values: dict[str, object] = {}
        for key in Keys.of(type(self.cfg)):
            value_of = attrgetter(key.path)
            if value_of(self.cfg) != value_of(self._original_cfg):
                original_values[key.path] = value_of(self._original_cfg)
        super().prepare()
        assert self.run_dir is not None
        cfg = deepcopy(self.cfg)
        for path, value in original_values.items():
            group, _, name = path.rpartition(".")
            setattr(attrgetter(group)(cfg), name, value)
        replace_text(self.run_dir.config, dump_config(cfg, secrets=False))


class EnginelessExperiment(ReplacingExperiment):
    """An experiment without engines, such as supervised fine-tuning."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        generator = cfg.generator
        generator.num_inference_engines = 0
        generator.weight_sync_backend = "shared_memory"
        generator.max_engine_restarts = 0
        generator.backend = "transformers"  # needs no optional package
        cfg.trainer.placement.colocate_all = False

    def get_inference_client(self) -> InferenceClient:
        return cast("InferenceClient", NoEngines())

    def get_generator(
        self, cfg: Config, tokenizer: Tokenizer, inference_engine_client: InferenceClient
    ) -> Generator:
        return NoGenerator()

    def get_judges(
        self, cfg: Config, tokenizer: Tokenizer, inference_engine_client: InferenceClient
    ) -> None:
        """None: there are no episodes."""

    def get_weight_sync(
        self, dispatch: Source, inference_engine_client: Destination, probe: Sequence[Sequence[int]]
    ) -> WeightSync:
        return cast("WeightSync", NoSync())


class NoEngines:
    """An inference client without engines."""

    engines: ClassVar[list[object]] = []

    async def start(self) -> None: ...
    async def cut(self) -> None: ...
    async def pause(self, mode: str = "keep") -> None: ...
    async def resume(self) -> None: ...
    async def shutdown(self) -> None: ...
    async def stats(self) -> list[EngineStats]:
        return []


class NoGenerator(TrajectoryGenerator):
    """A generator that must not be called."""

    async def roll_out(self, input_batch: GeneratorInput) -> list[Trajectory]:
        raise AssertionError("a run without engines generates nothing")


class NoSync:
    """A weight sync without engines."""

    async def measure_floor(self) -> None: ...
    async def sync(self, version: int, paused: Paused = nullcontext) -> None: ...
    async def verify(self, version: int) -> dict[str, float]:
        return {}

    def sampled(self, version: int, gap: float) -> None: ...

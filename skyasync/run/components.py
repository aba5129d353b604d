"""The components of a run in the process that trains.

They are made in order, started together, and shut down in order.

Invariant: a component that was made is shut down by ``close``, also if another one failed. The
processes of engines and models come first: each needs seconds to import its libraries.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyasync.config.frozen import freeze
from skyasync.preflight.parts import checked_callbacks
from skyasync.trainer import RayPPOTrainer

if TYPE_CHECKING:  # their libraries are imported in the functions that need them
    from skyasync.inference.elastic import ElasticEngines
    from skyasync.inference.supervisor import EngineSupervisor
    from skyasync.observability.timeline import Timeline
    from skyasync.observability.trackers import Tracker
    from skyasync.run.experiment import BasePPOExp
    from skyasync.run.resource_monitor import ResourceMonitor
    from skyasync.weight_sync.colocation import Colocation

RELEASE_S = 10.0  # for the policy to remove the weight files that it retains
PROBE_TOKENS = 256  # of the verification prompts, whose log-probabilities prove a weight sync
BLANK_TOKENS = 32  # after the image of a verification prompt, if no prompt of the run has an image


class Components:
    """The components of an experiment; each attribute is None until it is made."""

    def __init__(self, experiment: BasePPOExp) -> None:
        self._experiment = experiment
        self.placement: Any = None
        self.client: Any = None
        self.dispatch: Any = None
        self.generator: Any = None
        self.weight_sync: Any = None
        self.colocation: Colocation | None = None  # of engines and policy, if they share devices
        self.supervisor: EngineSupervisor | None = None
        self._elastic: ElasticEngines | None = None
        self._monitor: ResourceMonitor | None = None
        self._tracker: Tracker | None = None  # until a trainer runs, which closes it

    def build(self) -> RayPPOTrainer:
        """Make every component. Blocks on Ray, so the controller calls it off its event loop."""
        cfg = self._experiment.cfg
        freeze(cfg)  # again: a copy that came to this process is not read-only
        from skyasync.run.model_downloads import download_models, hub_models

        download_models(hub_models(cfg, self._experiment.roles()))
        self.placement = self._experiment.get_colocate_pg(cfg.trainer.placement.timeout_s)
        self.client = self._experiment.get_inference_client()
        self.dispatch = self._experiment.get_dispatch()
        return self.make_trainer()

    def make_trainer(self) -> RayPPOTrainer:
        """A trainer with the existing components, which may have had another trainer before."""
        from skyasync.data.datasets import warn_of_overlap

        experiment = self._experiment
        cfg = experiment.cfg
        tokenizer = experiment.tokenizer
        train_dataset = experiment.get_train_dataset()
        eval_dataset = experiment.get_eval_dataset()
        warn_of_overlap(train_dataset, eval_dataset or [])
        tracker = self._tracker = experiment.get_tracker()
        if self.generator is None:
            self.generator = experiment.get_generator(cfg, tokenizer, self.client)
        trainer = experiment.get_trainer(
            cfg=cfg,
            tracker=tracker,
            tokenizer=tokenizer,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            inference_engine_client=self.client,
            generator=self.generator,
            colocate_pg=self.placement,
        )
        callbacks = [*experiment.callbacks, *checked_callbacks(experiment.get_callbacks())]
        trainer.extensions.extend(callbacks)
        self.share_threads(trainer.asynchronous and trainer.shares_devices != "all")
        return trainer

    async def start(self, trainer: RayPPOTrainer) -> None:
        """Load all models, at the same time unless they share devices; attach the trainer."""
        from skyasync.models.images import ImageTokens, images_of, reads_images
        from skyasync.observability.timeline import Timeline
        from skyasync.rollout.chat import ChatTokenizer
        from skyasync.run.resource_monitor import ResourceMonitor
        from skyasync.utils.task_group import run_together, within
        from skyasync.weight_sync.colocation import Colocation
        from skyasync.weight_sync.verify.log_probabilities import choose_probe

        experiment = self._experiment
        cfg = experiment.cfg
        settings = cfg.trainer
        generator = cfg.generator
        path = settings.policy.model.path
        updates = trainer.context.length.updates
        stream = trainer.context.prompts
        chat = ChatTokenizer(trainer.tokenizer, cfg.data.apply_chat_template)
        # Generators: only as many prompts are tokenised as the verification needs.
        rows = (stream.preview(position).messages for position in range(stream.rows))
        prompts = (
            ImageTokens(chat.prompt(messages).tolist(), images_of(messages)) for messages in rows
        )
        with_images = reads_images(path)
        probe = choose_probe(prompts, PROBE_TOKENS, cuts=not with_images)
        if with_images and not any(map(ImageTokens.images_of, probe)):
            # Here, because it imports transformers' models, which other runs do not need.
            from skyasync.models.vision import blank_prompt

            probe.append(blank_prompt(path, probe[0][:BLANK_TOKENS]))
        source = self.dispatch
        destination = self.client
        if settings.placement.colocate_all or generator.hybrid_engines:
            verified = probe if generator.verify_weight_sync else ()
            hybrid = range(generator.num_inference_engines, generator.own_engines)
            self.colocation = Colocation(self.dispatch, self.client, verified, hybrid)
            await self.colocation.start(updates)
            source = self.colocation.source
            destination = self.colocation.destination
        else:
            await run_together(self.client.start(), self.dispatch.start(updates))
        self.weight_sync = experiment.get_weight_sync(source, destination, probe)
        if self.colocation is not None and self.colocation.hybrid:
            self.colocation.weights = self.weight_sync
            self.weight_sync.expects_late_engines = True
        async with within(
            settings.step_timeout_s, "the first comparison of the engines with the policy"
        ):
            # Engines of other programs may still have the weights of a previous run.
            if not generator.engines:
                await self.weight_sync.measure_floor()
        assert experiment.run_dir is not None
        timeline = Timeline(experiment.run_dir.timeline, began=experiment.began_s)
        now = timeline.now()
        timeline.add_span("start", "trainer", experiment.began_s or now, now)
        folder = experiment.run_dir.path
        checkpoints = Path(settings.ckpt_path or experiment.run_dir.checkpoints)
        self._monitor = ResourceMonitor(folder, checkpoints, copies=settings.ckpt_async)
        self.supervisor = experiment.get_engine_supervisor(self.weight_sync, timeline)
        if self.supervisor is not None and self.colocation is None:
            self._elastic = experiment.get_elastic_engines(self.weight_sync, self.supervisor)
        self.attach(trainer, timeline)

    def attach(self, trainer: RayPPOTrainer, timeline: Timeline) -> None:
        """Give a trainer the models, which have started, and the extensions that watch them."""
        if self._monitor is not None:
            trainer.extensions.insert(0, self._monitor)  # later callbacks see its metrics
        for extension in (self.supervisor, self._elastic):
            if extension is not None:
                trainer.extensions.append(extension)
        trainer.attach(
            self.dispatch,
            self.weight_sync,
            timeline=timeline,
            run_dir=self._experiment.run_dir,
            colocation=self.colocation,
        )
        self._tracker = None  # the trainer closes it from now on

    async def close(self) -> None:
        """Shut every component down; those that were never made are skipped."""
        from skyasync.rollout.generator_api import ClosableGenerator

        if self._tracker is not None:
            self._tracker.close()
        if self._monitor is not None:
            self._monitor.close()
        # Before the engines, with which it still has requests.
        if isinstance(self.generator, ClosableGenerator):
            await self.generator.close()
        if self._elastic is not None:
            await self._elastic.close()
        # Before the engines: those that end now are not to be replaced.
        if self.supervisor is not None:
            await self.supervisor.close()
        if self._experiment.cfg.generator.weight_sync_dir and self.weight_sync is not None:
            with contextlib.suppress(Exception):  # the run may have ended because the policy did
                async with asyncio.timeout(RELEASE_S):
                    await self.weight_sync.release_retained()
        shutdowns = []
        for component in (self.client, self.dispatch):
            if component is not None:
                shutdowns.append(component.shutdown())
        await asyncio.gather(*shutdowns, return_exceptions=True)

    @property
    def engines(self) -> list[Any]:
        """The engines of the client; none if it is a client of the user."""
        from skyasync.inference.client import InferenceClient

        if isinstance(self.client, InferenceClient):
            return self.client.engines
        return []

    def share_threads(self, overlap: bool) -> None:
        """Divide this machine's cores between policy and engines.

        Args:
            overlap: they compute at the same time; if false, in turns.
        """
        from skyasync.run.placement import share_threads

        cores = os.cpu_count() or 1
        threads_per_rank, threads_per_engine = share_threads(
            self._experiment.cfg, cores, overlap=overlap
        )
        if self.dispatch is not None:
            self.dispatch.set_threads(threads_per_rank)
        for engine in self.engines:
            engine.set_threads(threads_per_engine)

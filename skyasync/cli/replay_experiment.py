"""A run whose rollouts come from files: with workers, without engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from skyasync.config.schema import Config
from skyasync.data.prompts import CountedPrompts
from skyasync.errors import UserError
from skyasync.rollout.trajectory_files import read
from skyasync.rollout.types import Prompt
from skyasync.run.engineless import EnginelessExperiment
from skyasync.trainer import RayPPOTrainer

if TYPE_CHECKING:
    from skyasync.observability.trackers import Tracker
    from skyasync.rollout.generator_api import Generator
    from skyasync.rollout.tokenizer import Tokenizer
    from skyasync.trainer.context import Client


class ReplayTrainer(RayPPOTrainer):
    """Step by step what was recorded; nothing is generated, and no weights are sent.

    | who waits | for what           | woken by    |
    |-----------|--------------------|-------------|
    | ``train`` | a step's file      | a thread    |
    | ``train`` | the update         | the workers |
    """

    asynchronous = True  # samples have the staleness that they had
    files: Sequence[Path] = ()
    independent = False  # batches that do not follow each other

    async def train(self) -> None:
        async with self.running():
            for file in self.files:
                recorded = await asyncio.to_thread(read, file)
                if recorded.step != self.global_step + 1 and not self.independent:
                    raise UserError(f"{file} is of step {recorded.step}, and step {self.global_step + 1} comes next: "
                                    f"a replay needs every step from the first on")  # fmt: skip
                rollout = self.assemble(
                    recorded.groups, {}, recorded.position, recorded.trained_early, postprocessed=True
                )
                status = await self.train_on(rollout)
                await self.sync_policy_weights_to_inference_engines()
                await self.end_step(status)


class ReplayExperiment(EnginelessExperiment):
    """``recorded``: the files of the steps, in order. ``independent``: they do not follow each other."""

    recorded: ClassVar[tuple[Path, ...]] = ()
    independent: ClassVar[bool] = False

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        # The controller's process does not have what is set on the class here.
        self.files, self.files_independent = self.recorded, self.independent
        trainer = cfg.trainer
        trainer.allow_uncorrected = True
        trainer.epochs, trainer.max_training_steps, trainer.eval_before_train = 1, 0, False
        cfg.environment.domains = {}  # rewards are recorded
        if trainer.ckpt_best_metric.startswith("eval/"):
            trainer.ckpt_best_metric = ""

    def get_train_dataset(self) -> Sequence[Prompt]:
        """As many prompts as the run had, so that schedules end at the same step."""
        return CountedPrompts(read(self.files[0]).total_steps * self.cfg.trainer.train_batch_size)

    def get_eval_dataset(self) -> None:
        return None

    def get_trainer(self, cfg: Config, tracker: Tracker, tokenizer: Tokenizer, train_dataset: Sequence[Prompt],
                    eval_dataset: Sequence[Prompt] | None, inference_engine_client: Client, generator: Generator,
                    colocate_pg: object) -> RayPPOTrainer:  # fmt: skip
        trainer = ReplayTrainer(
            cfg, tracker, tokenizer, train_dataset, inference_engine_client, generator, colocate_pg, eval_dataset
        )
        trainer.files, trainer.independent = self.files, self.files_independent
        return trainer

"""Engines and environments without workers: prompts are played, nothing is trained.

Invariant: what is played is what a run of the same settings would play in its first step (prompts, chat template,
sampling, environments, engines), by the same parts. Nothing is left running, and no run folder is made; an error leaves
its traceback and the processes' logs in a temporary folder, which its line names.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from traceback import format_exception
from typing import Any
from uuid import uuid4

from skyasync.cli.train import end_with
from skyasync.config.schema import Config
from skyasync.config.schema.data import eval_sources
from skyasync.config.secrets import Secrets
from skyasync.errors import UserError
from skyasync.observability.run_dir import RunDirectory
from skyasync.preflight.data import check_data
from skyasync.preflight.parts import check_parts
from skyasync.preflight.prepare import check_judges, settle_models, settle_references
from skyasync.rollout.evaluation import eval_requests
from skyasync.rollout.generator_api import eval_prompts, rollout_requests, run_generator
from skyasync.rollout.types import Group, Prompt, RolloutRequest
from skyasync.run.experiment import BasePPOExp
from skyasync.workers.roles import POLICY, ROLES, Role

Progress = Callable[[int, int], None]


class RolloutExperiment(BasePPOExp):
    """An experiment that has engines alone."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        cfg.trainer.placement.colocate_all = False  # the engines have their devices for themselves

    def roles(self) -> list[Role]:
        return []

    def settle(self, *, held_out: bool) -> None:
        """Check and settle what can be before any process starts.

        Raises:
            UserError: for the first thing that is wrong.
        """
        settle_references(self.cfg)
        check_parts(self.cfg, [])
        if held_out and not eval_sources(self.cfg.data):
            raise UserError("there are no held-out prompts: name data.val_data or data.val_sets")
        check_data(self.cfg, self.data_rows, train=not held_out, held_out=held_out)
        settle_models(self.cfg, [ROLES[POLICY]], own_tokenizer=False)
        self.judge_keys = check_judges(self.cfg)

    def prompts(self, *, held_out: bool, most: int = 0) -> Sequence[Prompt]:
        """The prompts of the run, or the first ``most`` of them."""
        found = eval_prompts(self.get_eval_dataset() or []) if held_out else self.get_train_dataset()
        return found[:most] if most else found

    def play(self, prompts: Sequence[Prompt], *, held_out: bool, progress: Progress | None = None) -> list[Group]:
        """Start the engines, play, and end them; groups in the order of the prompts. An error ends the program."""
        from skyasync.run.logs import ProcessLogs, last_words
        from skyasync.run.placement import release
        from skyasync.run.ray_cluster import cluster

        folder = RunDirectory(tempfile.gettempdir(), f"skyasync-{uuid4().hex[:8]}")
        folder.secrets = Secrets.of(self.cfg)
        logs = ProcessLogs(folder.logs, hide=folder.secrets.hide_all)
        try:
            with cluster(self.cfg, roles=self.roles(), logs=logs) as gpus:
                self.gpus = gpus
                try:
                    groups = asyncio.run(self._play(prompts, held_out, progress))
                finally:
                    release(self.placement_name)
        except UserError:
            folder.discard()
            raise
        except Exception as error:
            folder.save_error("".join(format_exception(error)) + last_words(logs, error))
            end_with(error, folder)
        except KeyboardInterrupt:
            folder.discard()
            raise
        folder.discard()
        return groups

    async def _play(self, prompts: Sequence[Prompt], held_out: bool, progress: Progress | None) -> list[Group]:
        cfg, groups = self.cfg, list[Group]()
        try:
            self.parts.placement = await asyncio.to_thread(self.get_colocate_pg, cfg.trainer.placement.timeout_s)
            self.parts.client = self.get_inference_client()
            generator: Any = self.get_generator(cfg, self.tokenizer, self.parts.client)
            self.parts.generator = generator
            self.parts.share_threads(False)
            await self.parts.client.start()
            for requests in eval_requests(prompts, cfg) if held_out else _train_requests(prompts, cfg):
                groups += (await run_generator(generator, requests, version=0))[0]
                if progress is not None:
                    progress(len(groups), len(prompts))
        finally:
            await self.close()
        return groups


def _train_requests(prompts: Sequence[Prompt], cfg: Config) -> Iterator[list[RolloutRequest]]:
    at_once = cfg.trainer.eval_batch_size
    for start in range(0, len(prompts), at_once):
        yield rollout_requests(prompts[start : start + at_once], cfg.generator)

"""Rollouts by engines and environments alone, without workers; nothing is trained.

Invariant: the rollouts are those of the first step of a run with the same settings (prompts, chat
template, sampling, environments, engines), by the same parts. No process is left running, and no
run folder is made. An error leaves its traceback and the processes' logs in a temporary folder,
which its line names.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from skyasync.config.schema import Config
from skyasync.config.schema.data import eval_sources
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


class RolloutExperiment(BasePPOExp):
    """An experiment that has engines alone; it is checked before any process starts.

    Args:
        evaluation: with the prompts and the sampling of evaluation.
        data_rows: rows of sources that are the program's own.

    Raises:
        UserError: for the first problem.
    """

    def __init__(
        self,
        cfg: Config,
        *,
        evaluation: bool,
        data_rows: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(cfg)
        self.data_rows |= data_rows
        self.evaluation = evaluation
        cfg.trainer.placement.colocate_all = False  # the engines have their devices for themselves
        settle_references(self.cfg)
        check_parts(self.cfg, [])  # without plans: nothing is trained
        if evaluation and not eval_sources(self.cfg.data):
            raise UserError("there are no held-out prompts: name data.val_data or data.val_sets")
        check_data(self.cfg, self.data_rows, train=not evaluation, evaluate=evaluation)
        settle_models(self.cfg, [ROLES[POLICY]], own_tokenizer=False)
        self.judge_keys = check_judges(self.cfg)

    def roles(self) -> list[Role]:
        """None: there are no workers."""
        return []

    def prompts(self, limit: int = 0) -> Sequence[Prompt]:
        """The prompts of the run, or the first ``limit`` of them."""
        prompts: Sequence[Prompt]
        if self.evaluation:
            prompts = eval_prompts(self.get_eval_dataset() or [])
        else:
            prompts = self.get_train_dataset()
        if limit:
            return prompts[:limit]
        return prompts

    def play(self, prompts: Sequence[Prompt]) -> list[Group]:
        """Start the engines, generate episodes, end the engines; groups in the prompts' order."""
        from skyasync.run.launch import run_without_controller

        folder = RunDirectory(tempfile.gettempdir(), f"skyasync-{uuid4().hex[:8]}")
        try:
            groups = run_without_controller(self, folder, lambda: self._play(prompts))
        except (UserError, KeyboardInterrupt):
            folder.discard()
            raise
        except Exception:
            self.run_dir = folder  # it has the traceback and the logs, which the error will name
            raise
        folder.discard()
        return groups

    async def _play(self, prompts: Sequence[Prompt]) -> list[Group]:
        cfg = self.cfg
        groups = list[Group]()
        if self.evaluation:
            batches: Iterable[list[RolloutRequest]] = eval_requests(prompts, cfg)
        else:
            size = cfg.trainer.eval_batch_size  # episodes in memory at once
            starts = range(0, len(prompts), size)
            # A generator: prompts that are streamed are read batch after batch.
            batches = (
                rollout_requests(prompts[start : start + size], cfg.generator) for start in starts
            )
        try:
            self.components.placement = await asyncio.to_thread(
                self.get_colocate_pg, cfg.trainer.placement.timeout_s
            )
            self.components.client = self.get_inference_client()
            generator: Any = self.get_generator(cfg, self.tokenizer, self.components.client)
            self.components.generator = generator
            self.components.share_threads(False)  # engines have all cores: no rank computes
            await self.components.client.start()
            for requests in batches:
                batch_groups, _ = await run_generator(generator, requests, version=0)
                groups += batch_groups
        finally:
            await self.close()
        return groups

"""What is settled and checked before any process starts, in the order in which a user would want to hear of it.

Invariant: the first thing that is wrong is raised, in one line, and nothing is left behind: the run's folder is made
last, and changed only when this process has claimed it. From then on the configuration is read-only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from skyasync.config.check import config_warnings
from skyasync.config.frozen import freeze
from skyasync.config.load import MODEL_KEY, RECIPE, dump_config, origins
from skyasync.config.paths import refuse_foreign_checkpoints
from skyasync.config.resume import Resume, checkpoints_of, go_on_beside, settle_resume_mode
from skyasync.config.sampling import backend
from skyasync.config.schema import Config, TrainerConfig
from skyasync.config.secrets import Secrets
from skyasync.engines.protocol import EngineConfig
from skyasync.engines.server_check import check_servers
from skyasync.engines.settings import engine_config
from skyasync.observe.claim import claim
from skyasync.observe.jsonl import replace_text
from skyasync.observe.run_dir import RunDirectory, check_name, default_run_name
from skyasync.preflight.data import check_data, check_lengths
from skyasync.preflight.devices import check_cores, without_gpus
from skyasync.preflight.folders import check_folders, check_resuming
from skyasync.preflight.judges import check_judges
from skyasync.preflight.parts import check_parts, plans_named_by
from skyasync.preflight.settling import settle_models, settle_references
from skyasync.rollout.tokenizer import quick_tokenizer, told
from skyasync.trainer.plans import PLANS
from skyasync.workers.roles import Role

#: Settings of OpenRLHF's that scripts export.
VARIABLES = {
    "OPENRLHF_ASYNC_NUM_TASKS": "generator.max_concurrent_episodes",
    "OPENRLHF_ASYNC_QUEUE_SIZE": "trainer.async_queue_size",
}


class Unprepared(Protocol):
    """What is asked of an experiment, and set in it."""

    cfg: Config
    data_rows: dict[str, Any]
    judge_keys: dict[str, str]

    @property
    def get_trainer(self) -> Callable[..., object]: ...
    def is_ours(self, factory: str) -> bool: ...
    def roles(self) -> list[Role]: ...
    def engine_config(self) -> EngineConfig: ...


def prepare(experiment: Unprepared) -> RunDirectory:
    """The folder of a run that may start.

    Raises:
        UserError: for the first thing that is wrong.
    """
    cfg = experiment.cfg
    for line in config_warnings(cfg):
        print(f"warning: {line}", file=sys.stderr)
    for variable, key in VARIABLES.items():
        if variable in os.environ:
            print(f"warning: {variable}={os.environ[variable]} is read by OpenRLHF alone: set {key}", file=sys.stderr)
    settle_references(cfg)
    _check_plan(experiment)
    go_on_beside(cfg.trainer)
    name = _check_places(cfg.trainer)
    _check_engines(experiment)
    _check_data_and_models(experiment)
    check_resuming(cfg)
    if experiment.is_ours("get_judges"):
        experiment.judge_keys = check_judges(cfg)
    if line := settle_resume_mode(cfg.trainer):
        print(line)
    if line := about_recipe(cfg):
        print(f"note: {line}", file=sys.stderr)
    return _make_folder(cfg, name)


def _check_plan(experiment: Unprepared) -> None:
    ours, plan = experiment.is_ours("get_trainer"), experiment.cfg.trainer.plan
    check_parts(experiment.cfg, [PLANS.find(plan)] if ours else plans_named_by(type(experiment).get_trainer))


def _check_places(trainer: TrainerConfig) -> str:
    """The run's name."""
    name = trainer.run_name or default_run_name(trainer.plan.rpartition(":")[2])
    check_name(trainer.runs_dir, name)
    refuse_foreign_checkpoints(trainer)
    check_folders(trainer)
    return name


def _check_engines(experiment: Unprepared) -> None:
    cfg = experiment.cfg
    if without_gpus(cfg.ray.address):
        engine_config(cfg, gpus=False)
        check_cores(cfg, experiment.roles())
    if cfg.generator.engines:
        folder = cfg.generator.weight_sync_dir
        check_servers(cfg.generator.engines, experiment.engine_config(), folder, backend(cfg))


def _check_data_and_models(experiment: Unprepared) -> None:
    cfg, own_tokenizer = experiment.cfg, not experiment.is_ours("get_tokenizer")
    train, held_out = experiment.is_ours("get_train_dataset"), experiment.is_ours("get_eval_dataset")
    prompts = check_data(cfg, experiment.data_rows, train=train, held_out=held_out)
    settle_models(cfg, experiment.roles(), own_tokenizer=own_tokenizer)
    path = cfg.trainer.policy.model.path
    if not own_tokenizer and Path(path, "tokenizer.json").is_file():
        tokenizer = told(quick_tokenizer(path), cfg.data.chat_template, cfg.data.chat_template_kwargs)
        check_lengths(prompts, tokenizer, cfg)


def about_recipe(cfg: Config) -> str:
    """What a run has of the settings that stand in for a model that is not named; "" where one is."""
    taken = [path for path, origin in origins(cfg).items() if origin == RECIPE]
    if not taken:
        return ""
    if taken == [MODEL_KEY]:
        return (
            "no model is named: the tiny example model is trained on data.train_data, with the library's defaults for "
            "all that is not set (it learns with trainer.policy.optimizer_config.lr=3e-4; its recipe, "
            "skyasync/examples/tiny/config.yaml, is for its own data)"
        )
    return (
        f"neither a model nor data.train_data is named: {len(taken)} settings are those of the tiny example, "
        f"skyasync/examples/tiny/config.yaml, which learns to sort"
    )


def _make_folder(cfg: Config, name: str) -> RunDirectory:
    resume = Resume.of(cfg.trainer).within(checkpoints_of(cfg.trainer))
    folder = RunDirectory(cfg.trainer.runs_dir, name, resume=resume)
    claim(folder.path)
    folder.secrets = Secrets.of(cfg)
    folder.save_config(dump_config(cfg, secrets=False))
    replace_text(folder.origins, json.dumps(origins(cfg), indent=1) + "\n")
    freeze(cfg)
    return folder

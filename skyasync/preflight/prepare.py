"""What is settled and checked before any process starts, in the order that is most useful to a
user.

Invariant: the first thing that is wrong is raised, in one line, and nothing is left behind: the
run's folder is made last, and changed only when this process has claimed it. From then on the
configuration is read-only.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from skyasync.config.check import check_names, config_warnings
from skyasync.config.frozen import freeze
from skyasync.config.keys import Keys
from skyasync.config.load import MODEL_KEY, RECIPE, dump_config, origins
from skyasync.config.model_files import model_path
from skyasync.config.resume import (
    STATE,
    Resume,
    checkpoints_of,
    refuse_foreign_checkpoints,
    settle_resume_mode,
    settle_run_name,
)
from skyasync.config.schema import Config
from skyasync.config.schema.judges import judges_of
from skyasync.config.schema.sampling import backend
from skyasync.config.secrets import Secrets
from skyasync.data.sources import absolute, absolute_all
from skyasync.errors import UserError
from skyasync.inference.interface import EngineConfig
from skyasync.inference.remote import check_servers
from skyasync.inference.settings import engine_config
from skyasync.models.config import complaints
from skyasync.observability.jsonl import replace_text
from skyasync.observability.run_dir import (
    RunDirectory,
    check_name,
    default_run_name,
    lock_run,
    unlock_run,
)
from skyasync.other_frameworks import other_frameworks
from skyasync.preflight.data import check_data, check_lengths
from skyasync.preflight.model import (
    check_memory,
    check_model,
    check_one_label,
    check_parallel,
    check_routers,
    check_same_tokens,
    check_template,
)
from skyasync.preflight.parts import check_parts
from skyasync.registry import absolute_reference
from skyasync.rewards import settings as rewards
from skyasync.rewards.llm_judge import ChatServer, key_of
from skyasync.rollout.tokenizer import quick_tokenizer, template_text, with_template
from skyasync.run.placement import plan_slots
from skyasync.trainer.checkpoint.checkpoints import Checkpoints, choose, refuse_other
from skyasync.trainer.checkpoint.settings_check import check_recorded
from skyasync.trainer.plans import PLANS
from skyasync.utils.machine import HIDDEN, this_machine
from skyasync.workers.roles import POLICY, ROLES, SCORE, TEACHER_ROLE, VOCABULARY, Role

PROCESSES_PER_CORE = 8  # ranks and engines; far more than that are meant for GPUs
_DEVICES = ("nvidia[0-9]*", "dxg", "kfd", "davinci[0-9]*")


class Unprepared(Protocol):
    """What ``prepare`` reads of an experiment, and sets in it."""

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
    trainer = experiment.cfg.trainer
    is_ours = experiment.is_ours
    check_names(cfg)
    for line in config_warnings(cfg):
        print(f"warning: {line}", file=sys.stderr)
    for name, (framework, key) in other_frameworks().variables().items():
        if name in os.environ:
            print(
                f"warning: {name}={os.environ[name]} is read only by {framework}: set {key}",
                file=sys.stderr,
            )
    settle_references(cfg)
    check_parts(cfg, [PLANS.find(trainer.plan)] if is_ours("get_trainer") else [])

    attempt = settle_run_name(trainer)
    name = trainer.run_name or default_run_name(trainer.plan.rpartition(":")[2])
    check_name(trainer.runs_dir, name)
    refuse_foreign_checkpoints(trainer)
    check_writable("trainer.runs_dir", trainer.runs_dir)
    for key in ("ckpt_path", "export_path", "critic.export_path"):
        folder = attrgetter(key)(trainer)
        if folder:
            check_writable(f"trainer.{key}", folder)

    ray = sys.modules.get("ray")
    own_cluster = not cfg.ray.address and not (ray is not None and ray.is_initialized())
    if own_cluster:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN
        if hidden or not any(next(Path("/dev").glob(device), None) for device in _DEVICES):
            engine_config(cfg, gpus=False)
            check_cores(cfg, experiment.roles())
    if cfg.generator.engines:
        folder = cfg.generator.weight_sync_dir
        check_servers(cfg.generator.engines, experiment.engine_config(), folder, backend(cfg))

    own_tokenizer = not is_ours("get_tokenizer")
    train = is_ours("get_train_dataset")
    evaluate = is_ours("get_eval_dataset")
    prompts = check_data(cfg, experiment.data_rows, train=train, evaluate=evaluate)
    unnamed = [
        role
        for role in ROLES.values()
        if (model := role.own_model(cfg)) is not None and not model.path
    ]
    settle_models(cfg, experiment.roles(), own_tokenizer=own_tokenizer)
    if own_cluster:
        check_memory(cfg, this_machine())
    path = trainer.policy.model.path
    if not own_tokenizer and Path(path, "tokenizer.json").is_file():
        tokenizer = with_template(
            quick_tokenizer(path), cfg.data.chat_template, cfg.data.chat_template_kwargs
        )
        if cfg.data.apply_chat_template:
            check_template(tokenizer)
        check_lengths(prompts, tokenizer, cfg)
    resume = Resume.of(trainer)
    checkpoints = Checkpoints(checkpoints_of(trainer))
    # The checkpoint is there, not damaged at a glance, and of this run. Those passed over are
    # reported at the load.
    if resume.requested and (checkpoint := choose(resume, checkpoints, skip=lambda *_: None)):
        refuse_other(
            checkpoint, "seed", json.loads((checkpoint / STATE).read_text())["seed"], trainer.seed
        )
        check_recorded(checkpoint, cfg)
    if is_ours("get_judges"):
        experiment.judge_keys = check_judges(cfg)

    for line in (attempt, settle_resume_mode(trainer)):
        if line:
            print(line)
    line = about_recipe(cfg)
    if line:
        print(f"note: {line}", file=sys.stderr)
    run_dir = None
    try:
        run_dir = RunDirectory(
            trainer.runs_dir, name, resume=Resume.of(trainer).within(checkpoints_of(trainer))
        )
        lock_run(run_dir.path)
        run_dir.secrets = Secrets.of(cfg)
        recorded = copy.deepcopy(cfg)
        for role in (
            unnamed
        ):  # such models are the policy's, also of another one with which the file is used again
            role.own_model(recorded).path = ""
        replace_text(run_dir.config, dump_config(recorded, secrets=False))
        replace_text(run_dir.origins, json.dumps(origins(cfg), indent=1) + "\n")
    except OSError as error:
        if run_dir is not None:
            run_dir.discard()
            unlock_run(run_dir.path)
        folder = Path(trainer.runs_dir) / name
        raise UserError(
            f"the run's folder {folder} cannot be written: {error.strerror or error}"
        ) from error
    freeze(cfg)
    return run_dir


def about_recipe(cfg: Config) -> str:
    """A line about the example's settings that a run takes because it names no model; "" if it
    names one."""
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


# ---------------------------------------------------------------- paths and models as every process
# finds them


def settle_references(cfg: Config) -> None:
    """Files by their absolute paths."""
    trainer = cfg.trainer
    if cfg.generator.agent_func_path:
        other_frameworks().settle_agent_file(cfg)
    for section in (trainer, trainer.critic):
        section.export_path = section.export_path and str(
            Path(section.export_path).expanduser().resolve()
        )
    trainer.ckpt_path = trainer.ckpt_path and str(Path(trainer.ckpt_path).expanduser().resolve())
    folder = Resume.of(trainer).folder
    if folder:
        trainer.resume_mode = str(folder.resolve())
    if cfg.data.chat_template and "{" not in cfg.data.chat_template:
        cfg.data.chat_template = str(Path(cfg.data.chat_template).expanduser().resolve())
        template_text(cfg.data.chat_template)
    cfg.data.train_data = [absolute(source) for source in cfg.data.train_data]
    cfg.data.val_data = [absolute(source) for source in cfg.data.val_data]
    for name, entry in cfg.data.val_sets.items():
        if isinstance(entry, dict):
            entry["data"] = absolute_all(entry["data"])
        else:
            cfg.data.val_sets[name] = absolute_all(entry)
    rewards.settle_references(cfg.environment)
    parts = [key.path for key in Keys.of(type(cfg)) if key.registry and key.open_ended]
    for path in (*parts, "trainer.eval_answer", "generator.agent_program", "environment.env_class"):
        group, _, name = path.rpartition(".")
        holder = attrgetter(group)(cfg)
        value = vars(holder)[name]
        whole = (
            [absolute_reference(v) for v in value]
            if isinstance(value, list)
            else absolute_reference(value)
        )
        setattr(holder, name, whole)


def settle_models(
    cfg: Config, roles: Sequence[Role], *, own_tokenizer: bool, weights: bool = True
) -> None:
    """Every role's model is a folder or a hub's name, and fits; where none is named it is the
    policy's.

    Args:
        roles: the roles of the run, whose models are looked at.
        own_tokenizer: the experiment brings one of its own.
        weights: a local folder must have them.
    """
    for name, entry in cfg.trainer.reward.models.items():
        key = f"trainer.reward.models.{name}.path"
        path = entry["path"] = model_path(entry["path"], key)
        check_model(path, cfg, key=key, own_tokenizer=True, weights=weights)
        check_one_label(path, key, trained=True)
        check_same_tokens(path, cfg.trainer.policy.model.path, key)
    for role in ROLES.values():
        model = role.own_model(cfg)
        if model is None:
            continue
        named = model.path
        key = f"{role.section}.model.path"
        if not named and key in role.enabled_by:
            continue  # there is none
        if named:
            model.path = model_path(named, key)
        else:
            model.path = model_path(role.model(cfg).path)
        if role not in roles:
            continue
        own = named or role.name == POLICY
        if own:
            tokenizer = own_tokenizer or role.name != POLICY
            check_model(model.path, cfg, key=key, own_tokenizer=tokenizer, weights=weights)
            if role.on_policys_devices(cfg):
                check_parallel(cfg.trainer.parallel, model.path, key)
            if role.name == POLICY:
                check_routers(cfg.trainer.policy.router_replay, model.path, key)
        wrong = next(complaints(model.path, model.config_kwargs, f"{role.section}.model"), "")
        if wrong:
            raise UserError(wrong)
        if role.name == POLICY and cfg.trainer.policy.freeze:
            from skyasync.models.freezing import check_frozen  # torch and transformers

            check_frozen(model.path, model.config_kwargs, cfg.trainer.policy.freeze)
        lora = cfg.trainer.policy.lora
        if (
            role.name == POLICY
            and lora.rank
            and [*lora.target_modules, *lora.exclude_modules] != ["all-linear"]
        ):
            from skyasync.models.lora import check_targets  # as above

            check_targets(model.path, model.config_kwargs, lora)
        if own and role.head != VOCABULARY:
            check_one_label(model.path, key, trained=role.head == SCORE)
        if own and (role.head == SCORE or role.name == TEACHER_ROLE):
            check_same_tokens(model.path, cfg.trainer.policy.model.path, key)


# ---------------------------------------------------------------- folders


def check_writable(key: str, folder: str) -> None:
    """Make the folder and a file in it, and take away again what was not there."""
    path = Path(folder).expanduser().absolute()
    made = [parent for parent in (path, *path.parents) if not parent.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f"{key}={folder} cannot be written: {error.strerror or error}") from error
    finally:
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()


# ---------------------------------------------------------------- devices and servers


def check_cores(cfg: Config, roles: Sequence[Role]) -> None:
    """Ranks and engines of a cluster that is started here, without GPUs, are processes that share
    the cores.

    Raises:
        UserError: if they are more than this machine could reasonably run.
    """
    slots = plan_slots(cfg, gpus=False, roles=roles)
    cores = os.cpu_count() or 1
    if len(slots.bundles) <= PROCESSES_PER_CORE * cores:
        return
    counts = ", ".join(f"{name} {len(bundles)}" for name, bundles in slots.of.items() if bundles)
    raise UserError(
        f"this machine has no GPU that can be used, and {cores} cores are too few for {len(slots.bundles)} processes "
        f"(at most {PROCESSES_PER_CORE} per core; {counts}): use fewer ranks "
        f"(trainer.placement.policy_num_gpus_per_node={cfg.trainer.placement.policy_num_gpus_per_node}) or engines "
        f"(generator.num_inference_engines={cfg.generator.num_inference_engines}), or join a cluster with ray.address"
    )


def check_judges(cfg: Config) -> dict[str, str]:
    """The keys of the judges' servers, by the judges' names; each server has answered one short
    question.

    Raises:
        UserError: for the first judge whose key is missing, or whose server cannot be reached or
            refuses.
    """
    judges = {
        name: judge for name, judge in judges_of(cfg.environment.judges).items() if judge.base_url
    }
    keys = {name: key_of(name, judge) for name, judge in judges.items()}

    async def probe() -> None:
        await asyncio.gather(
            *(ChatServer(name, judge, keys[name]).probe() for name, judge in judges.items())
        )

    if judges:
        with ThreadPoolExecutor(1) as thread:  # an event loop may run in this one (a notebook)
            thread.submit(asyncio.run, probe()).result()
    return keys

"""Settings that are resolved, and checks, before any process starts: the cheapest ones come first.

Invariant: the first problem is raised, in one line, and no file is left: the run's folder is made
at the end, and changed only when this process has claimed it. From then on the configuration is
read-only.
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
from skyasync.trainer.checkpoint.checkpoints import Checkpoints, check_equal, choose
from skyasync.trainer.checkpoint.settings_check import check_recorded
from skyasync.trainer.plans import PLANS
from skyasync.utils.machine import HIDDEN, this_machine
from skyasync.workers.roles import POLICY, ROLES, SCORE, TEACHER_ROLE, VOCABULARY, Role

PROCESSES_PER_CORE = 8  # ranks and engines; a configuration with far more is meant for GPUs
# In /dev: GPUs of NVIDIA, GPUs in WSL, AMD, Ascend.
_DEVICES = ("nvidia[0-9]*", "dxg", "kfd", "davinci[0-9]*")


class Unprepared(Protocol):
    """The attributes of an experiment that ``prepare`` reads or sets."""

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
        UserError: for the first problem.
    """
    cfg = experiment.cfg
    trainer = cfg.trainer
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
    plans = []
    if is_ours("get_trainer"):  # else the experiment makes the trainer itself
        plans.append(PLANS.find(trainer.plan))
    check_parts(cfg, plans)

    attempt = settle_run_name(trainer)
    run_name = trainer.run_name or default_run_name(trainer.plan.rpartition(":")[2])
    check_name(trainer.runs_dir, run_name)
    refuse_foreign_checkpoints(trainer)
    check_writable("trainer.runs_dir", trainer.runs_dir)
    for key in ("ckpt_path", "export_path", "critic.export_path"):
        folder = attrgetter(key)(trainer)
        if folder:
            check_writable(f"trainer.{key}", folder)

    ray = sys.modules.get("ray")  # not imported for this, which takes a second
    own_cluster = not cfg.ray.address and not (ray is not None and ray.is_initialized())
    if own_cluster and not _has_gpus():
        engine_config(cfg, gpus=False)
        check_cores(cfg, experiment.roles())
    if cfg.generator.engines:
        folder = cfg.generator.weight_sync_dir
        check_servers(cfg.generator.engines, experiment.engine_config(), folder, backend(cfg))

    own_tokenizer = not is_ours("get_tokenizer")
    train = is_ours("get_train_dataset")
    evaluate = is_ours("get_eval_dataset")
    prompts = check_data(cfg, experiment.data_rows, train=train, evaluate=evaluate)
    roles_without_path = []  # before ``settle_models`` gives them the policy's
    for role in ROLES.values():
        model = role.own_model(cfg)
        if model is not None and not model.path:
            roles_without_path.append(role)
    settle_models(cfg, experiment.roles(), own_tokenizer=own_tokenizer)
    if own_cluster:
        check_memory(cfg, this_machine())
    path = trainer.policy.model.path
    if not own_tokenizer and Path(path, "tokenizer.json").is_file():
        tokenizer = quick_tokenizer(path)
        data = cfg.data
        tokenizer = with_template(tokenizer, data.chat_template, data.chat_template_kwargs)
        if data.apply_chat_template:
            check_template(tokenizer)
        check_lengths(prompts, tokenizer, cfg)
    _check_checkpoint(cfg)
    if is_ours("get_judges"):
        experiment.judge_keys = check_judges(cfg)

    for line in (attempt, settle_resume_mode(trainer)):
        if line:
            print(line)
    line = about_recipe(cfg)
    if line:
        print(f"note: {line}", file=sys.stderr)
    run_dir = _make_run_directory(cfg, run_name, roles_without_path)
    freeze(cfg)
    return run_dir


def _has_gpus() -> bool:
    """Whether this machine has a GPU that is not hidden; without the libraries of its vendor."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return False
    return any(next(Path("/dev").glob(device), None) for device in _DEVICES)


def _check_checkpoint(cfg: Config) -> None:
    """Check the checkpoint to resume from: that it exists, seems intact, and is this run's.

    Newer checkpoints that are damaged are reported at the load.
    """
    trainer = cfg.trainer
    resume = Resume.of(trainer)
    if not resume.requested:
        return
    checkpoint = choose(resume, Checkpoints(checkpoints_of(trainer)), skip=lambda *_: None)
    if checkpoint:
        state = json.loads((checkpoint / STATE).read_text())
        check_equal(checkpoint, "seed", state["seed"], trainer.seed)
        check_recorded(checkpoint, cfg)


def _make_run_directory(
    cfg: Config,
    run_name: str,
    roles_without_path: Sequence[Role],
) -> RunDirectory:
    """Make or claim the run's folder, and write its configuration."""
    trainer = cfg.trainer
    run_dir = None
    try:
        resume = Resume.of(trainer).within(checkpoints_of(trainer))
        run_dir = RunDirectory(trainer.runs_dir, run_name, resume=resume)
        lock_run(run_dir.path)
        run_dir.secrets = Secrets.of(cfg)
        recorded_config = copy.deepcopy(cfg)
        # These models are the policy's, also if the file is used again with another policy.
        for role in roles_without_path:
            role.own_model(recorded_config).path = ""
        replace_text(run_dir.config, dump_config(recorded_config, secrets=False))
        replace_text(run_dir.origins, json.dumps(origins(cfg), indent=1) + "\n")
    except OSError as error:
        if run_dir is not None:
            run_dir.discard()
            unlock_run(run_dir.path)
        folder = Path(trainer.runs_dir) / run_name
        raise UserError(
            f"the run's folder {folder} cannot be written: {error.strerror or error}"
        ) from error
    return run_dir


def about_recipe(cfg: Config) -> str:
    """A line about settings of the example, which a run without a model takes; "" if it has one."""
    recipe_keys = [path for path, origin in origins(cfg).items() if origin == RECIPE]
    if not recipe_keys:
        return ""
    if recipe_keys == [MODEL_KEY]:
        return (
            "no model is named: the tiny example model is trained on data.train_data, with the library's defaults for "
            "all that is not set (it learns with trainer.policy.optimizer_config.lr=3e-4; its recipe, "
            "skyasync/examples/tiny/config.yaml, is for its own data)"
        )
    return (
        f"neither a model nor data.train_data is named: {len(recipe_keys)} settings are those of the tiny example, "
        f"skyasync/examples/tiny/config.yaml, which learns to sort"
    )


# ---------------------------------------------------------------- paths and models


def settle_references(cfg: Config) -> None:
    """Make paths of files absolute: the run's processes have other working folders."""
    trainer = cfg.trainer
    data = cfg.data
    if cfg.generator.agent_func_path:
        other_frameworks().settle_agent_file(cfg)
    trainer.export_path = _absolute_path(trainer.export_path)
    trainer.critic.export_path = _absolute_path(trainer.critic.export_path)
    trainer.ckpt_path = _absolute_path(trainer.ckpt_path)
    folder = Resume.of(trainer).folder
    if folder:
        trainer.resume_mode = str(folder.resolve())
    if data.chat_template and "{" not in data.chat_template:  # else it is the template itself
        data.chat_template = _absolute_path(data.chat_template)
        template_text(data.chat_template)  # raises an error if it cannot be read
    data.train_data = [absolute(source) for source in data.train_data]
    data.val_data = [absolute(source) for source in data.val_data]
    for name, entry in data.val_sets.items():
        if isinstance(entry, dict):
            entry["data"] = absolute_all(entry["data"])
        else:
            data.val_sets[name] = absolute_all(entry)
    rewards.settle_references(cfg.environment)
    paths = [key.path for key in Keys.of(type(cfg)) if key.registry and key.open_ended]
    paths += ["trainer.eval_answer", "generator.agent_program", "environment.env_class"]
    for path in paths:
        group, _, name = path.rpartition(".")
        holder = attrgetter(group)(cfg)
        value = vars(holder)[name]
        if isinstance(value, list):
            setattr(holder, name, [absolute_reference(reference) for reference in value])
        else:
            setattr(holder, name, absolute_reference(value))


def _absolute_path(path: str) -> str:
    """The absolute path of a file or folder; "" for ""."""
    if path:
        return str(Path(path).expanduser().resolve())
    return path


def settle_models(
    cfg: Config,
    roles: Sequence[Role],
    *,
    own_tokenizer: bool,
    weights: bool = True,
) -> None:
    """Resolve and check the model of each role; a role without one has the policy's.

    Args:
        roles: the roles of the run, whose models are checked.
        own_tokenizer: the experiment has a tokenizer of its own.
        weights: a local folder must have them.

    Raises:
        UserError: for the first model that cannot be used.
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
        configured_path = model.path
        key = f"{role.section}.model.path"
        if not configured_path and key in role.enabled_by:
            continue  # the run does not have this role
        if configured_path:
            model.path = model_path(configured_path, key)
        else:
            model.path = model_path(role.model(cfg).path)
        if role not in roles:
            continue
        has_model = configured_path or role.name == POLICY
        if has_model:
            tokenizer = own_tokenizer or role.name != POLICY
            check_model(model.path, cfg, key=key, own_tokenizer=tokenizer, weights=weights)
            if role.on_policys_devices(cfg):
                check_parallel(cfg.trainer.parallel, model.path, key)
            if role.name == POLICY:
                check_routers(cfg.trainer.policy.router_replay, model.path, key)
        # Also of the policy's model, which may have other config_kwargs in this role.
        problem = next(complaints(model.path, model.config_kwargs, f"{role.section}.model"), "")
        if problem:
            raise UserError(problem)
        if role.name == POLICY and cfg.trainer.policy.freeze:
            from skyasync.models.freezing import check_frozen  # torch and transformers

            check_frozen(model.path, model.config_kwargs, cfg.trainer.policy.freeze)
        lora = cfg.trainer.policy.lora
        modules = [*lora.target_modules, *lora.exclude_modules]
        if role.name == POLICY and lora.rank and modules != ["all-linear"]:
            from skyasync.models.lora import check_targets  # torch and transformers

            check_targets(model.path, model.config_kwargs, lora)
        if has_model and role.head != VOCABULARY:
            check_one_label(model.path, key, trained=role.head == SCORE)
        if has_model and (role.head == SCORE or role.name == TEACHER_ROLE):
            check_same_tokens(model.path, cfg.trainer.policy.model.path, key)


# ---------------------------------------------------------------- folders


def check_writable(key: str, folder: str) -> None:
    """Make the folder and a file in it, then remove both if they are new.

    Raises:
        UserError: if this fails.
    """
    path = Path(folder).expanduser().absolute()
    new_folders = [parent for parent in (path, *path.parents) if not parent.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f"{key}={folder} cannot be written: {error.strerror or error}") from error
    finally:
        for parent in new_folders:
            # Another process may have written to it meanwhile.
            with contextlib.suppress(OSError):
                parent.rmdir()


# ---------------------------------------------------------------- devices and servers


def check_cores(cfg: Config, roles: Sequence[Role]) -> None:
    """Check the number of processes of a run on a machine without GPUs, whose cores they share.

    Raises:
        UserError: if they are more than this machine could reasonably run.
    """
    slots = plan_slots(cfg, gpus=False, roles=roles)
    cores = os.cpu_count() or 1
    if len(slots.bundles) <= PROCESSES_PER_CORE * cores:
        return
    counts = []
    for name, bundles in slots.by_role.items():
        if bundles:
            counts.append(f"{name} {len(bundles)}")
    raise UserError(
        f"this machine has no GPU that can be used, and {cores} cores are too few for {len(slots.bundles)} processes "
        f"(at most {PROCESSES_PER_CORE} per core; {', '.join(counts)}): use fewer ranks "
        f"(trainer.placement.policy_num_gpus_per_node={cfg.trainer.placement.policy_num_gpus_per_node}) or engines "
        f"(generator.num_inference_engines={cfg.generator.num_inference_engines}), or join a cluster with ray.address"
    )


def check_judges(cfg: Config) -> dict[str, str]:
    """Send one short question to the server of each judge.

    Returns:
        The keys of the servers, by the judges' names.

    Raises:
        UserError: for the first judge whose key is missing, or whose server cannot be reached or
            refuses.
    """
    keys = {}
    servers = []
    for name, judge in judges_of(cfg.environment.judges).items():
        if judge.base_url:
            keys[name] = key_of(name, judge)
            servers.append(ChatServer(name, judge, keys[name]))

    async def probe() -> None:
        await asyncio.gather(*(server.probe() for server in servers))

    if servers:
        with ThreadPoolExecutor(1) as thread:  # an event loop may run in this one (a notebook)
            thread.submit(asyncio.run, probe()).result()
    return keys

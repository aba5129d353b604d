"""``skyasync rehearse``: three real steps of a recipe, with a small model and few ranks, before a
cluster runs it.

Invariant: data, prompts, template, environments, rewards, agents, plan, objective and precision are
the recipe's. Only the models and the settings of ``smaller`` change, and each change is printed.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyasync.config.model_files import config_file, model_path
from skyasync.config.schema import Config
from skyasync.config.schema.generator import BETWEEN_GPUS
from skyasync.config.schema.sampling import backend
from skyasync.config.values import written
from skyasync.errors import UserError
from skyasync.inference.backends.vllm.options import KEY as ENGINE_OPTIONS
from skyasync.inference.backends.vllm.options import cpu_limits
from skyasync.models import SCORE
from skyasync.planning.command import Options, show_plan
from skyasync.preflight.model import MODEL, hub_folder
from skyasync.preflight.prepare import settle_models
from skyasync.utils.machine import this_machine
from skyasync.workers.roles import POLICY, ROLES

if TYPE_CHECKING:
    from skyasync.rollout.types import Prompt
    from skyasync.run.experiment import BasePPOExp

HELP = """\
usage: skyasync rehearse [--gpus N --card NAME] [--config FILE.yaml] [key=value ...]

Runs three real steps of a recipe on this machine, with a small model of the same family (random weights), at most two
ranks and engines of a kind, short responses and few prompts. Data, template, environments, rewards, agent, plan and
objective are the recipe's, so what would fail in them fails here. A weight sync is verified, a checkpoint saved, the
held-out prompts evaluated, the model exported. With --gpus and --card, as of skyasync plan, the full size is planned
first. A program with a trainer of its own takes --rehearse. Ends with status 0 if all of it works.
"""
STEPS = 3  # the second one trains on what new weights sampled, and saves a checkpoint
SAMPLES = 4  # per prompt: an advantage needs several
RESPONSE = 32  # tokens; random weights end a response by chance alone
EVALUATED = 8  # prompts
SEQUENCES = 64  # at a time in an engine
OWN_DEVICES = ("critic", "ref", "reward", "teacher")  # roles that may have some


def rehearse(
    cfg: Config,
    experiment_class: type[BasePPOExp],
    options: Options,
    run: Callable[[BasePPOExp], object],
) -> bool:
    """Plan the full size if a machine is described, then run ``cfg`` small; whether both work.

    Args:
        cfg: is changed.
        run: runs an experiment, and ends the program with one line on an error.
    """
    experiment = experiment_class(cfg)
    # What does not divide the models, or is missing in their folders, is named at full size.
    for role in experiment.roles():
        model_config = role.own_model(cfg)
        if model_config is not None and model_config.path:
            key = f"{role.section}.model.path"
            files_of(model_path(model_config.path, key), key)
    own_tokenizer = not experiment.is_ours("get_tokenizer")
    settle_models(cfg, experiment.roles(), own_tokenizer=own_tokenizer, weights=False)
    fits = True
    described = options != Options()
    if described:
        print("full size:")
        fits = show_plan(cfg, options)
        print()
    folder = Path(tempfile.mkdtemp(prefix="skyasync-rehearsal-"))
    print(f"rehearsal: {STEPS} steps with random weights, in {folder}; changed for it:")
    for key, value in smaller(cfg).items():
        print(f"  {key}: {written(attrgetter(key)(cfg))} -> {written(value)}")
        _set(cfg, key, value)
    for key, value in output_settings(folder).items():
        _set(cfg, key, value)
    for line in _with_small_models(cfg, folder):
        print(f"  {line}")
    sys.stdout.flush()  # before lines of other processes
    began = time.monotonic()
    metrics = run(_few_prompts(experiment_class)(cfg))
    if metrics is None:
        return False
    print(
        f"rehearsed in {time.monotonic() - began:.0f} s: {STEPS} steps, weight syncs, checkpoint, evaluation, export"
    )
    if not described:
        print("the full size was not looked at: add --gpus N --card NAME")
    shutil.rmtree(folder)  # after a failure it stays, with the logs
    return fits


def _set(cfg: Config, key: str, value: object) -> None:
    section, _, name = key.rpartition(".")
    setattr(attrgetter(section)(cfg), name, value)


LIMITS = {
    "trainer.critic.warmup_steps": 1,  # the policy learns, too
    "trainer.sync_interval": 2,
    "trainer.parallel.context": 2,
    "trainer.parallel.tensor": 2,
    "trainer.parallel.pipeline": 2,
    "trainer.parallel.expert": 2,
    "generator.num_inference_engines": 2,
    "generator.hybrid_engines": 1,
    "generator.n_samples_per_prompt": SAMPLES,
    "generator.oversample_per_prompt": 1,
    "generator.eval_n_samples_per_prompt": 2,
    "generator.max_num_seqs": SEQUENCES,
    "generator.sampling_params.max_generate_length": RESPONSE,
    "generator.sampling_params.min_tokens": RESPONSE,
}
"""The most that a rehearsal has of what the recipe has."""

LOCAL: dict[str, Any] = {
    "trainer.placement.policy_num_nodes": 1,
    "generator.engines": [],
    "generator.inference_engine_tensor_parallel_size": 1,
    "generator.generate_batch_size": 0,
    "ray.address": "",
}
"""Settings of a run on this machine alone."""

OF_TRAINING = ("max_generate_length", "min_tokens")
"""Sampling parameters that an evaluation takes from training."""


def smaller(cfg: Config) -> dict[str, Any]:
    """The sizes that a rehearsal changes: key -> value."""
    trainer = cfg.trainer
    generator = cfg.generator
    changed: dict[str, Any] = dict(LOCAL)
    for key, limit in LIMITS.items():
        changed[key] = min(attrgetter(key)(cfg), limit)
    ranks = trainer.placement.policy_ranks
    parallel = trainer.parallel
    rows = min(max(1, ranks // (parallel.context * parallel.tensor * parallel.pipeline)), 2)
    small_ranks = rows
    for dimension in ("context", "tensor", "pipeline"):
        small_ranks *= changed[f"trainer.parallel.{dimension}"]
    changed["trainer.placement.policy_num_gpus_per_node"] = small_ranks
    mini_batch = trainer.policy_mini_batch_size or trainer.train_batch_size
    # A second update of a batch is off policy, which the first is not.
    updates = min(-(-trainer.train_batch_size // mini_batch), 2)
    mini_batch = min(mini_batch, 2)  # one prompt for each of two ranks
    batch = mini_batch * updates
    changed |= {
        "trainer.train_batch_size": batch,
        "trainer.policy_mini_batch_size": trainer.policy_mini_batch_size and mini_batch,
        "trainer.stream_groups": min(trainer.stream_groups, batch),
        "trainer.max_training_steps": min(trainer.max_training_steps or STEPS, STEPS),
    }
    sampling = generator.eval_sampling_params.items()
    changed["generator.eval_sampling_params"] = {
        name: value for name, value in sampling if name not in OF_TRAINING
    }
    if generator.engines:
        changed |= {"generator.backend": "auto", "generator.weight_sync_dir": ""}
    elif backend(cfg) == "vllm":
        changed |= _vllm_here(cfg)
    if generator.weight_sync_backend in BETWEEN_GPUS:
        changed |= {"generator.weight_sync_backend": "auto", "generator.weight_sync_senders": 1}
    for role in OWN_DEVICES:
        changed[f"trainer.placement.{role}_num_nodes"] = 1
        changed[f"trainer.placement.{role}_num_gpus_per_node"] = 1
    for role in ("policy", "critic", "ref"):
        size = attrgetter(f"trainer.{role}.fsdp_size")(cfg)
        changed[f"trainer.{role}.fsdp_size"] = int(0 < size < ranks)
    return {key: value for key, value in changed.items() if attrgetter(key)(cfg) != value}


def _vllm_here(cfg: Config) -> dict[str, Any]:
    """What vLLM engines of one device take on this machine, or the embedded engine if it does not
    have vLLM, or if vLLM cannot do it without a GPU."""
    limits = [] if this_machine().gpus else list(cpu_limits(cfg))
    options = cfg.generator.engine_kwargs
    sleeps = cfg.trainer.placement.colocate_all or cfg.generator.hybrid_engines
    accepted = dict(options)
    accepted.pop("pipeline_parallel_size", None)
    insurmountable = False  # limits that no option causes
    for limit in limits:
        names = [name for name in options if f"{ENGINE_OPTIONS}.{name}=" in limit]
        insurmountable |= not names
        for name in names:
            accepted.pop(name, None)
    if not find_spec("vllm") or insurmountable or (sleeps and not this_machine().gpus):
        return {"generator.backend": "transformers", ENGINE_OPTIONS: {}}
    return {ENGINE_OPTIONS: accepted}


def output_settings(folder: Path) -> dict[str, Any]:
    """Settings by which a rehearsal writes into ``folder`` alone, and makes a checkpoint, an
    evaluation, an export."""
    return {
        "trainer.ckpt_interval": 2,
        "trainer.ckpt_minutes": 0.0,
        "trainer.ckpt_path": "",
        "trainer.eval_before_train": False,
        "trainer.eval_interval": 0,
        "trainer.eval_minutes": 0.0,
        "trainer.export_path": str(folder / "export"),
        "trainer.export_interval": 0,
        "trainer.critic.export_path": str(folder / "critic"),  # if there is a critic
        "trainer.resume_mode": "none",
        "trainer.run_name": "rehearsal",
        "trainer.runs_dir": str(folder),
        "trainer.logger": ["jsonl"],
        "trainer.report": False,
        "trainer.live_page": False,
        "trainer.profile_steps": [],
    }


def _with_small_models(cfg: Config, folder: Path) -> list[str]:
    """Give every model that is named a small one's folder; a line for each."""
    from skyasync.models.small_model import make_small_model  # it imports torch

    lines = []
    tensor = cfg.trainer.parallel.tensor
    seed = cfg.trainer.seed
    made: dict[tuple[str, str], str] = {}

    def small(path: str, head: str, kwargs: dict[str, Any], key: str) -> str:
        named = model_path(path, key)
        if (named, head) not in made:
            target = folder / f"model-{len(made)}"
            count = make_small_model(files_of(named), target, head, kwargs, tensor, seed)
            made[named, head] = str(target)
            lines.append(f"{key}: {path} -> {count / 1e6:.1f}M parameters of the same family")
        return made[named, head]

    for role in ROLES.values():
        model_config = role.own_model(cfg)
        if model_config is not None and model_config.path:
            if role.name != POLICY:
                kwargs = dict(model_config.config_kwargs)
            else:
                kwargs = role.config_kwargs(cfg)
            key = f"{role.section}.model.path"
            model_config.path = small(model_config.path, role.head, kwargs, key)
    for name, entry in cfg.trainer.reward.models.items():
        entry["path"] = small(entry["path"], SCORE, {}, f"trainer.reward.models.{name}.path")
    return lines


def _few_prompts(experiment_class: type[BasePPOExp]) -> type[BasePPOExp]:
    """The experiment, which evaluates on its first held-out prompts alone."""
    from skyasync.run.experiment import BasePPOExp as Base

    class Rehearsed(experiment_class):  # type: ignore[misc, valid-type]
        def get_eval_dataset(self) -> Sequence[Prompt] | None:
            prompts = super().get_eval_dataset()
            return prompts and prompts[:EVALUATED]

        def is_ours(self, factory: str) -> bool:
            return next(base for base in experiment_class.__mro__ if factory in vars(base)) is Base

    return Rehearsed


def files_of(path: str, key: str = MODEL) -> Path:
    """The folder with configuration and tokenizer; of a hub's model they are downloaded, weights
    are not.

    Args:
        key: that names the model, for errors.
    """
    if Path(path).is_dir():
        return Path(path)
    hub_folder(path, key)  # one line if the hub cannot be reached
    from huggingface_hub import snapshot_download

    from skyasync.models.small_model import WEIGHT_FILES

    ignored = [*WEIGHT_FILES, "*.msgpack", "*.onnx", "*.ot"]
    try:
        return Path(snapshot_download(path, ignore_patterns=ignored))
    except Exception as error:  # no network, no access: a model in the cache may still do
        file = config_file(path)
        if file:
            return file.parent
        raise UserError(f"{path}: its tokenizer cannot be downloaded: {error}") from error

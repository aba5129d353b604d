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
from collections.abc import Callable, Mapping, Sequence
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
from skyasync.models.config import EXPERTS, config_value
from skyasync.planning.command import Options, show_plan
from skyasync.planning.shape import with_layers
from skyasync.preflight.model import MODEL, hub_folder
from skyasync.preflight.prepare import settle_models
from skyasync.utils.machine import this_machine
from skyasync.workers.roles import POLICY, ROLES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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
STEPS = 3
SAMPLES = 4
RESPONSE = 32
EVALUATED = 8
SEQUENCES = 64
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
    # what divides the models, and what their folders lack, before they are small
    for role in experiment.roles():
        own = role.own_model(cfg)
        if own is not None and own.path:
            key = f"{role.section}.model.path"
            files_of(model_path(own.path, key), key)
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
    for key, value in (smaller(cfg) | output_settings(folder)).items():
        holder, _, name = key.rpartition(".")
        owner = attrgetter(holder)(cfg)
        if key not in output_settings(folder):
            print(f"  {key}: {written(vars(owner)[name])} -> {written(value)}")
        setattr(owner, name, value)
    for line in _with_small_models(cfg, folder):
        print(f"  {line}")
    sys.stdout.flush()
    began = time.monotonic()
    metrics = run(_few_prompts(experiment_class)(cfg))
    if metrics is None:
        return False
    print(
        f"rehearsed in {time.monotonic() - began:.0f} s: {STEPS} steps, weight syncs, checkpoint, evaluation, export"
    )
    if not described:
        print("the full size was not looked at: add --gpus N --card NAME")
    shutil.rmtree(folder)
    return fits


def smaller(cfg: Config) -> dict[str, Any]:
    """The sizes that a rehearsal changes: key -> value."""
    trainer = cfg.trainer
    generator = cfg.generator
    placement = trainer.placement
    parallel = trainer.parallel
    context = min(parallel.context, 2)
    tensor = min(parallel.tensor, 2)
    pipeline = min(parallel.pipeline, 2)
    ranks = placement.policy_ranks
    data = min(ranks // (parallel.context * parallel.tensor * parallel.pipeline) or 1, 2)
    updates = -(
        -trainer.train_batch_size // (trainer.policy_mini_batch_size or trainer.train_batch_size)
    )
    mini_batch = min(trainer.policy_mini_batch_size or trainer.train_batch_size, max(data, 2))
    batch = mini_batch * min(updates, 2)
    changed: dict[str, Any] = {
        "trainer.placement.policy_num_nodes": 1,
        "trainer.placement.policy_num_gpus_per_node": data * context * tensor * pipeline,
        "trainer.parallel.context": context,
        "trainer.parallel.tensor": tensor,
        "trainer.parallel.pipeline": pipeline,
        "trainer.parallel.expert": min(parallel.expert, 2),
        "trainer.train_batch_size": batch,
        "trainer.policy_mini_batch_size": trainer.policy_mini_batch_size and mini_batch,
        "trainer.stream_groups": min(trainer.stream_groups, batch),
        "trainer.max_training_steps": min(trainer.max_training_steps or STEPS, STEPS),
        # the policy learns, too
        "trainer.critic.warmup_steps": min(trainer.critic.warmup_steps, 1),
        "trainer.sync_interval": min(trainer.sync_interval, 2),
        "generator.num_inference_engines": min(generator.num_inference_engines, 2),
        "generator.hybrid_engines": min(generator.hybrid_engines, 1),
        "generator.engines": [],
        "generator.inference_engine_tensor_parallel_size": 1,
        "generator.n_samples_per_prompt": min(generator.n_samples_per_prompt, SAMPLES),
        "generator.oversample_per_prompt": min(generator.oversample_per_prompt, 1),
        "generator.eval_n_samples_per_prompt": min(generator.eval_n_samples_per_prompt, 2),
        "generator.generate_batch_size": 0,
        "generator.max_num_seqs": min(generator.max_num_seqs, SEQUENCES),
        "generator.sampling_params.max_generate_length": min(
            generator.sampling_params.max_generate_length, RESPONSE
        ),
        "generator.sampling_params.min_tokens": min(generator.sampling_params.min_tokens, RESPONSE),
        "generator.eval_sampling_params": {
            name: value
            for name, value in generator.eval_sampling_params.items()
            if name not in ("max_generate_length", "min_tokens")  # which are as in training
        },
        "ray.address": "",
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
        if 0 < size < ranks:
            changed[f"trainer.{role}.fsdp_size"] = 1
        else:
            changed[f"trainer.{role}.fsdp_size"] = 0
    return {key: value for key, value in changed.items() if attrgetter(key)(cfg) != value}


def _vllm_here(cfg: Config) -> dict[str, Any]:
    """What vLLM engines of one device take on this machine, or the embedded engine if it does not
    have vLLM, or if vLLM cannot do it without a GPU."""
    limits = [] if this_machine().gpus else list(cpu_limits(cfg))
    options = cfg.generator.engine_kwargs
    sleeps = cfg.trainer.placement.colocate_all or cfg.generator.hybrid_engines
    wrong = {
        name for name in options if any(f"{ENGINE_OPTIONS}.{name}=" in line for line in limits)
    }
    beyond = [
        line for line in limits if not any(f"{ENGINE_OPTIONS}.{name}=" in line for name in wrong)
    ]
    if not find_spec("vllm") or beyond or (sleeps and not this_machine().gpus):
        return {"generator.backend": "transformers", ENGINE_OPTIONS: {}}
    accepted = {
        name: value
        for name, value in options.items()
        if name not in {*wrong, "pipeline_parallel_size"}
    }
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
    lines = []
    tensor = cfg.trainer.parallel.tensor
    seed = cfg.trainer.seed
    made: dict[tuple[str, str], str] = {}

    def small(path: str, head: str, kwargs: dict[str, Any], key: str) -> str:
        named = model_path(path, key)
        if (named, head) not in made:
            target = folder / f"model-{len(made)}"
            count = make_small_model(named, target, head, kwargs, tensor, seed)
            made[named, head] = str(target)
            lines.append(f"{key}: {path} -> {count / 1e6:.1f}M parameters of the same family")
        return made[named, head]

    for role in ROLES.values():
        own = role.own_model(cfg)
        if own is not None and own.path:
            if role.name != POLICY:
                kwargs = dict(own.config_kwargs)
            else:
                kwargs = role.config_kwargs(cfg)
            own.path = small(own.path, role.head, kwargs, f"{role.section}.model.path")
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


HEAD_DIM = 32  # the smallest that vLLM computes on CPUs
# per rank of the tensor axis
HEADS = 4
GROUPED_HEADS = 2
MOST_EXPERTS = 8
_WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.h5",
)
_AT_MOST = dict.fromkeys(EXPERTS, MOST_EXPERTS) | {
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
}
_LAYER_TYPES = ("layer_types", "mlp_layer_types", "indexer_types")  # of each layer


def make_small_model(
    path: str, folder: Path, head: str, config_kwargs: Mapping[str, Any], tensor: int, seed: int
) -> int:
    """Write a small model of the family of ``path`` into ``folder``; returns its number of
    parameters.

    It has fewer layers, heads and experts, and random weights. All else is the original's: class,
    tokenizer, template, processor, vocabulary, rotary embeddings. All kinds of layers that the
    original has are there.

    Args:
        path: a local folder, of which weights are not read, or a hub name.
        head: of the model's role (``skyasync.models.heads``).
        tensor: ranks that divide its heads.

    Raises:
        UserError: if the files cannot be found, or transformers cannot build a small model of this
            family.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from skyasync.models.heads import HEADS as MODEL_HEADS

    source = files_of(path)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*_WEIGHTS), dirs_exist_ok=True)
    kind = MODEL_HEADS[head].with_config(config_kwargs)
    config = kind.config(str(folder))
    try:
        shrink(config, tensor)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = kind.auto(config).from_config(config, dtype=torch.float32)
    except (ValueError, AttributeError, TypeError, KeyError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{path}: no small model of type {config.model_type} can be made ({first})"
        ) from error
    disable_progress_bar()
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


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

    try:
        return Path(
            snapshot_download(path, ignore_patterns=[*_WEIGHTS, "*.msgpack", "*.onnx", "*.ot"])
        )
    except Exception as error:  # no network, no access: a model in the cache may still do
        file = config_file(path)
        if file:
            return file.parent
        raise UserError(f"{path}: its tokenizer cannot be downloaded: {error}") from error


def shrink(config: PreTrainedConfig, tensor: int = 1) -> None:
    """Make the model of a configuration small, in place."""
    text: Any = config.get_text_config()
    _shrink_language_model(text, tensor)
    tower = vars(config).get("vision_config")
    if tower is not None:
        _set(
            tower,
            depth=2,
            num_hidden_layers=2,
            hidden_size=GROUPED_HEADS * HEAD_DIM,
            embed_dim=GROUPED_HEADS * HEAD_DIM,
            num_heads=GROUPED_HEADS,
            num_attention_heads=GROUPED_HEADS,
            intermediate_size=2 * GROUPED_HEADS * HEAD_DIM,
            out_hidden_size=text.hidden_size,
            deepstack_visual_indexes=[1],
            fullatt_block_indexes=[1],
        )


def _set(config: Any, **values: object) -> None:  # noqa: ANN401
    """Set what the family has."""
    for name, value in values.items():
        if config_value(config, name) is not None:
            setattr(config, name, value)


def _shrink_language_model(text: Any, tensor: int) -> None:  # noqa: ANN401
    heads = text.num_attention_heads
    kv_heads = config_value(text, "num_key_value_heads")
    hidden = HEADS * tensor * HEAD_DIM
    text.num_attention_heads = HEADS * tensor
    text.hidden_size = hidden
    if kv_heads is not None:
        grouped = GROUPED_HEADS * tensor if kv_heads > 1 else 1
        if kv_heads == heads:
            text.num_key_value_heads = HEADS * tensor
        else:
            text.num_key_value_heads = grouped
    _set(
        text,
        head_dim=HEAD_DIM,
        intermediate_size=hidden // 2,
        n_inner=hidden // 2,
        ffn_dim=hidden // 2,
        moe_intermediate_size=hidden // 2,
        shared_expert_intermediate_size=hidden // 2,
        query_pre_attn_scalar=HEAD_DIM,
        # multi-head latent attention
        q_lora_rank=2 * HEAD_DIM,
        kv_lora_rank=HEAD_DIM,
        qk_nope_head_dim=HEAD_DIM,
        qk_rope_head_dim=HEAD_DIM,
        qk_head_dim=2 * HEAD_DIM,
        v_head_dim=HEAD_DIM,
        # linear attention
        linear_num_key_heads=GROUPED_HEADS * tensor,
        linear_num_value_heads=HEADS * tensor,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
    )
    for name, most in _AT_MOST.items():
        if isinstance(count := config_value(text, name), int):
            setattr(text, name, min(count, most))
    _shrink_rotary_embeddings(config_value(text, "rope_parameters", {}))
    _remove_layers(text)


def _shrink_rotary_embeddings(rope: dict[str, Any]) -> None:
    half = HEAD_DIM // 2
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        for name in ("short_factor", "long_factor"):
            if name in part:
                part[name] = part[name][:half]
        if "mrope_section" in part:
            part["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def _remove_layers(text: Any) -> None:  # noqa: ANN401
    """Keep the first layers, so many that every kind of them is there."""
    layer_types = [config_value(text, name, []) for name in _LAYER_TYPES]
    needed = [each.index(kind) + 1 for each in layer_types for kind in set(each)]
    with_layers(text, min(text.num_hidden_layers, max([2, *needed])))

"""Checks of a model's folder without loading it: configuration, tokenizer, parallelism, memory.

Invariant: reads JSON, file names and the headers of weights alone. A model on the hub is searched
in the cache, then by one request, for no longer than ``ANSWER_S``. ``check_memory`` never rejects a
run that would fit: it counts only weights, gradients and optimizer state of the policy;
``skyasync plan`` measures the rest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from skyasync.config.model_files import CONFIG, config_file, read_json, read_shape
from skyasync.config.schema import Config, ParallelConfig
from skyasync.config.schema.sampling import backend, sampling_groups
from skyasync.errors import UserError
from skyasync.inference.interface import ENGINES
from skyasync.models.config import ATTENDING, EXPERTS
from skyasync.models.images import FAMILIES, reads_images
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.utils.machine import Machine
from skyasync.utils.weight_files import check_model_files

ANSWER_S = 2.0  # a hub that is slower would delay each start of a run
MODEL = "trainer.policy.model.path"
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
#: Keys that only the configurations of models for images, videos or sounds have.
_SENSES = (
    "vision_config",
    "audio_config",
    "visual",
    "mm_vision_tower",
    "image_token_id",
    "image_token_index",
)
_REASONS = {"gemma3": "the tokens of Gemma 3's images depend on the text around them"}
# These roles read the policy's prompts with their images.
_TEXT_ROLES = ("trainer.ref.", "trainer.critic.")
_HEADS = "num_attention_heads"
_KV_HEADS = "num_key_value_heads"

#: Families that transformers cannot split (a test compares them); others are checked at loading.
_WITHOUT_TENSOR_PLAN = """
bamba bloom codegen dbrx diffllama falcon falcon_h1 falcon_mamba gpt2 gpt_bigcode gpt_neo gptj granitemoe
granitemoehybrid granitemoeshared jamba lfm2 lfm2_moe mamba mamba2 mpt nemotron nemotron_h opt persimmon
phimoe recurrent_gemma stablelm xglm zamba zamba2
"""
#: Families that cannot be cut into stages of layers.
_WITHOUT_STAGES = """
bamba biogpt bitnet bloom codegen dbrx diffllama falcon falcon_h1 falcon_mamba gpt2 gpt_bigcode gpt_neo gpt_neox gptj
granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_dense hunyuan_v1_moe jamba jetmoe lfm2 lfm2_moe
llama4_text mamba mamba2 mpt nanochat nemotron nemotron_h olmoe opt persimmon phi phimoe recurrent_gemma stablelm xglm
zamba zamba2 zaya
"""
TEMPLATE_S = 20.0  # for rendering a message, which takes milliseconds
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")


def check_model(
    path: str,
    cfg: Config,
    *,
    key: str = MODEL,
    own_tokenizer: bool = False,
    weights: bool = True,
) -> None:
    """Check a folder or a hub's model.

    Args:
        own_tokenizer: the experiment has a tokenizer of its own.
        weights: a local folder must have them.

    Raises:
        UserError: if the model cannot be trained with this configuration.
    """
    folder = Path(path) if Path(path).is_dir() else hub_folder(path, key)
    if folder is None:
        return
    shape = read_shape(folder / CONFIG, f"{key}={path}")
    if "model_type" not in shape:
        raise UserError(f"{key}={path}: its config.json names no model_type")
    # The type of a model that reads images is not that of its text model, which ``shape`` has.
    family = read_json(folder / CONFIG, f"{key}={path}")["model_type"]
    mark = next((name for name in _SENSES if shape.get(name)), "")
    if shape.get("vision_config") and family in FAMILIES:
        _check_vision(path, family, cfg, key)
    elif mark:
        reason = f" ({_REASONS[family]})" if family in _REASONS else ""
        raise UserError(
            f"{key}={path}: its config.json has a {mark}, the mark of a model that reads more than text, and its type "
            f"is {family}; types that read images and can be trained: {', '.join(FAMILIES)}{reason}"
        )
    elif key.startswith(_TEXT_ROLES) and reads_images(cfg.trainer.policy.model.path):
        raise UserError(
            f"{key}={path} reads only text, and the policy reads images: name a vision-language model"
        )
    if key == MODEL:  # engines have no other role's model
        size = cfg.generator.inference_engine_tensor_parallel_size
        heads = shape.get(_HEADS)
        if isinstance(heads, int) and heads % size:
            raise UserError(
                f"generator.inference_engine_tensor_parallel_size={size} does not divide the {heads} attention heads of "
                f"{path}: choose {_divisors(heads)}"
            )
        if backend(cfg) == "vllm":
            _check_positions(path, shape | cfg.trainer.policy.model.config_kwargs, cfg)
    _check_token_ids(path, shape, cfg)
    if not Path(path).is_dir():  # the hub's other files are not here yet
        return
    if weights:
        if not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
            raise UserError(f"{key}={path} is a folder without weights (*.safetensors)")
        check_model_files(folder)
    if not own_tokenizer:
        _check_tokenizer(folder, path, cfg)


def _check_token_ids(path: str, shape: Mapping[str, Any], cfg: Config) -> None:
    """Raises ``UserError`` for token ids of the sampling settings beyond the model's vocabulary."""
    tokens = shape.get("vocab_size")
    if not isinstance(tokens, int):
        return
    for group, sampling in sampling_groups(cfg.generator).items():
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(sampling, name) or ():
                if int(token) >= tokens:
                    raise UserError(
                        f"generator.{group}.{name} has {int(token)}, which is beyond the vocabulary of {path}: its "
                        f"{tokens} tokens are 0 to {tokens - 1}"
                    )


def _check_tokenizer(folder: Path, path: str, cfg: Config) -> None:
    """Raises ``UserError`` for a folder whose tokenizer cannot be read, or has no chat template."""
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise UserError(f"{MODEL}={path} is a folder without a tokenizer (tokenizer.json)")
    if (folder / "tokenizer.json").is_file():
        # Else the library would warn of each process that is started later.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer

        try:
            Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises Exception itself
            raise UserError(
                f"{MODEL}={path}: its tokenizer.json cannot be read: {error}"
            ) from error
    if not cfg.data.apply_chat_template or cfg.data.chat_template:
        return
    if any((folder / name).exists() for name in _TEMPLATES):
        return
    settings = folder / "tokenizer_config.json"
    template = None
    if settings.is_file():
        template = read_json(settings, f"{MODEL}={path}").get("chat_template")
    if not template:
        raise UserError(
            f"{MODEL}={path} has a tokenizer without a chat template: set data.apply_chat_template=false, or add "
            f"chat_template.jinja to the folder, or name one with data.chat_template"
        )


def _check_positions(path: str, shape: Mapping[str, Any], cfg: Config) -> None:
    """Raises ``UserError`` for sequences longer than the model's positions; vLLM rejects them."""
    positions = shape.get("max_position_embeddings")
    if not isinstance(positions, int):
        return
    scaling = shape.get("rope_scaling") or shape.get("rope_parameters")
    if "factor" in str(scaling):  # vLLM computes the extended positions itself
        return
    for group, sampling in sampling_groups(cfg.generator).items():
        prompt = cfg.trainer.max_prompt_length
        response = sampling.max_generate_length
        if prompt + response > positions:
            raise UserError(
                f"trainer.max_prompt_length={prompt} plus generator.{group}.max_generate_length={response} is more "
                f"than the max_position_embeddings={positions} of {path}: lower one, or extend the model's positions "
                f"with trainer.policy.model.config_kwargs"
            )


def _check_vision(path: str, family: str, cfg: Config, key: str) -> None:
    """Raises ``UserError`` for a setting that is not supported for a model that reads images."""
    trainer = cfg.trainer
    generator = cfg.generator
    lora = trainer.policy.lora
    engine = f"generator.backend={backend(cfg)}"
    capabilities = ENGINES.about(backend(cfg)).can
    image_role = key.startswith(("trainer.policy.", "trainer.ref.", "trainer.critic."))
    # Subject of the message -> whether it is the case.
    settings = {
        f"{key}, since only the policy, its reference and its critic read images,": not image_role,
        engine: not capabilities["reads_images"],
        f"{engine}, which has other names for LLaVA's weights than transformers,": (
            family == "llava" and capabilities["loads_as_files"]
        ),
        "generator.agent_func_path": bool(generator.agent_func_path),
        "trainer.dump_trajectories": trainer.dump_trajectories,
        "environment.judges": bool(cfg.environment.judges),
        "trainer.policy.lora.sync=adapter": lora.sync == "adapter",
        "trainer.policy.lora.export=adapter": lora.export == "adapter",
        "trainer.policy.lora.base_dtype": bool(lora.base_dtype),
        "trainer.policy.torch_compile": trainer.policy.torch_compile,
        "trainer.parallel.pipeline": trainer.parallel.pipeline > 1,
        "trainer.parallel.expert": trainer.parallel.expert > 1,
        "trainer.parallel.tensor": trainer.parallel.tensor > 1,
        "trainer.parallel.context": trainer.parallel.context > 1,
        "trainer.teacher.model.path": bool(trainer.teacher.model.path),
        "trainer.reward.models": bool(trainer.reward.models),
        f"trainer.strategy={trainer.strategy}": trainer.strategy != "fsdp2",
    }
    unsupported = [name for name, is_set in settings.items() if is_set]
    if unsupported:
        raise UserError(f"{path} reads images: {unsupported[0]} is not supported for such a model")


def check_one_label(path: str, key: str, *, trained: bool) -> None:
    """Raises ``UserError`` for a model whose head has more labels than one.

    Args:
        trained: the head of the model is used; else a causal language model suffices.
    """
    file = config_file(path)
    if file is None:
        return
    shape = read_shape(file, f"{key}={path}")
    architectures = [str(name) for name in shape.get("architectures") or ()]
    classifier = any(name.endswith("Classification") for name in architectures)
    labels = len(shape.get("id2label") or ()) or shape.get("num_labels", 2)
    if classifier and labels != 1:
        raise UserError(
            f"{key}={path} has a head of {labels} labels: it takes one of a single label"
        )
    if trained and not classifier:
        raise UserError(
            f"{key}={path} is not a model for sequence classification with one label: it has no head for rewards"
        )


def check_same_tokens(path: str, policy: str, key: str) -> None:
    """Raises ``UserError`` for a model with another tokenizer than the policy; both in folders."""
    file = Path(path, "tokenizer.json")
    policy_file = Path(policy, "tokenizer.json")
    if not file.is_file() or not policy_file.is_file():
        return
    if file.read_bytes() == policy_file.read_bytes():
        return
    tokenizer = read_json(file, f"{key}={path}").get("model") or {}
    policy_tokenizer = read_json(policy_file, f"{key}={path}").get("model") or {}
    # Other parts of the files, such as the normalisation of text, do not matter: tokens are sent.
    if tokenizer.get("vocab") != policy_tokenizer.get("vocab"):
        raise UserError(
            f"{key}={path} has another tokenizer than trainer.policy.model.path={policy}: it is given the policy's "
            f"tokens, which would mean something else to it"
        )


def check_parallel(parallel: ParallelConfig, path: str, key: str) -> None:
    """Raises ``UserError`` for sizes that do not divide a model, or that its layers reject."""
    tensor = parallel.tensor
    context = parallel.context
    file = config_file(path)
    if file is None or tensor * context * parallel.pipeline * max(1, parallel.expert) == 1:
        return
    shape = read_shape(file, f"{key}={path}")
    if parallel.pipeline > 1:
        _check_stages(parallel.pipeline, path, shape)
    if parallel.expert > 1:
        _check_experts(parallel.expert, path, shape)
    if tensor * context == 1:
        return
    settings = []
    if context > 1:
        settings.append(f"trainer.parallel.context={context}")
    if tensor > 1:
        settings.append(f"trainer.parallel.tensor={tensor}")
    other_layers = sorted(set(shape.get("layer_types") or ()) - ATTENDING)
    if other_layers:
        raise UserError(
            f"{settings[0]} splits {'sequences' if context > 1 else 'heads'}, but {path} has {other_layers[0]} layers, "
            f"which cannot be split: only attention layers can. Set it to 1"
        )
    if tensor > 1:
        for name in (_HEADS, _KV_HEADS, *EXPERTS):
            _check_divides(settings[-1], tensor, name, path, shape)
    if context > 1 and parallel.context_kind == "ulysses":
        # It exchanges the heads of a tensor-parallel rank between the context's ranks.
        _check_divides(" times ".join(settings), context * tensor, _HEADS, path, shape)
    family = shape.get("model_type")
    if tensor > 1 and family in _WITHOUT_TENSOR_PLAN.split():
        raise UserError(
            f"trainer.parallel.tensor={tensor}: transformers has no tensor-parallel plan for {family} ({path}): set "
            f"trainer.parallel.tensor=1"
        )


def _check_divides(setting: str, size: int, name: str, path: str, shape: Mapping[str, Any]) -> None:
    """Raises ``UserError`` if a size does not divide a number of the model's configuration."""
    count = shape.get(name)
    if isinstance(count, int) and count % size:
        raise UserError(
            f"{setting} does not divide {name}={count} of {path}: choose a divisor, {_divisors(count)}"
        )


def _check_experts(size: int, path: str, shape: Mapping[str, Any]) -> None:
    """Raises ``UserError`` for a model whose experts cannot be divided over so many ranks."""
    setting = f"trainer.parallel.expert={size}"
    for name in EXPERTS:  # families have different names for the number
        count = shape.get(name)
        if not isinstance(count, int) or not count:
            continue
        if count % size:
            raise UserError(
                f"{setting} does not divide the {count} experts of {path}: choose a divisor, {_divisors(count)}"
            )
        return
    raise UserError(
        f"{setting}: {shape['model_type']} ({path}) is not a mixture of experts: set it to 0"
    )


def _check_stages(stages: int, path: str, shape: Mapping[str, Any]) -> None:
    """Raises ``UserError`` for a model that cannot be cut into so many stages."""
    setting = f"trainer.parallel.pipeline={stages}"
    layers = shape.get("num_hidden_layers")
    family = shape["model_type"]
    if isinstance(layers, int) and layers < stages:
        raise UserError(
            f"{setting} is more than the {layers} layers of {path}: a stage has one at least"
        )
    if family in _WITHOUT_STAGES.split():
        raise UserError(
            f"{setting}: transformers has no plan by which {family} ({path}) can be cut into stages of layers: set "
            f"trainer.parallel.pipeline=1"
        )


def _divisors(count: int) -> str:
    divisors = [number for number in range(1, count + 1) if count % number == 0]
    return " or ".join(map(str, divisors))


def check_routers(replay: str, path: str, key: str) -> None:
    """Raises ``UserError`` for a model of which no choice of experts can be replayed.

    Args:
        replay: ``trainer.policy.router_replay``.
    """
    file = config_file(path)
    if replay == "none" or file is None:
        return
    shape = read_shape(file, f"{key}={path}")
    if not any(shape.get(name) for name in EXPERTS):
        raise UserError(
            f"trainer.policy.router_replay={replay}: {shape.get('model_type')} ({path}) has no routers that transformers "
            f"knows of: set trainer.policy.router_replay=none"
        )


_ABSENT = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)


def hub_folder(name: str, key: str = MODEL) -> Path | None:
    """The folder in the cache with the model's configuration; None if it is on the hub alone.

    Raises:
        UserError: if it is neither in the cache nor on the hub.
    """
    from huggingface_hub import constants

    cached_file = config_file(name)
    if cached_file:
        return cached_file.parent
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"{key}={name} is not in the cache of the Hugging Face hub, and HF_HUB_OFFLINE is set"
        )
    problem = f"no answer within {ANSWER_S:g} s"

    def request() -> None:
        nonlocal problem
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        try:
            url = hf_hub_url(name, CONFIG)
            response = get_session().head(url, headers=build_hf_headers(), timeout=ANSWER_S)
        except Exception as error:  # of a class that depends on the version of the library
            problem = f"it cannot be reached ({error})"
            return
        status = response.status_code
        if status < HTTPStatus.BAD_REQUEST:
            problem = ""
            return
        problem = f"it answers {status}"
        if status in _ABSENT:
            problem += ": there is no such model, or it is private"

    # In a thread, which may be left behind: a name server may take longer than any limit of ours.
    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    if problem:
        raise UserError(
            f"{key}={name} is neither a local folder nor available on the Hugging Face hub: {problem}"
        )
    return None


# Bytes of a weight below adapters, at least, by trainer.policy.lora.base_dtype.
_FROZEN = {"": 2.0, "nf4": 0.5, "int8": 1.0}
# Bytes of optimizer state of a parameter, at least.
_STATE = {"adamw": 8, "adamw_8bit": 2, "muon": 4}


def check_memory(cfg: Config, machine: Machine) -> None:
    """Raises ``UserError`` if the trained policy alone is larger than the machine.

    Args:
        machine: where all ranks of one node are.
    """
    key = "trainer.policy.model.path"
    path = cfg.trainer.policy.model.path
    count = parameters(Path(path))
    needed_bytes = count * bytes_per_parameter(cfg)
    if machine.gpus:
        # The weights are divided over groups of fsdp_size ranks; 0 is one group.
        ranks = cfg.trainer.placement.policy_ranks
        needed_bytes /= cfg.trainer.policy.fsdp_size or ranks
        available_bytes = machine.gpu_memory
        device = "each GPU"
        remedy = f"more ranks than {ranks} (trainer.placement), "
        if cfg.trainer.policy.cpu_offload != "none":
            return
    else:
        available_bytes = machine.host_memory
        device = "this machine"
        remedy = ""
    if needed_bytes <= available_bytes:
        return
    if cfg.trainer.policy.lora.rank:
        tensors = "weights"
    else:
        tensors = "weights, gradients and optimizer state"
    raise UserError(
        f"{key}={path}: the {tensors} of its {count / 1e9:.3g}B parameters take at least {needed_bytes / 2**30:.0f} "
        f"GiB, and {device} has {available_bytes / 2**30:.0f} GiB: use {remedy}adapters (trainer.policy.lora.rank) or "
        f"a smaller model; skyasync plan estimates what fits"
    )


def parameters(folder: Path) -> int:
    """The number of parameters in a local folder's files, by their headers; 0 for other models.

    Only the files that transformers reads count: some folders have the weights in other files too.
    """
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if not (folder / "model.safetensors").is_file() and index.is_file():
        weight_map = read_json(index, str(folder)).get("weight_map") or {}
        names = set(weight_map.values())
    count = 0
    for name in names:
        # A damaged file is an error of ``check_model_files``.
        with suppress(OSError, SafetensorError), safe_open(str(folder / name), "np") as weights:
            for tensor in weights.keys():  # noqa: SIM118
                count += prod(weights.get_slice(tensor).get_shape())
    return count


def bytes_per_parameter(cfg: Config) -> float:
    """Bytes of a trained parameter on all ranks that share it."""
    policy = cfg.trainer.policy
    if policy.lora.rank or policy.freeze:  # the trained parameters may be few
        return _FROZEN[policy.lora.base_dtype]
    optimizer = policy.optimizer_config
    count = 4.0  # the gradient
    if optimizer.max_grad_cosine:
        count += 4  # the previous gradient
    state = _STATE[optimizer.name]
    if optimizer.bf16_stochastic_round:  # weights and state are bfloat16
        return count + state / 2
    return count + state + 4  # float32 master weights


def check_template(tokenizer: Tokenizer) -> None:
    """Render one message in a thread: a template of a model's files may loop for ever.

    Raises:
        UserError: if that takes longer than ``TEMPLATE_S``.
    """

    def render() -> None:
        # The prompts, which are rendered next, raise an error of the template.
        with suppress(Exception):
            tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1"}], tokenize=False)

    thread = threading.Thread(target=render, name="chat template", daemon=True)
    thread.start()
    thread.join(TEMPLATE_S)
    if thread.is_alive():
        raise UserError(
            f"the chat template of {tokenizer.name_or_path} has not rendered one message within {TEMPLATE_S:g} s: name "
            f"another one with data.chat_template"
        )

"""What a model's folder tells without loading it: configuration, tokenizer, what divides it, how
much memory it takes.

Invariant: reads JSON, file names and the headers of weights alone. A model on the hub is looked for
in the cache, then asked for once, for no longer than ``ANSWER_S``. ``check_memory`` never rejects a
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

ANSWER_S = 2.0
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
#: What only the configurations of models for pictures, films or sounds have.
_SENSES = (
    "vision_config",
    "audio_config",
    "visual",
    "mm_vision_tower",
    "image_token_id",
    "image_token_index",
)
_REASONS = {"gemma3": "the tokens of Gemma 3's images depend on the text around them"}
_HEADS = "num_attention_heads"
_KV_HEADS = "num_key_value_heads"

#: Families of language models that transformers cannot split (a test compares them); others are asked when they load.
_WITHOUT_TENSOR_PLAN = """
bamba bloom codegen dbrx diffllama falcon falcon_h1 falcon_mamba gpt2 gpt_bigcode gpt_neo gptj granitemoe
granitemoehybrid granitemoeshared jamba lfm2 lfm2_moe mamba mamba2 mpt nemotron nemotron_h opt persimmon
phimoe recurrent_gemma stablelm xglm zamba zamba2
"""
#: Those that cannot be cut into stages of layers.
_WITHOUT_STAGES = """
bamba biogpt bitnet bloom codegen dbrx diffllama falcon falcon_h1 falcon_mamba gpt2 gpt_bigcode gpt_neo gpt_neox gptj
granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_dense hunyuan_v1_moe jamba jetmoe lfm2 lfm2_moe
llama4_text mamba mamba2 mpt nanochat nemotron nemotron_h olmoe opt persimmon phi phimoe recurrent_gemma stablelm xglm
zamba zamba2 zaya
"""
TEMPLATE_S = 20.0  # to render a message, which takes milliseconds
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")


def check_model(
    path: str, cfg: Config, *, key: str = MODEL, own_tokenizer: bool = False, weights: bool = True
) -> None:
    """Raises ``UserError`` for a folder or a hub's model that cannot be trained with this
    configuration.

    Args:
        own_tokenizer: the experiment brings one of its own.
        weights: a local folder must have them.
    """
    folder = Path(path) if Path(path).is_dir() else hub_folder(path, key)
    if folder is None:
        return
    shape = read_shape(folder / CONFIG, f"{key}={path}")
    if "model_type" not in shape:
        raise UserError(f"{key}={path}: its config.json names no model_type")
    family = read_json(folder / CONFIG, f"{key}={path}")[
        "model_type"
    ]  # not that of its part for text
    if shape.get("vision_config") and family in FAMILIES:
        _check_vision(path, family, cfg, key)
    elif sees := next((name for name in _SENSES if shape.get(name)), ""):
        raise UserError(
            f"{key}={path}: its config.json has a {sees}, the mark of a model that reads more than text, and its type "
            f"is {family}; types that read images and can be trained: {', '.join(FAMILIES)}"
            + (f" ({_REASONS[family]})" if family in _REASONS else "")
        )
    elif key.startswith(("trainer.ref.", "trainer.critic.")) and reads_images(
        cfg.trainer.policy.model.path
    ):
        raise UserError(
            f"{key}={path} reads only text, and the policy reads images: name a vision-language model"
        )
    size = cfg.generator.inference_engine_tensor_parallel_size
    heads = shape.get(_HEADS)
    if (
        key == MODEL and isinstance(heads, int) and heads % size
    ):  # engines have no other role's model
        raise UserError(
            f"generator.inference_engine_tensor_parallel_size={size} does not divide the {heads} attention heads of "
            f"{path}: choose {_divisors(heads)}"
        )
    if key == MODEL and backend(cfg) == "vllm":
        _check_positions(path, shape | cfg.trainer.policy.model.config_kwargs, cfg)
    tokens = shape.get("vocab_size")
    for group, sampling in sampling_groups(cfg.generator).items():
        if not isinstance(tokens, int):
            break
        lists = {
            name: vars(sampling)[name]
            for name in ("stop_token_ids", "allowed_token_ids", "logit_bias")
        }
        for name, listed in lists.items():
            beyond = [int(token) for token in listed or () if int(token) >= tokens]
            if beyond:
                raise UserError(
                    f"generator.{group}.{name} has {beyond[0]}, which is beyond the vocabulary of {path}: its {tokens} "
                    f"tokens are 0 to {tokens - 1}"
                )
    if not Path(path).is_dir():
        return
    if weights and not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        raise UserError(f"{key}={path} is a folder without weights (*.safetensors)")
    if weights:
        check_model_files(folder)
    if own_tokenizer:
        return
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise UserError(f"{MODEL}={path} is a folder without a tokenizer (tokenizer.json)")
    if (folder / "tokenizer.json").is_file():
        os.environ.setdefault(
            "TOKENIZERS_PARALLELISM", "false"
        )  # the library would warn of every process after it
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
    if not (settings.is_file() and read_json(settings, f"{MODEL}={path}").get("chat_template")):
        raise UserError(
            f"{MODEL}={path} has a tokenizer without a chat template: set data.apply_chat_template=false, or add "
            f"chat_template.jinja to the folder, or name one with data.chat_template"
        )


def _check_positions(path: str, shape: Mapping[str, Any], cfg: Config) -> None:
    """Raises ``UserError`` for sequences longer than the model's positions: vLLM does not start
    with them."""
    positions = shape.get("max_position_embeddings")
    scaling = shape.get("rope_scaling") or shape.get("rope_parameters")
    if not isinstance(positions, int) or "factor" in str(
        scaling
    ):  # vLLM computes how far it reaches
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
    lora = cfg.trainer.policy.lora
    settings = {
        f"{key}, since only the policy, its reference and its critic read images,": not key.startswith(
            ("trainer.policy.", "trainer.ref.", "trainer.critic.")
        ),
        f"generator.backend={backend(cfg)}": not ENGINES.about(backend(cfg)).can["reads_images"],
        f"generator.backend={backend(cfg)}, which has other names for LLaVA's weights than transformers,": (
            family == "llava" and ENGINES.about(backend(cfg)).can["loads_as_files"]
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
    wrong = [name for name, given in settings.items() if given]
    if wrong:
        raise UserError(f"{path} reads images: {wrong[0]} is not supported for such a model")


def check_one_label(path: str, key: str, *, trained: bool) -> None:
    """Raises ``UserError`` for a model that gives more than one number, where one is needed.

    Args:
        trained: its head is needed; else a causal language model will do.
    """
    file = config_file(path)
    if file is None:
        return
    shape = read_shape(file, f"{key}={path}")
    classifier = any(
        str(name).endswith("Classification") for name in shape.get("architectures") or ()
    )
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
    """Raises ``UserError`` for a model whose tokenizer is not the policy's, where both are in
    folders here."""
    files = [Path(folder, "tokenizer.json") for folder in (path, policy)]
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    theirs, ours = (read_json(file, f"{key}={path}").get("model") or {} for file in files)
    if theirs.get("vocab") != ours.get("vocab"):
        raise UserError(
            f"{key}={path} has another tokenizer than trainer.policy.model.path={policy}: it is given the policy's "
            f"tokens, which would mean something else to it"
        )


def check_parallel(parallel: ParallelConfig, path: str, key: str) -> None:
    """Raises ``UserError`` for what does not divide a model, or what its layers cannot do."""
    tensor = parallel.tensor
    context = parallel.context
    file = config_file(path)
    if file is None or tensor * context * parallel.pipeline * max(1, parallel.expert) == 1:
        return
    shape = read_shape(file, f"{key}={path}")
    if parallel.pipeline > 1:
        _check_stages(parallel.pipeline, path, shape)
    if parallel.expert > 1:
        counts = [count for name in EXPERTS if isinstance(count := shape.get(name), int) and count]
        setting = f"trainer.parallel.expert={parallel.expert}"
        if not counts:
            raise UserError(
                f"{setting}: {shape['model_type']} ({path}) is not a mixture of experts: set it to 0"
            )
        if counts[0] % parallel.expert:
            raise UserError(
                f"{setting} does not divide the {counts[0]} experts of {path}: choose a divisor, {_divisors(counts[0])}"
            )
    if tensor * context == 1:
        return
    sizes = {"context": context, "tensor": tensor}
    both = [f"trainer.parallel.{name}={size}" for name, size in sizes.items() if size > 1]
    others = sorted(set(shape.get("layer_types") or ()) - ATTENDING)
    if others:
        raise UserError(
            f"{both[0]} splits {'sequences' if context > 1 else 'heads'}, but {path} has {others[0]} layers, which "
            f"cannot be split: only attention layers can. Set it to 1"
        )
    if tensor > 1:
        divided = [(both[-1], tensor, name) for name in (_HEADS, _KV_HEADS, *EXPERTS)]
    else:
        divided = []
    if context > 1 and parallel.context_kind == "ulysses":
        divided.append((" times ".join(both), context * tensor, _HEADS))
    for setting, size, name in divided:
        count = shape.get(name)
        if isinstance(count, int) and count % size:
            raise UserError(
                f"{setting} does not divide {name}={count} of {path}: choose a divisor, {_divisors(count)}"
            )
    family = shape.get("model_type")
    if tensor > 1 and family in _WITHOUT_TENSOR_PLAN.split():
        raise UserError(
            f"trainer.parallel.tensor={tensor}: transformers has no tensor-parallel plan for {family} ({path}): set "
            f"trainer.parallel.tensor=1"
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
    return " or ".join(str(n) for n in range(1, count + 1) if count % n == 0)


def check_routers(way: str, path: str, key: str) -> None:
    """Raises ``UserError`` for a model of which no choice of experts can be replayed.

    Args:
        way: ``trainer.policy.router_replay``.
    """
    file = config_file(path)
    if way == "none" or file is None:
        return
    shape = read_shape(file, f"{key}={path}")
    if not any(shape.get(name) for name in EXPERTS):
        raise UserError(
            f"trainer.policy.router_replay={way}: {shape.get('model_type')} ({path}) has no routers that transformers "
            f"knows of: set trainer.policy.router_replay=none"
        )


_ABSENT = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)


def hub_folder(name: str, key: str = MODEL) -> Path | None:
    """The folder in the cache that holds the model's configuration; None if it holds none yet, and
    the hub has it.

    Raises:
        UserError: if it is neither in the cache nor on the hub.
    """
    from huggingface_hub import constants

    cached = config_file(name)
    if cached:
        return cached.parent
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
            status = (
                get_session().head(url, headers=build_hf_headers(), timeout=ANSWER_S).status_code
            )
        except (
            Exception
        ) as error:  # its kind depends on the client library of the installed version
            problem = f"it cannot be reached ({error})"
        else:
            if status in _ABSENT:
                absent = ": there is no such model, or it is private"
            else:
                absent = ""
            if status >= HTTPStatus.BAD_REQUEST:
                problem = f"it answers {status}{absent}"
            else:
                problem = ""

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(ANSWER_S)  # a name server may take longer than any limit of ours
    if problem:
        raise UserError(
            f"{key}={name} is neither a local folder nor available on the Hugging Face hub: {problem}"
        )
    return None


_FROZEN = {"": 2.0, "nf4": 0.5, "int8": 1.0}  # bytes of a weight below adapters, at least
_STATE = {
    "adamw": 8,
    "adamw_8bit": 2,
    "muon": 4,
}  # bytes of optimizer state of a parameter, at least


def check_memory(cfg: Config, machine: Machine) -> None:
    """Raises ``UserError`` if the trained policy alone is larger than the machine.

    Args:
        machine: where all ranks of one node are.
    """
    key = "trainer.policy.model.path"
    path = cfg.trainer.policy.model.path
    count = parameters(Path(path))
    needed = count * bytes_per_parameter(cfg)
    if machine.gpus:
        ranks = cfg.trainer.placement.policy_ranks
        needed /= cfg.trainer.policy.fsdp_size or ranks
        available = machine.gpu_memory
        where = "each GPU"
        way_out = f"more ranks than {ranks} (trainer.placement), "
        if cfg.trainer.policy.cpu_offload != "none":
            return
    else:
        available = machine.host_memory
        where = "this machine"
        way_out = ""
    if needed <= available:
        return
    if cfg.trainer.policy.lora.rank:
        what = "weights"
    else:
        what = "weights, gradients and optimizer state"
    raise UserError(
        f"{key}={path}: the {what} of its {count / 1e9:.3g}B parameters take at least {needed / 2**30:.0f} GiB, and "
        f"{where} has {available / 2**30:.0f} GiB: use {way_out}adapters (trainer.policy.lora.rank) or a smaller "
        f"model; skyasync plan estimates what fits"
    )


def parameters(folder: Path) -> int:
    """The number of parameters in a local folder's files, by their headers; 0 for other models.

    Only in the files that transformers reads: some folders hold the same weights under other names
    too.
    """
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if not (folder / "model.safetensors").is_file() and index.is_file():
        names = set((read_json(index, str(folder)).get("weight_map") or {}).values())
    count = 0
    for file in (folder / name for name in names):
        with suppress(OSError, SafetensorError), safe_open(str(file), "np") as opened:
            count += sum(prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    return count


def bytes_per_parameter(cfg: Config) -> float:
    """Bytes of a trained parameter on all ranks that share it."""
    policy = cfg.trainer.policy
    if policy.lora.rank or policy.freeze:
        return _FROZEN[policy.lora.base_dtype]
    rounded = policy.optimizer_config.bf16_stochastic_round
    state = _STATE[policy.optimizer_config.name]
    # gradient
    if policy.optimizer_config.max_grad_cosine:
        previous = 4
    else:
        previous = 0
    return 4 + previous + (state / 2 if rounded else state + 4)


def check_template(tokenizer: Tokenizer) -> None:
    """Render one message in a thread: a template comes with the model's files, and may loop for
    ever.

    Errors of the template are those of the prompts, which are rendered next.

    Raises:
        UserError: if that takes longer than ``TEMPLATE_S``.
    """

    def render() -> None:
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

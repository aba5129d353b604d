"""A model's configuration with what ``config_kwargs`` says of it.

Invariant: workers and engines of a model use the same overrides, with the names of the model's own class in
transformers. Settings of rotary embeddings go to the one place where that class reads them:
``AutoConfig.from_pretrained(path, rope_theta=...)`` silently changes nothing if the file has ``rope_parameters``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from skyasync.errors import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


ONE_AT_A_TIME = threading.RLock()
"""Held while a model is loaded or built; a loader that holds it may call another.

transformers changes its own classes while it loads a model (ties and initialisation are switched off), so two threads
that load at once may leave them changed: from then on no model of the process has tied weights.
"""

ROPE = "rope_parameters"
#: Older names, as recipes and files have them: what they stand for.
_THETA, _SCALING = "rope_theta", "rope_scaling"
#: What decides which tensors there are: the weights would not fit.
_SHAPE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "tie_word_embeddings", "attention_bias", "mlp_bias", "num_experts", "num_local_experts",
    "moe_intermediate_size",
)  # fmt: skip
_SAID_ELSEWHERE = {
    "dtype": "use {section}.dtype",
    "torch_dtype": "use {section}.dtype",
    "model_type": "it is that of the model's files",
    "architectures": "it is that of the model's files",
    "auto_map": "no code of a model's folder is run",
    "quantization_config": "quantised weights cannot be trained",
}


def load_config(path: str, kwargs: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of a folder or hub name, so changed."""
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.from_pretrained(path)
    if not kwargs:
        return config
    changed = type(config).from_dict({**config.to_dict(), **overrides(config, kwargs)})
    changed.name_or_path = config.name_or_path
    return changed


def overrides_of(path: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """As ``overrides``, of a folder or hub name; nothing is read without ``kwargs``."""
    return overrides(load_config(path, {}), kwargs) if kwargs else {}


def overrides(config: PreTrainedConfig, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``kwargs`` by the names of the configuration's class; rotary embeddings as one entry."""
    names = config.attribute_map
    found = {names.get(name, name): value for name, value in kwargs.items() if name not in (ROPE, _THETA, _SCALING)}
    if not kwargs.keys() & {ROPE, _THETA, _SCALING}:
        return found
    here = dict(getattr(config, ROPE, None) or {})
    said = {**(kwargs.get(_SCALING) or {}), **(kwargs.get(ROPE) or {})}
    if "type" in said:
        said["rope_type"] = said.pop("type")
    if _THETA in kwargs:
        said[_THETA] = float(kwargs[_THETA])
    another = said.get("rope_type", here.get("rope_type")) != here.get("rope_type")
    kept = {_THETA: here[_THETA]} if another and _THETA in here else {} if another else here
    return found | {ROPE: kept | said}


def complaints(path: str, kwargs: Mapping[str, Any], section: str) -> Iterator[str]:
    """What is wrong with ``<section>.config_kwargs``, a line each, judged by the model's own class.

    Args:
        section: of the model, such as ``trainer.policy.model``.
    """
    if not kwargs:
        return
    config, key = load_config(path, {}), f"{section}.config_kwargs"
    kind, rotary = type(config).__name__, hasattr(config, ROPE)
    known = set(config.to_dict()) | set(config.attribute_map) | ({_THETA, _SCALING} if rotary else set())
    before = len(kwargs)
    for name, value in kwargs.items():
        own = config.attribute_map.get(name, name)
        if reason := _SAID_ELSEWHERE.get(name):
            yield f"{key}.{name} is not taken: {reason.format(section=section)}"
        elif name not in known:
            close = " or ".join(nearest(name, known))
            yield f"{key}.{name} is no setting of {kind}" + (f": did you mean {close}?" if close else "")
        elif own in _SHAPE or name in _SHAPE:
            yield f"{key}.{name}={value!r} would need other weights than those of {path}: train a model of that shape"
        else:
            before -= 1
    if not before:
        yield from _refused_by_its_class(config, kwargs, key)


def _refused_by_its_class(config: PreTrainedConfig, kwargs: Mapping[str, Any], key: str) -> Iterator[str]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for name in (ROPE, _SCALING):
        if name in kwargs and not isinstance(kwargs[name], Mapping):
            yield f"{key}.{name}={kwargs[name]!r} must be settings, such as {{rope_type: linear, factor: 2.0}}"
            return
    changed = overrides(config, kwargs)
    rope = changed.get(ROPE) or {}
    kinds = {"default", *ROPE_INIT_FUNCTIONS}
    if _THETA in kwargs and any(isinstance(value, Mapping) for value in rope.values()):
        yield f"{key}.{_THETA} is not one number for this model's kinds of layers: say {key}.{ROPE} of each"
    elif rope.get("rope_type", "default") not in kinds:
        close = " or ".join(nearest(str(rope["rope_type"]), kinds)) or ", ".join(sorted(kinds))
        yield f"{key}: unknown rope_type {rope['rope_type']!r}: did you mean {close}?"
    else:
        try:
            type(config).from_dict({**config.to_dict(), **changed})
        except Exception as error:  # of any class: each validates in its own way
            yield f"{key}={dict(kwargs)} is refused by {type(config).__name__}: {' '.join(str(error).split())}"


def linear_layers(path: str) -> list[str]:
    """The ends of the names of a causal language model's linear layers, its head left out; nothing is loaded."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    with ONE_AT_A_TIME, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(path, {}))
    head = model.get_output_embeddings()
    found = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)}
    return sorted({name.rpartition(".")[2] for name, module in found.items() if module is not head})

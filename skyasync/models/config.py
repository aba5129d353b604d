"""A model's configuration with ``config_kwargs`` of its section.

Invariant: workers and engines of a model use the same overrides, with the names of the model's own
class in transformers. Settings of rotary embeddings go to the one place where that class reads
them: ``AutoConfig.from_pretrained(path, rope_theta=...)`` silently changes nothing if the file has
``rope_parameters``.
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

transformers changes its own classes while it loads a model (ties and initialisation are switched
off). Two threads that load at once may leave them changed: then no later model of the process has
tied weights.
"""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields by which families give the number of a layer's experts."""

ATTENDING = {"full_attention", "sliding_attention"}
"""The ``layer_types`` of which parallel attention is computed by heads."""

ROPE = "rope_parameters"
#: Older names, as recipes and files have them: what they stand for.
_THETA = "rope_theta"
_SCALING = "rope_scaling"
#: What decides which tensors there are: the weights would not fit.
_SHAPE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "tie_word_embeddings", "attention_bias", "mlp_bias", "num_experts", "num_local_experts",
    "moe_intermediate_size",
)  # fmt: skip
_REJECTED = {
    "dtype": "use {section}.dtype",
    "torch_dtype": "use {section}.dtype",
    "model_type": "it is that of the model's files",
    "architectures": "it is that of the model's files",
    "auto_map": "no code of a model's folder is run",
    "quantization_config": "quantised weights cannot be trained",
}


def config_value(config: object, name: str, default: Any = None) -> Any:  # noqa: ANN401  (a field's value)
    """A field of a transformers configuration, or ``default`` if it is None or its class lacks it.

    Families describe the same thing by different fields, so that a missing field is an answer.
    """
    value = getattr(config, name, None)
    if value is None:
        return default
    return value


def head_size(text: PreTrainedConfig) -> int:
    """The size of an attention head, by a language model's configuration."""
    size = config_value(text, "head_dim") or text.hidden_size // text.num_attention_heads
    return int(size)


def with_layers(config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    """Leave the first ``count`` layers of a configuration, in place."""
    text = config.get_text_config()
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
    return config


def load_config(path: str, kwargs: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of a folder or hub name with ``kwargs``."""
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.from_pretrained(path)
    if not kwargs:
        return config
    new_config = type(config).from_dict({**config.to_dict(), **overrides(config, kwargs)})
    new_config.name_or_path = config.name_or_path
    return new_config


def overrides_of(path: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The ``overrides`` of a folder or hub name; nothing is read without ``kwargs``."""
    if kwargs:
        return overrides(load_config(path, {}), kwargs)
    return {}


def overrides(config: PreTrainedConfig, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Translate ``kwargs`` to the names of the configuration's class.

    Settings of rotary embeddings become one entry.
    """
    names = config.attribute_map
    rope_names = {ROPE, _THETA, _SCALING}
    values = {}
    for name, value in kwargs.items():
        if name not in rope_names:
            values[names.get(name, name)] = value
    if not kwargs.keys() & rope_names:
        return values
    current = dict(config_value(config, ROPE, {}))
    changes = dict(kwargs.get(_SCALING) or {})
    changes.update(kwargs.get(ROPE) or {})
    if "type" in changes:  # its name in older files
        changes["rope_type"] = changes.pop("type")
    if _THETA in kwargs:
        changes[_THETA] = float(kwargs[_THETA])
    current_type = current.get("rope_type")
    if changes.get("rope_type", current_type) != current_type:
        # Settings of the old type would be unknown to the new one; theta is common to all.
        current = {name: value for name, value in current.items() if name == _THETA}
    values[ROPE] = current | changes
    return values


def complaints(path: str, kwargs: Mapping[str, Any], section: str) -> Iterator[str]:
    """Find what is wrong with ``<section>.config_kwargs``, a line each, by the model's own class.

    Args:
        section: of the model, such as ``trainer.policy.model``.
    """
    if not kwargs:
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = load_config(path, {})
    key = f"{section}.config_kwargs"
    family = type(config).__name__
    valid = True
    setting_names = set(config.to_dict()) | set(config.attribute_map)
    if ROPE in setting_names:
        setting_names |= {_THETA, _SCALING}
    for name, value in kwargs.items():
        reason = _REJECTED.get(name)
        if reason:
            yield f"{key}.{name} is not taken: {reason.format(section=section)}"
        elif name not in setting_names:
            suggestions = " or ".join(nearest(name, setting_names))
            hint = f": did you mean {suggestions}?" if suggestions else ""
            yield f"{key}.{name} is no setting of {family}{hint}"
        elif name in _SHAPE or config.attribute_map.get(name) in _SHAPE:
            yield f"{key}.{name}={value!r} would need other weights than those of {path}: train a model of that shape"
        elif name in (ROPE, _SCALING) and not isinstance(value, Mapping):
            yield f"{key}.{name}={value!r} must be settings, such as {{rope_type: linear, factor: 2.0}}"
        else:
            continue
        valid = False
    if not valid:
        return
    new_values = overrides(config, kwargs)
    rope = new_values.get(ROPE) or {}
    rope_types = {"default", *ROPE_INIT_FUNCTIONS}
    if _THETA in kwargs and any(isinstance(value, Mapping) for value in rope.values()):
        yield f"{key}.{_THETA} is not one number for this model's kinds of layers: say {key}.{ROPE} of each"
    elif rope.get("rope_type", "default") not in rope_types:
        suggestions = " or ".join(nearest(str(rope["rope_type"]), rope_types))
        if not suggestions:
            suggestions = ", ".join(sorted(rope_types))
        yield f"{key}: unknown rope_type {rope['rope_type']!r}: did you mean {suggestions}?"
    else:
        try:
            type(config).from_dict({**config.to_dict(), **new_values})
        except Exception as error:  # of any class: each validates in its own way
            yield f"{key}={dict(kwargs)} is rejected by {family}: {' '.join(str(error).split())}"


def linear_layers(path: str) -> list[str]:
    """The last parts of the names of a causal language model's linear layers, without its head.

    Nothing is loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    with ONE_AT_A_TIME, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(path, {}))
    head = model.get_output_embeddings()
    names = set()
    for name, module in model.named_modules():
        # GPT-2's layers are Conv1D: a linear layer with a transposed weight.
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head:
            names.add(name.rpartition(".")[2])
    return sorted(names)

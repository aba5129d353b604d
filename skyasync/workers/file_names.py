"""Weights under the names that the model's files have, for engines that load them as they load files.

Invariant: names and tensors are those of an export. transformers joins the experts of a layer when it loads them; here
that is undone, by the library itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from skyasync.config.sampling import backend
from skyasync.config.schema import Config
from skyasync.engines.protocol import ENGINES


def wants_file_names(cfg: Config) -> bool:
    """Whether the run's engines load what they are sent as they load files."""
    engine = ENGINES.builtins().get(backend(cfg))  # one of the user's may be known to their program alone
    return engine is not None and bool(engine.can["loads_as_files"])


def has_other_names(model: PreTrainedModel) -> bool:
    """Whether anything in the model is joined that lies apart in its files."""
    return any(isinstance(conversion, WeightConverter) for conversion in get_model_conversion_mapping(model))


def as_in_files(model: PreTrainedModel, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """What is joined in the model apart again, as contiguous tensors; others as they are.

    Args:
        weights: whole, by the names of the model's parameters, whose layers have no adapters at the moment.
    """
    if not has_other_names(model):
        return weights
    found = revert_weight_conversion(model, weights)
    return {name: tensor.contiguous() for name, tensor in found.items()}

"""What a role's model says of a token: the class of transformers that a folder is loaded as, its head, its wrapper.

Invariant: a model is its files'. Only a head for values may be missing from them; a new one is drawn from the run's
seed, so that it is the same on every rank. To add a kind, write a :class:`Head` and an entry in ``HEADS``; a role's
entry in the table names it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from skyasync.errors import UserError
from skyasync.models import SCORE, VALUE, VOCABULARY
from skyasync.models.config import ONE_AT_A_TIME
from skyasync.models.token_model import ATTENTION, SCORE_LAYER, training_config


class Head:
    """A kind of model.

    Attributes:
        config_kwargs: in place of what the models' own configurations say.
    """

    config_kwargs: Mapping[str, Any] = MappingProxyType({})

    def with_config(self, config_kwargs: Mapping[str, Any]) -> Self:
        other = copy(self)
        other.config_kwargs = config_kwargs
        return other

    def config(self, path: str) -> PreTrainedConfig:
        """The configuration of a folder or hub name for training, or what is wrong with it (``UserError``)."""
        raise NotImplementedError

    def auto(self, config: PreTrainedConfig) -> type[_BaseAutoModelClass]:
        """transformers' factory of the class, with ``from_config`` and ``from_pretrained``."""
        raise NotImplementedError

    def loading(self) -> AbstractContextManager[None]:
        """Around reading the files."""
        return nullcontext()

    def complete(self, path: str, model: PreTrainedModel, missing: Collection[str]) -> None:
        """Fill in what the files do not hold, of a model that is loaded, whole or sharded."""

    def empty(self, path: str, dtype: torch.dtype) -> PreTrainedModel:
        """The model with nothing loaded, on torch's device of the moment."""
        config = self.config(path)
        model: PreTrainedModel = self.auto(config).from_config(config, dtype=dtype, attn_implementation=ATTENTION)
        return model

    def load(self, path: str, dtype: torch.dtype) -> PreTrainedModel:
        """The whole model, on the CPU; safetensors only, no code from the folder."""
        config = self.config(path)
        with ONE_AT_A_TIME, self.loading():
            model, found = self.auto(config).from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION,
                use_safetensors=True,
                output_loading_info=True,
            )
        self.complete(path, model, found["missing_keys"])
        loaded: PreTrainedModel = model
        return loaded


class VocabularyHead(Head):
    """A causal language model."""

    def config(self, path: str) -> PreTrainedConfig:
        return training_config(path, self.config_kwargs)

    def auto(self, config: PreTrainedConfig) -> type[_BaseAutoModelClass]:
        return AutoModelForCausalLM


class ValueHead(Head):
    """The layers of a causal language model under a head of one output.

    It is the library's class for sequence classification with one label, ``score`` being the head: critics and reward
    models of other systems are stored so too. Of a causal language model's folder its own head is left out.
    """

    def config(self, path: str) -> PreTrainedConfig:
        config = training_config(path, self.config_kwargs)
        config.num_labels = 1
        return config

    def auto(self, config: PreTrainedConfig) -> type[_BaseAutoModelClass]:
        if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            AutoModelForSequenceClassification.register(type(config), _classifier(type(config)), exist_ok=True)
        return AutoModelForSequenceClassification

    @contextmanager
    def loading(self) -> Iterator[None]:
        """transformers would list one head as left out and the other as new; what else is missing is an error here."""
        log = logging.getLogger("transformers.modeling_utils")
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)

    def complete(self, path: str, model: PreTrainedModel, missing: Collection[str]) -> None:
        if not isinstance(getattr(model, SCORE_LAYER, None), nn.Linear):
            raise UserError(
                f"{path}: {type(model).__name__} has no linear head named {SCORE_LAYER}: it can hold no values"
            )
        if other := sorted(set(missing) - {f"{SCORE_LAYER}.weight", f"{SCORE_LAYER}.bias"}):
            raise UserError(f"{path}: its files lack {other[0]}, which {type(model).__name__} needs")
        for name, parameter in model.get_submodule(SCORE_LAYER).named_parameters():
            if f"{SCORE_LAYER}.{name}" in missing:
                copy_own_part(parameter, new_head(name, parameter))


class ScoreHead(ValueHead):
    """The same with the head that its files hold: a reward model that somebody has trained."""

    def complete(self, path: str, model: PreTrainedModel, missing: Collection[str]) -> None:
        if f"{SCORE_LAYER}.weight" in missing:
            raise UserError(
                f"{path}: its files hold no head ({SCORE_LAYER}.weight): a reward model is one for sequence "
                f"classification with one label"
            )
        super().complete(path, model, missing)


HEADS: dict[str, Head] = {VOCABULARY: VocabularyHead(), VALUE: ValueHead(), SCORE: ScoreHead()}


def load_causal_lm(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model from a folder or hub name, as ``Head.load`` says."""
    return HEADS[VOCABULARY].load(path, dtype)


def _classifier(config: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """A class for sequence classification, of a family of which the library has none."""
    base: Any = MODEL_MAPPING[config]
    base = next(iter(base)) if isinstance(base, tuple) else base
    family = next(c for c in base.__mro__ if PreTrainedModel in c.__bases__)
    own = {"base_model_prefix": family.base_model_prefix, "config_class": config, "__module__": base.__module__}
    name = f"{base.__name__.removesuffix('Model')}ForSequenceClassification"
    found: type[PreTrainedModel] = type(name, (GenericForSequenceClassification, family), own)
    return found


def new_head(name: str, like: torch.Tensor) -> torch.Tensor:
    """A head's weights, whole: small, so that the first values are near 0 (OpenRLHF's scale); a bias is 0."""
    if name == "bias":
        return torch.zeros(like.shape)
    generator = torch.Generator().manual_seed(torch.initial_seed())
    return torch.randn(like.shape, generator=generator) / (like.shape[-1] + 1)


def copy_own_part(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Fill this rank's part of a parameter, which may be sharded."""
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(part.to_local())
        else:
            parameter.copy_(whole)

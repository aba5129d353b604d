"""Heads of the roles' models, and the classes of transformers that load them.

Invariant: a model is that of its files. Only a value head may be missing from them; a new one is
drawn from the run's seed, so that it is the same on every rank. To add a kind, write a
:class:`Head` and an entry in ``HEADS``; a role's entry in the table names it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from skyasync.errors import UserError
from skyasync.models import SCORE, VALUE, VOCABULARY
from skyasync.models.config import ONE_AT_A_TIME
from skyasync.models.token_model import ATTENTION, SCORE_LAYER, training_config
from skyasync.models.vision import is_vision
from skyasync.utils.weight_files import check_model_files


@contextmanager
def _sdpa_required(path: str, config: PreTrainedConfig) -> Iterator[None]:
    """Replace transformers' error for a family without sdpa attention.

    It advises an argument that is no setting here.
    """
    try:
        yield
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        raise UserError(
            f"{path}: models of type {config.model_type} have no sdpa attention in transformers"
        ) from error


class Head:
    """A causal language model with the head of its files; the base class of other kinds.

    Attributes:
        config_kwargs: override values of the models' own configurations.
    """

    config_kwargs: Mapping[str, Any] = MappingProxyType({})

    def with_config(self, config_kwargs: Mapping[str, Any]) -> Self:
        head = copy(self)
        head.config_kwargs = config_kwargs
        return head

    def config(self, path: str) -> PreTrainedConfig:
        """The configuration of a folder or hub name for training.

        Raises:
            UserError: if the model cannot be trained.
        """
        return training_config(path, self.config_kwargs)

    def auto(self, config: PreTrainedConfig) -> type[_BaseAutoModelClass]:
        """transformers' factory of the class, with ``from_config`` and ``from_pretrained``."""
        if is_vision(config):
            return AutoModelForImageTextToText
        return AutoModelForCausalLM

    def loading(self) -> AbstractContextManager[None]:
        """A context in which the files are read."""
        return nullcontext()

    def complete(self, path: str, model: PreTrainedModel, missing: Collection[str]) -> None:
        """Initialize what the files lack in a loaded model, whole or sharded."""

    def empty(self, path: str, dtype: torch.dtype) -> PreTrainedModel:
        """The model without memory, on torch's meta device."""
        config = self.config(path)
        with torch.device("meta"), _sdpa_required(path, config):
            model: PreTrainedModel = self.auto(config).from_config(
                config, dtype=dtype, attn_implementation=ATTENTION
            )
        return model

    def load(
        self,
        path: str,
        dtype: torch.dtype,
        factory: Any = None,  # noqa: ANN401
        **options: Any,  # noqa: ANN401
    ) -> PreTrainedModel:
        """Load the model with the weights of its files, on the CPU by default.

        The files are safetensors only; no code from the folder is run.

        Args:
            factory: has ``from_pretrained``; by default transformers' own for this kind of model.
            options: more arguments of ``from_pretrained``.
        """
        config = self.config(path)
        check_model_files(Path(path))
        if factory is None:
            factory = self.auto(config)
        with ONE_AT_A_TIME, self.loading(), _sdpa_required(path, config):
            model, info = factory.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
        self.complete(path, model, info["missing_keys"])
        model_with_weights: PreTrainedModel = model
        return model_with_weights


class ValueHead(Head):
    """The layers of a causal language model under a head of one output.

    It is transformers' class for sequence classification with one label, whose head is ``score``:
    critics and reward models of other systems are stored so too. The head of a causal language
    model's folder is ignored.
    """

    def config(self, path: str) -> PreTrainedConfig:
        config = super().config(path)
        config.num_labels = 1
        return config

    def auto(self, config: PreTrainedConfig) -> type[_BaseAutoModelClass]:
        config_class = type(config)
        if config_class not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            # The family has no such class in transformers: make one of its base class.
            base: Any = MODEL_MAPPING[config_class]
            if isinstance(base, tuple):
                base = base[0]
            # Layers of a family share what its own PreTrainedModel says of them.
            family = next(c for c in base.__mro__ if PreTrainedModel in c.__bases__)
            attributes = {
                "base_model_prefix": family.base_model_prefix,
                "config_class": config_class,
                "__module__": base.__module__,
            }
            name = f"{base.__name__.removesuffix('Model')}ForSequenceClassification"
            classifier = type(name, (GenericForSequenceClassification, family), attributes)
            AutoModelForSequenceClassification.register(config_class, classifier, exist_ok=True)
        return AutoModelForSequenceClassification

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Silence transformers' warnings of an ignored and of a new head.

        ``complete`` raises an error if anything else is missing.
        """
        log = logging.getLogger("transformers.modeling_utils")
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)

    def complete(self, path: str, model: PreTrainedModel, missing: Collection[str]) -> None:
        head = dict(model.named_children()).get(SCORE_LAYER)
        if isinstance(head, PipelineIdentityLayer):
            return  # the last stage has it
        if not isinstance(head, nn.Linear):
            raise UserError(
                f"{path}: {type(model).__name__} has no linear head named {SCORE_LAYER}: it can hold no values"
            )
        missing_layers = sorted(set(missing) - {f"{SCORE_LAYER}.weight", f"{SCORE_LAYER}.bias"})
        if missing_layers:
            raise UserError(
                f"{path}: its files lack {missing_layers[0]}, which {type(model).__name__} needs"
            )
        for name, parameter in head.named_parameters():
            if f"{SCORE_LAYER}.{name}" in missing:
                copy_own_part(parameter, new_head(name, parameter))


class ScoreHead(ValueHead):
    """The same with the head of its files: a trained reward model."""

    def complete(self, path: str, model: PreTrainedModel, missing: Collection[str]) -> None:
        if f"{SCORE_LAYER}.weight" in missing:
            raise UserError(
                f"{path}: its files hold no head ({SCORE_LAYER}.weight): a reward model is one for sequence "
                f"classification with one label"
            )
        super().complete(path, model, missing)


HEADS: dict[str, Head] = {VOCABULARY: Head(), VALUE: ValueHead(), SCORE: ScoreHead()}


def load_causal_lm(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a causal language model from a folder or hub name, as ``Head.load`` does."""
    return HEADS[VOCABULARY].load(path, dtype)


def new_head(name: str, like: torch.Tensor) -> torch.Tensor:
    """Draw a head's weights ``[1, hidden]``, whole, so that the first values are near 0.

    The scale is OpenRLHF's; a bias is 0.
    """
    if name == "bias":
        return torch.zeros(like.shape)
    # The run's seed, on the CPU: the same numbers on every rank and device.
    generator = torch.Generator().manual_seed(torch.initial_seed())
    return torch.randn(like.shape, generator=generator) / (like.shape[-1] + 1)


def copy_own_part(parameter: torch.Tensor, full_tensor: torch.Tensor) -> None:
    """Fill this rank's part of a parameter, which may be sharded."""
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            # Every rank has the full tensor: nothing is sent.
            part = distribute_tensor(
                full_tensor, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
            parameter.to_local().copy_(part.to_local())
        else:
            parameter.copy_(full_tensor)

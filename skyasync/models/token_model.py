"""A model of transformers as a function from a packed batch to a few numbers per loss token.

Invariant: logits are computed only at positions that predict a loss token, and the softmax and a
value head are computed in float32 at least, whatever the weights' dtype. A value is computed from
the state that predicts its token, so it does not depend on that token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from skyasync.algorithms.sampled import SampledDistribution
from skyasync.models import MAX_LOGITS
from skyasync.models.attention import NAME as BLOCKS
from skyasync.models.attention import SMALLEST_HEAD, attention_inputs, pack_rows
from skyasync.models.backend import ENTROPY, LOGPROBS, TOKEN_LOGPROBS, TOP_K, VALUES, OutputRequest
from skyasync.models.config import config_value, head_size, load_config
from skyasync.models.packing import Layout
from skyasync.models.parallel.vocabulary import sum_over_group
from skyasync.models.vision import Vision, is_vision

if TYPE_CHECKING:
    from skyasync.models.parallel.context import Context
    from skyasync.models.parallel.pipeline import Stage
    from skyasync.models.parallel.vocabulary import Vocabulary
    from skyasync.models.router_replay import Routers

ATTENTION = "sdpa"
STATES = "states"
SCORE_LAYER = "score"
"""The head's name in transformers' classes for sequence classification."""


def training_config(path: str, kwargs: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """The configuration of a folder or hub name, without dropout.

    Args:
        kwargs: ``config_kwargs`` of its section.
    """
    config = load_config(path, kwargs or {})
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def can_share_prefixes(config: PreTrainedConfig) -> bool:
    """Whether every layer attends to all tokens before, so that a mask can separate packed
    responses."""
    text: Any = config.get_text_config()
    layer_types = config_value(text, "layer_types")
    if layer_types is not None:
        return all(kind == "full_attention" for kind in layer_types)
    return config_value(text, "sliding_window") is None


class TokenModel(nn.Module):
    """A model of transformers, ``model``, as a function from a :class:`Layout` to outputs per
    token.

    Args:
        model: a causal language model, or one for sequence classification with one label, which has
            values alone.
        distribution: that of the sampling; by default the model's own.

    Attributes:
        value_head: of a critic on the layers of a causal language model.
        context: this rank's slice of each row, if rows are split.
        vocabulary: this rank's part of the logits, if the head is split.
        routers: of a mixture of experts that replays the engine's choices.
        packs: it takes packed sequences.
        vision: of a vision-language model.
        stage: this rank's layers, if the model is a pipeline.
        attends_in_float32: whatever the model's dtype. In bfloat16 a CPU's backward pass takes nine
            times as long.
    """

    attends_in_float32 = False
    context: Context | None = None
    routers: Routers | None = None
    vocabulary: Vocabulary | None = None
    vision: Vision | None = None
    stage: Stage | None = None

    def __init__(
        self, model: PreTrainedModel, distribution: SampledDistribution | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.distribution = distribution or SampledDistribution()
        self.value_head: nn.Linear | None = None
        if is_vision(model.config):
            self.vision = Vision(model.config)
        self.packs = can_share_prefixes(model.config) and pack_rows(model)

    def forward(self, layout: Layout, request: OutputRequest | None = None) -> dict[str, Tensor]:
        """The outputs requested (by default log-probabilities), by name, with gradient if that is
        enabled.

        The layers get no gradient if values are all that is requested and their ``value_gradient``
        is 0. A stage before the last of a pipeline has the ``STATES`` for the next one alone.
        """
        request = request or OutputRequest()
        names = request.names
        own = self.context.slice(layout) if self.context else layout
        head_alone = names == {VALUES} and not request.value_gradient
        with torch.set_grad_enabled(torch.is_grad_enabled() and not head_alone):
            hidden = self.hidden(own)
        if self.stage and not self.stage.is_last:
            return {STATES: hidden}
        outputs: dict[str, Tensor] = {}
        if names & {LOGPROBS, ENTROPY, TOKEN_LOGPROBS}:
            outputs |= self._scores(hidden, own, request)
        if TOP_K in names:
            tokens, logprobs = self._most_likely(hidden, request.top_k)
            outputs[TOP_K] = torch.cat([self.rows(tokens, own), self.rows(logprobs, own)], -1)
        if VALUES in names:
            layer = self.value_head or self.model.get_submodule(SCORE_LAYER)
            assert isinstance(layer, nn.Linear)
            if (
                request.value_gradient != 1.0
            ):  # the same states, through which a share of the gradient flows
                constant = hidden.detach()
                share = request.value_gradient
                if share:
                    hidden = constant + share * (hidden - constant)
                else:
                    hidden = constant
            exact = torch.promote_types(hidden.dtype, torch.float32)
            bias = None if layer.bias is None else layer.bias.to(exact)
            values = F.linear(hidden.to(exact), layer.weight.to(exact), bias).squeeze(-1)
            outputs[VALUES] = self.rows(values, own)
        return outputs

    def rows(self, values: Tensor, own: Layout) -> Tensor:
        """``[rows, length]`` of the values ``[m]`` of all ranks that have slices of these rows."""
        rows = own.to_rows(values)
        if self.context:
            return sum_over_group(rows, self.context.group)
        return rows

    def hidden(self, layout: Layout) -> Tensor:
        """``[n, hidden]``: the states that predict the n loss tokens; all states of a stage before
        the last."""
        if self.routers:
            self.routers.replay(layout.experts)
        device = layout.tokens.device
        attention = attention_inputs(
            layout.visible_until,
            layout.blocks,
            device,
            flexible=self.uses_flex(device),
            in_float32=self.attends_in_float32 and (self.packs or self.context is not None),
            context=self.context,
        )
        inputs: dict[str, Any] = {"position_ids": layout.positions}
        inputs |= self.stage.inputs(layout.tokens) if self.stage else {"input_ids": layout.tokens}
        if self.vision:
            inputs |= self.vision.inputs(layout, self.model)
        hidden: Tensor = self.model.base_model(
            use_cache=False, **inputs, **attention
        ).last_hidden_state
        if self.stage and not self.stage.is_last:
            return hidden
        return hidden.reshape(-1, hidden.shape[-1]).index_select(0, layout.predictors)

    def uses_flex(self, device: torch.device) -> bool:
        text = self.model.config.get_text_config()
        able = text._attn_implementation == BLOCKS and head_size(text) >= SMALLEST_HEAD
        return device.type == "cuda" and (able or self.context is not None)

    def _scores(self, hidden: Tensor, own: Layout, request: OutputRequest) -> dict[str, Tensor]:
        """Log-probabilities of the loss tokens and of ``token_ids``, and entropy."""
        if request.plain:
            distribution = SampledDistribution()
        else:
            distribution = self.distribution
        if (
            request.token_ids is not None and own.copies is not None
        ):  # rows may ask for different tokens
            hidden = hidden[own.copies]
            own = replace(own, targets=own.targets[own.copies], copies=None)
        targets = own.targets[:, None]
        if request.token_ids is not None:
            targets = torch.cat([targets, request.token_ids.flatten(0, 1)[own.cells]], 1)
        head = self._head()
        options = distribution, self.vocabulary, ENTROPY in request.names, request.entropy_gradient
        at_once = self._tokens_at_once(None if distribution.filters else self.vocabulary)
        if len(hidden) <= at_once:
            logprobs, entropy = _head_scores(head, hidden, targets, *options)
        else:
            chunks = [
                checkpoint(_head_scores, head, h, t, *options, use_reentrant=False)
                for h, t in zip(hidden.split(at_once), targets.split(at_once), strict=True)
            ]
            logprobs = torch.cat([chunk[0] for chunk in chunks])
            if ENTROPY in request.names:
                entropy = torch.cat([chunk[1] for chunk in chunks])
            else:
                entropy = None
        outputs = {LOGPROBS: self.rows(logprobs[:, 0], own)}
        if entropy is not None:
            outputs[ENTROPY] = self.rows(entropy, own)
        if request.token_ids is not None:
            outputs[TOKEN_LOGPROBS] = self.rows(logprobs[:, 1:], own)
        return outputs

    def _most_likely(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities ``[n, k]``, of a distribution without filters, which may
        leave fewer than k."""
        head = self._head()
        chunks = []
        for states in hidden.split(self._tokens_at_once(self.vocabulary)):
            logits = _float_logits(head, states) / self.distribution.temperature
            if self.vocabulary:
                chunks.append(self.vocabulary.most_likely(logits, k))
            else:
                most, tokens = logits.topk(min(k, logits.shape[-1]))
                chunks.append((tokens, most - logits.logsumexp(-1, keepdim=True)))
        tokens, logprobs = (torch.cat([chunk[i] for chunk in chunks]) for i in (0, 1))
        return tokens, logprobs

    def _head(self) -> Callable[[Tensor], Tensor]:
        head = logits_head(self.model)
        vision = self.vision
        if vision is None:
            return head
        return lambda hidden: vision.without_placeholders(head(hidden))

    def _tokens_at_once(self, part: Vocabulary | None) -> int:
        """Loss tokens whose logits are in memory at once."""
        return max(
            1, MAX_LOGITS // (part.size if part else self.model.config.get_text_config().vocab_size)
        )


def _float_logits(head: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    logits = head(hidden)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _head_scores(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    distribution: SampledDistribution,
    part: Vocabulary | None,
    entropy: bool,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities ``[n, 1 + k]`` of ``targets``, the loss token first, and entropy ``[n]``.

    Args:
        part: this rank's, if the head is split by vocabulary.
    """
    logits = _float_logits(head, hidden)
    if part and distribution.filters:
        logits = part.gathered(logits)
        part = None
    logits = distribution(logits, targets[:, 0])
    if part:
        return part.scores(logits, targets, entropy=entropy, entropy_gradient=entropy_gradient)
    if entropy and entropy_gradient:
        logprobs = logits.log_softmax(-1)
        return logprobs.gather(1, targets), -(logprobs.exp() * logprobs).sum(-1)
    if targets.shape[1] == 1:
        chosen = -F.cross_entropy(logits, targets[:, 0], reduction="none")[:, None]
    else:
        chosen = gather_logprobs(logits, targets)
    if not entropy:
        return chosen, None
    with torch.no_grad():
        logprobs = logits.log_softmax(-1)
        return chosen, -(logprobs.exp() * logprobs).sum(-1)


def gather_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """``[n, m]``, of the ``targets`` (int64 ``[n, m]``) by ``logits`` ``[n, vocabulary]``.

    As ``logits.gather(1, targets) - logits.logsumexp(-1)``, with two tensors of the logits' size at
    once, not four.
    """
    logprobs: Tensor = _GatherLogprobs.apply(logits, targets)
    return logprobs


class _GatherContext(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]


class _GatherLogprobs(Function):
    @staticmethod
    def forward(ctx: _GatherContext, logits: Tensor, targets: Tensor) -> Tensor:
        normalizer = logits.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(logits, targets, normalizer)
        return logits.gather(1, targets) - normalizer

    @staticmethod
    def backward(ctx: _GatherContext, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, targets, normalizer = ctx.saved_tensors
        (gradient,) = gradients
        whole = (logits - normalizer).exp_().mul_(-gradient.sum(-1, keepdim=True))
        same = targets[:, :, None] == targets[:, None, :]  # equal targets get the sum, first
        own = torch.where(same, gradient[:, None, :], 0.0).sum(-1)
        return whole.scatter_(1, targets, whole.gather(1, targets) + own), None


NOT_LINEAR = (
    "final_logit_softcapping",  # Gemma 2 to 4, VaultGemma, NanoChat
    "logit_scale",  # Cohere
    "logits_scaling",  # Granite divides by it, HyperCLOVA X multiplies
    "lm_head_multiplier",  # Falcon-H1
    "logits_soft_cap",  # RecurrentGemma
    "output_logit_soft_cap",  # xLSTM
    "dim_model_base",  # MiniCPM
)
"""Fields of configurations whose heads may be more than a linear map."""


def logits_head(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """States ``[n, hidden]`` to logits ``[n, vocabulary]``, as the model's own forward pass
    computes them."""
    if all(config_value(model.config, name, 1.0) == 1.0 for name in NOT_LINEAR):
        linear: Callable[[Tensor], Tensor] = model.get_output_embeddings()
        return linear

    def own_forward(hidden: Tensor) -> Tensor:
        """By a copy of the model that shares all but its layers."""
        without_layers = copy(model)
        states = _States(model.base_model, hidden[None])
        without_layers.__dict__["_modules"] = {**model._modules, model.base_model_prefix: states}
        logits: Tensor = without_layers(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0]

    return own_forward


class _States(nn.Module):
    """Replaces a model's layers: returns what they have computed."""

    def __init__(self, layers: nn.Module, states: Tensor) -> None:
        super().__init__()
        self.__dict__["_layers"] = layers  # not a part of this one
        self._output = _Output(states)

    def forward(self, *args: object, **kwargs: object) -> _Output:
        return self._output

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Of the layers: a head may read their settings."""
        return getattr(self.__dict__["_layers"], name)


class _Output:
    """The output of layers, with states alone."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

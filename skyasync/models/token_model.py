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
    """Whether every layer attends to all tokens before, so that a mask can separate responses."""
    text: Any = config.get_text_config()
    layer_types = config_value(text, "layer_types")
    if layer_types is not None:
        return all(kind == "full_attention" for kind in layer_types)
    return config_value(text, "sliding_window") is None


class TokenModel(nn.Module):
    """A model of transformers as a function from a :class:`Layout` to outputs per token.

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
        self,
        model: PreTrainedModel,
        distribution: SampledDistribution | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.distribution = distribution or SampledDistribution()
        self.value_head: nn.Linear | None = None
        if is_vision(model.config):
            self.vision = Vision(model.config)
        self.packs = can_share_prefixes(model.config) and pack_rows(model)

    def forward(self, layout: Layout, request: OutputRequest | None = None) -> dict[str, Tensor]:
        """Compute the outputs requested (by default log-probabilities), by name.

        They have a gradient if that is enabled. The layers get none if values are all that is
        requested and their ``value_gradient`` is 0. A stage before the last of a pipeline has the
        ``STATES`` for the next one alone.
        """
        request = request or OutputRequest()
        names = request.names
        if self.context:
            layout = self.context.slice(layout)
        head_alone = names == {VALUES} and not request.value_gradient
        with torch.set_grad_enabled(torch.is_grad_enabled() and not head_alone):
            hidden = self.hidden(layout)  # [n, hidden], n loss tokens
        if self.stage and not self.stage.is_last:
            return {STATES: hidden}
        outputs: dict[str, Tensor] = {}
        if names & {LOGPROBS, ENTROPY, TOKEN_LOGPROBS}:
            outputs |= self._scores(hidden, layout, request)
        if TOP_K in names:
            tokens, logprobs = self._most_likely(hidden, request.top_k)  # [n, k] each
            top_k = [self.rows(tokens, layout), self.rows(logprobs, layout)]
            outputs[TOP_K] = torch.cat(top_k, -1)  # [rows, length, 2 k]
        if VALUES in names:
            values = self._values(hidden, request.value_gradient)
            outputs[VALUES] = self.rows(values, layout)
        return outputs

    def _values(self, hidden: Tensor, gradient_share: float) -> Tensor:
        """Values ``[n]`` of states ``[n, hidden]``, which get a share of the values' gradient."""
        layer = self.value_head or self.model.get_submodule(SCORE_LAYER)
        assert isinstance(layer, nn.Linear)
        if gradient_share != 1.0:
            constant = hidden.detach()
            if gradient_share:
                # The same states: their difference is 0, and only its gradient counts.
                hidden = constant + gradient_share * (hidden - constant)
            else:
                hidden = constant
        exact = torch.promote_types(hidden.dtype, torch.float32)
        bias = None if layer.bias is None else layer.bias.to(exact)
        values = F.linear(hidden.to(exact), layer.weight.to(exact), bias)  # [n, 1]
        return values.squeeze(-1)

    def rows(self, values: Tensor, layout: Layout) -> Tensor:
        """Put values ``[m]`` of all ranks' slices into ``[rows, length]``."""
        rows = layout.to_rows(values)
        if self.context:
            return sum_over_group(rows, self.context.group)
        return rows

    def hidden(self, layout: Layout) -> Tensor:
        """The states that predict the n loss tokens, ``[n, hidden]``.

        A stage before the last returns all states, ``[packed rows, width, hidden]``.
        """
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
        if self.stage:
            inputs |= self.stage.inputs(layout.tokens)
        else:
            inputs["input_ids"] = layout.tokens
        if self.vision:
            inputs |= self.vision.inputs(layout, self.model)
        output = self.model.base_model(use_cache=False, **inputs, **attention)
        hidden: Tensor = output.last_hidden_state  # [packed rows, width, hidden]
        if self.stage and not self.stage.is_last:
            return hidden
        # Before the head: logits of all tokens would take most of the memory.
        return hidden.flatten(0, -2).index_select(0, layout.predictors)

    def uses_flex(self, device: torch.device) -> bool:
        """Whether FlexAttention attends: on a GPU, with heads that its kernel takes."""
        text = self.model.config.get_text_config()
        supports_flex = text._attn_implementation == BLOCKS and head_size(text) >= SMALLEST_HEAD
        return device.type == "cuda" and (supports_flex or self.context is not None)

    def _scores(self, hidden: Tensor, layout: Layout, request: OutputRequest) -> dict[str, Tensor]:
        """Compute log-probabilities of the loss tokens and of ``token_ids``, and entropy."""
        distribution = SampledDistribution() if request.plain else self.distribution
        if request.token_ids is not None and layout.copies is not None:
            # Rows that share a loss token may request different tokens: it is scored for each.
            hidden = hidden[layout.copies]
            layout = replace(layout, targets=layout.targets[layout.copies], copies=None)
        targets = layout.targets[:, None]  # [n, 1]
        if request.token_ids is not None:
            token_ids = request.token_ids.flatten(0, 1)[layout.cells]  # [n, k]
            targets = torch.cat([targets, token_ids], 1)
        head = self._head()
        options = distribution, self.vocabulary, ENTROPY in request.names, request.entropy_gradient
        # Filters need all logits, so each rank gathers those of the whole vocabulary.
        at_once = self._tokens_at_once(None if distribution.filters else self.vocabulary)
        if len(hidden) <= at_once:
            logprobs, entropy = _head_scores(head, hidden, targets, *options)
        else:
            # The backward pass computes each chunk's logits again, so that one is in memory.
            logprob_chunks = []
            entropy_chunks = []
            for states, tokens in zip(hidden.split(at_once), targets.split(at_once), strict=True):
                logprobs, entropy = checkpoint(
                    _head_scores, head, states, tokens, *options, use_reentrant=False
                )
                logprob_chunks.append(logprobs)
                entropy_chunks.append(entropy)
            logprobs = torch.cat(logprob_chunks)  # [n, 1 + k]
            entropy = None
            if ENTROPY in request.names:
                entropy = torch.cat(entropy_chunks)  # [n]
        outputs = {LOGPROBS: self.rows(logprobs[:, 0], layout)}
        if entropy is not None:
            outputs[ENTROPY] = self.rows(entropy, layout)
        if request.token_ids is not None:
            outputs[TOKEN_LOGPROBS] = self.rows(logprobs[:, 1:], layout)
        return outputs

    def _most_likely(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities ``[n, k]``, at the sampling temperature.

        Filters are not applied: they may leave fewer than k tokens.
        """
        head = self._head()
        token_chunks = []
        logprob_chunks = []
        for states in hidden.split(self._tokens_at_once(self.vocabulary)):
            logits = _float_logits(head, states) / self.distribution.temperature
            if self.vocabulary:
                tokens, logprobs = self.vocabulary.most_likely(logits, k)
            else:
                top_logits, tokens = logits.topk(min(k, logits.shape[-1]))
                logprobs = top_logits - logits.logsumexp(-1, keepdim=True)
            token_chunks.append(tokens)
            logprob_chunks.append(logprobs)
        return torch.cat(token_chunks), torch.cat(logprob_chunks)

    def _head(self) -> Callable[[Tensor], Tensor]:
        head = logits_head(self.model)
        vision = self.vision
        if vision is None:
            return head
        return lambda hidden: vision.without_placeholders(head(hidden))

    def _tokens_at_once(self, part: Vocabulary | None) -> int:
        """Count the loss tokens whose logits are in memory at once."""
        size = part.size if part else self.model.config.get_text_config().vocab_size
        return max(1, MAX_LOGITS // size)


def _float_logits(head: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """``[n, vocabulary]`` of states ``[n, hidden]``, in float32 at least: softmax needs it."""
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
    logits = _float_logits(head, hidden)  # [n, vocabulary], or this rank's part of it
    if part and distribution.filters:
        logits = part.gathered(logits)
        part = None
    logits = distribution(logits, targets[:, 0])
    if part:
        return part.scores(logits, targets, entropy=entropy, entropy_gradient=entropy_gradient)
    if entropy and entropy_gradient:
        # Both from one softmax, which the backward pass needs in any case.
        logprobs = logits.log_softmax(-1)
        return logprobs.gather(1, targets), -(logprobs.exp() * logprobs).sum(-1)
    if targets.shape[1] == 1:
        # Fused: it stores no log-probabilities of the whole vocabulary for the backward pass.
        target_logprobs = -F.cross_entropy(logits, targets[:, 0], reduction="none")[:, None]
    else:
        target_logprobs = gather_logprobs(logits, targets)
    if not entropy:
        return target_logprobs, None
    with torch.no_grad():
        logprobs = logits.log_softmax(-1)
        return target_logprobs, -(logprobs.exp() * logprobs).sum(-1)


def gather_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities ``[n, m]`` of ``targets`` (int64 ``[n, m]``).

    The ``logits`` are ``[n, vocabulary]``.

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
        normalizer = logits.logsumexp(-1, keepdim=True)  # [n, 1]
        ctx.save_for_backward(logits, targets, normalizer)
        return logits.gather(1, targets) - normalizer

    @staticmethod
    def backward(ctx: _GatherContext, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, targets, normalizer = ctx.saved_tensors
        (gradient,) = gradients  # [n, m]
        # Of the normalizer: minus the softmax, [n, vocabulary], in place to save memory.
        of_logits = (logits - normalizer).exp_().mul_(-gradient.sum(-1, keepdim=True))
        # scatter_ writes one of several equal targets, so each of them has the sum of all.
        is_equal = targets[:, :, None] == targets[:, None, :]  # [n, m, m]
        of_targets = torch.where(is_equal, gradient[:, None, :], 0.0).sum(-1)  # [n, m]
        # Not scatter_add_: on a GPU its order, and so its rounding, changes from run to run.
        return of_logits.scatter_(1, targets, of_logits.gather(1, targets) + of_targets), None


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
    """Map states ``[n, hidden]`` to logits ``[n, vocabulary]`` as the model's forward pass does."""
    if all(config_value(model.config, name, 1.0) == 1.0 for name in NOT_LINEAR):
        linear: Callable[[Tensor], Tensor] = model.get_output_embeddings()
        return linear

    def forward_without_layers(hidden: Tensor) -> Tensor:
        """Run the forward pass of a copy of the model that shares all but its layers."""
        without_layers = copy(model)
        modules = dict(model._modules)
        modules[model.base_model_prefix] = _States(model.base_model, hidden[None])
        # Not by setattr, which would change the modules of the model itself: the copy is shallow.
        without_layers.__dict__["_modules"] = modules
        logits: Tensor = without_layers(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0]

    return forward_without_layers


class _States(nn.Module):
    """Replaces a model's layers: returns what they have computed."""

    def __init__(self, layers: nn.Module, states: Tensor) -> None:
        super().__init__()
        self.__dict__["_layers"] = layers  # not as a submodule of this one
        self._output = _Output(states)

    def forward(self, *args: object, **kwargs: object) -> _Output:
        return self._output

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Read an attribute of the layers: a head may need their settings."""
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

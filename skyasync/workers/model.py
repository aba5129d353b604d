"""A causal language model that answers one question: the log-probability of each loss token.

Invariant: the vocabulary is only ever spanned at positions that predict a loss token, and the softmax is
computed in float32 at least, whatever the weights' dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from skyasync.algorithms.sampled import SampledDistribution
from skyasync.model_config import load_config
from skyasync.workers.blocks import pack_rows
from skyasync.workers.chosen import chosen_logprobs
from skyasync.workers.flexible import uses_flex
from skyasync.workers.limits import MAX_LOGITS
from skyasync.workers.logits import logits_head
from skyasync.workers.packing import Layout

if TYPE_CHECKING:
    from skyasync.routing import Routers
    from skyasync.workers.parallel.context import Context
    from skyasync.workers.parallel.vocabulary import Vocabulary

ATTENTION = "sdpa"


class TokenScores(NamedTuple):
    """``[rows, length]`` each, aligned with the tokens, zero where there is no loss token."""

    logprobs: Tensor
    entropy: Tensor | None
    values: Tensor | None = None
    others: Tensor | None = None
    """``[rows, length, k]``: log-probabilities of the tokens that were asked about beside each loss token."""


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
    """Whether every layer attends to all tokens before, so that a mask can keep packed responses apart."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return all(kind == "full_attention" for kind in layer_types)
    return getattr(config, "sliding_window", None) is None


class Wrapped(nn.Module):
    """A model of transformers, ``model``, as a function from a :class:`Layout` to something per token.

    ``value_head``: of a critic on the model's layers; ``context``: this rank's slice of each row, where rows are split;
    ``vocabulary``: its part of the logits, where a head is; ``routers``: of a mixture, where they choose what a layout
    says.
    """

    context: Context | None = None
    routers: Routers | None = None
    vocabulary: Vocabulary | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.value_head: nn.Linear | None = None
        self.packs = can_share_prefixes(model.config) and pack_rows(model)  # rows may stand end to end

    def own(self, layout: Layout) -> Layout:
        """What this rank computes of it."""
        return self.context.slice(layout) if self.context else layout

    def rows(self, values: Tensor, own: Layout) -> Tensor:
        """``[rows, length]`` of the values ``[n]`` of all ranks that have parts of these rows."""
        rows = own.to_rows(values)
        return self.context.joined(rows) if self.context else rows

    def hidden(self, layout: Layout) -> Tensor:
        """``[n, hidden]``: the states that predict the n loss tokens."""
        if self.routers:
            self.routers.replay(layout.experts)
        flexible = uses_flex(self.model, layout.tokens.device)
        hidden = self.model.base_model(
            input_ids=layout.tokens,
            attention_mask=layout.attention(flexible=flexible, split=self.context is not None),
            position_ids=layout.positions,
            use_cache=False,
        ).last_hidden_state
        return hidden.reshape(-1, hidden.shape[-1]).index_select(0, layout.predictors)


class TokenLogprobs(Wrapped):
    """The wrapped model as a function from a :class:`Layout` to per-token log-probabilities.

    Args:
        model: any causal model of transformers.
        distribution: that of the sampling; by default the model's own.
    """

    def __init__(self, model: PreTrainedModel, distribution: SampledDistribution | None = None) -> None:
        super().__init__(model)
        self.distribution = distribution or SampledDistribution()

    def forward(
        self,
        layout: Layout,
        with_entropy: bool = False,
        plain: bool = False,
        entropy_gradient: bool = True,
        others: Tensor | None = None,
        likeliest: int = 0,
        value_share: float | None = None,
        values_alone: bool = False,
    ) -> TokenScores | tuple[Tensor, Tensor] | Tensor:
        """Entry t of a row is log p(token t | tokens < t).

        Args:
            with_entropy: also the entropy of the distribution that each loss token was drawn from.
            plain: of the model's own distribution, temperature 1 and nothing left out.
            entropy_gradient: the entropy is differentiable; else it costs no memory in the backward pass.
            others: tokens (int64 ``[rows, length, k]``) that are asked about beside each loss token.
            likeliest: in the place of all this, so many tokens and their log-probabilities, ``[rows, length, k]`` each.
            value_share: also what ``value_head`` says; this share of its gradient goes on to the layers.
            values_alone: in the place of all this, what ``value_head`` says; the layers get no gradient.
        """
        if values_alone:
            return self._values_alone(layout)
        if likeliest:
            return self._likeliest(layout, likeliest)
        distribution = SampledDistribution() if plain else self.distribution
        asked = _Asked(distribution, with_entropy, entropy_gradient, self.vocabulary)
        own = self.own(layout)
        targets = own.targets[:, None]
        if others is not None:
            targets = torch.cat([targets, others.flatten(0, 1)[own.cells]], 1)
        hidden = self.hidden(own)
        logprobs, entropy = self._score(hidden, targets, asked)
        return TokenScores(
            self.rows(logprobs[:, 0], own),
            None if entropy is None else self.rows(entropy, own),
            None if value_share is None else self._values(_shared(hidden, value_share), own),
            None if others is None else self.rows(logprobs[:, 1:], own),
        )

    def _values_alone(self, layout: Layout) -> Tensor:
        """``[rows, length]``, for whose gradient the layers are constants."""
        own = self.own(layout)
        with torch.no_grad():
            hidden = self.hidden(own)
        return self._values(hidden, own)

    def _values(self, hidden: Tensor, own: Layout) -> Tensor:
        assert self.value_head is not None
        return self.rows(linear_values(self.value_head, hidden), own)

    def _likeliest(self, layout: Layout, k: int) -> tuple[Tensor, Tensor]:
        """Of a distribution without filters, which may leave fewer than k."""
        own = self.own(layout)
        head, parts = logits_head(self.model), self.vocabulary
        pieces = []
        for hidden in self.hidden(own).split(self._piece(parts)):
            logits = _logits(head, hidden) / self.distribution.temperature
            pieces.append(parts.likeliest(logits, k) if parts else _likeliest(logits, k))
        tokens, logprobs = (torch.cat([piece[i] for piece in pieces]) for i in (0, 1))
        return self.rows(tokens, own), self.rows(logprobs, own)

    def _piece(self, parts: Vocabulary | None) -> int:
        """Loss tokens that are scored at once."""
        return max(1, MAX_LOGITS // (parts.size if parts else self.model.config.vocab_size))

    def _score(self, hidden: Tensor, targets: Tensor, asked: _Asked) -> tuple[Tensor, Tensor | None]:
        """``targets``: ``[n, 1 + k]``, the loss token first; log-probabilities of all of them, and the entropy."""
        head = logits_head(self.model)
        piece = self._piece(None if asked.distribution.filters else asked.vocabulary)
        if len(hidden) <= piece:
            return _head_scores(head, hidden, targets, asked)
        pieces = [
            checkpoint(_head_scores, head, h, t, asked, use_reentrant=False)
            for h, t in zip(hidden.split(piece), targets.split(piece), strict=True)
        ]
        logprobs = torch.cat([p[0] for p in pieces])
        return logprobs, torch.cat([p[1] for p in pieces]) if asked.entropy else None


def linear_values(head: nn.Linear, hidden: Tensor) -> Tensor:
    """``[n]`` of states ``[n, hidden]``, in float32 at least."""
    exact = torch.promote_types(hidden.dtype, torch.float32)
    bias = None if head.bias is None else head.bias.to(exact)
    return F.linear(hidden.to(exact), head.weight.to(exact), bias).squeeze(-1)


def _shared(hidden: Tensor, share: float) -> Tensor:
    """The same states, bit for bit, through which a share of the gradient goes."""
    constant = hidden.detach()
    return constant + share * (hidden - constant) if share else constant


class _Asked(NamedTuple):
    """Of which distribution, and whether its entropy is wanted, and trained."""

    distribution: SampledDistribution
    entropy: bool
    entropy_gradient: bool
    vocabulary: Vocabulary | None = None


def _head_scores(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, asked: _Asked
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities ``[n, 1 + k]`` and entropy ``[n]`` from hidden states ``[n, hidden]``."""
    logits = _logits(head, hidden)
    parts = asked.vocabulary
    if parts and asked.distribution.filters:
        logits, parts = parts.gathered(logits), None
    logits = asked.distribution(logits, targets[:, 0])
    if parts:
        return parts.scores(logits, targets, entropy=asked.entropy, entropy_gradient=asked.entropy_gradient)
    if asked.entropy and asked.entropy_gradient:
        logprobs = logits.log_softmax(-1)
        return logprobs.gather(1, targets), _entropy(logprobs)
    if targets.shape[1] == 1:
        chosen = -F.cross_entropy(logits, targets[:, 0], reduction="none")[:, None]
    else:
        chosen = chosen_logprobs(logits, targets)
    if not asked.entropy:
        return chosen, None
    with torch.no_grad():
        return chosen, _entropy(logits.log_softmax(-1))


def _logits(head: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    logits = head(hidden)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    most, tokens = logits.topk(min(k, logits.shape[-1]))
    return tokens, most - logits.logsumexp(-1, keepdim=True)


def _entropy(logprobs: Tensor) -> Tensor:
    return -(logprobs.exp() * logprobs).sum(-1)

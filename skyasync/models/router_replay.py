"""Routed experts of a mixture of experts (MoE): recorded by engines, replayed in training.

Invariant: a router weighs experts by its own formula, with its own gradient; only the choice of
experts is replaced. The model routes a token itself if its experts are not known.

Rounding alone may change a router's choice between an engine and a trainer, and the token's
log-probability then jumps. Replaying the engine's choice is "rollout routing replay" (R3, arXiv
2510.11370).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from skyasync.errors import UserError
from skyasync.models.config import EXPERTS, config_value

_INDEX = re.compile(r"layers\.(\d+)\.")
_TOP_K = (torch.topk, torch.Tensor.topk)


def unknown_expert(dtype: torch.dtype) -> int:
    """The number that marks a token whose experts are not known."""
    return torch.iinfo(dtype).max


class Routers:
    """The routers of one model, in the order of its layers.

    Attributes:
        experts: how many there are in a layer.
        top_k: how many of them a token has.
        dtype: of recorded experts: the smallest that has a number besides all experts'.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        router_class = _router_class(model)
        routers = {}
        for name, module in model.named_modules():
            if isinstance(module, router_class):
                routers[name] = module
        if not routers:
            raise UserError(
                f"trainer.policy.router_replay: {type(model).__name__} has no routers that transformers knows of: set "
                f"trainer.policy.router_replay=none"
            )
        config = model.config.get_text_config()
        self._model_type = str(config.model_type)
        self._layers = len(routers)
        self._hidden_layers = int(config.num_hidden_layers)
        self._indices: list[int] = []  # numbers of the layers that have routers
        for name in routers:
            match = _INDEX.search(name)
            if match:
                self._indices.append(int(match[1]))
        self.top_k = int(config.num_experts_per_tok)
        self.experts = max(int(config_value(config, name, 0)) for name in EXPERTS)
        self.dtype = torch.int16
        if self.experts <= unknown_expert(torch.uint8):  # the largest number marks unknown ones
            self.dtype = torch.uint8
        # This method weighs experts outside its groups by 0: its top-k depends on the groups.
        if config_value(config, "topk_method") == "group_limited_greedy":
            raise UserError(not_replayed(self._model_type))
        self._replayed_experts: Tensor | None = None
        self._recorded_experts: dict[int, Tensor] | None = None
        for layer, router in enumerate(routers.values()):
            router.forward = partial(self._route, layer, router.forward)

    def record(self) -> None:
        """Record each router's choices from now on."""
        self._recorded_experts = {}

    def chosen(self) -> np.ndarray:
        """The experts of the last forward pass, ``[tokens, layers, top_k]``."""
        assert self._recorded_experts is not None
        layers = [self._recorded_experts[layer] for layer in range(self._layers)]
        experts = torch.stack(layers, 1).to(self.dtype)  # from [tokens, top_k] of each layer
        result: np.ndarray = experts.cpu().numpy()
        return result

    def replay(self, experts: Tensor | None) -> None:
        """Set the choices of the next forward passes, ``[..., layers, top_k]``.

        None: the routers choose.

        They hold until the next call: the backward pass may recompute a layer.
        """
        if experts is None:
            self._replayed_experts = None
            return
        # vLLM counts layers without experts too.
        if experts.shape[-2] == self._hidden_layers > self._layers:
            experts = experts[..., self._indices, :]
        if experts.shape[-2:] != (self._layers, self.top_k):
            raise UserError(
                f"router replay: the engine reported {experts.shape[-2]} layers with {experts.shape[-1]} experts per "
                f"token, and the trained {self._model_type} has {self._layers} with {self.top_k}: do both load the "
                f"same model?"
            )
        self._replayed_experts = experts.reshape(-1, self._layers, self.top_k)

    def _route(self, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if self._replayed_experts is None and self._recorded_experts is None:
            return forward(*args, **kwargs)
        replayed_experts = None
        if self._replayed_experts is not None:
            replayed_experts = self._replayed_experts[:, layer]  # [tokens, top_k]
        with _TopK(replayed_experts, self.experts, self.top_k) as top:
            output = forward(*args, **kwargs)
        if len(top.choices) != 1:  # the formula is not one top-k: nothing could be replaced
            raise UserError(not_replayed(self._model_type))
        if self._recorded_experts is not None:
            self._recorded_experts[layer] = top.choices[0]
        return output


def _router_class(model: PreTrainedModel) -> Any:  # noqa: ANN401  (a class, or a tuple of them)
    """The class whose router logits transformers records; no class if it records none."""
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        recorder = (module._can_record_outputs or {}).get("router_logits")
        if recorder is not None:
            return recorder.target_class if isinstance(recorder, OutputRecorder) else recorder
    return ()


def not_replayed(family: str) -> str:
    """The message for a family whose routers choose in another way."""
    return (
        f"trainer.policy.router_replay: the routers of {family} do not choose their experts by one top-k over all of "
        f"them, which is what can be recorded and replayed: set trainer.policy.router_replay=none"
    )


class _TopK(TorchFunctionMode):
    """Records or replaces what the top-k of a router chooses, in calls inside this context."""

    def __init__(self, replayed_experts: Tensor | None, experts: int, top_k: int) -> None:
        super().__init__()
        self._replayed_experts = replayed_experts
        self._experts = experts
        self._top_k = top_k
        self.choices: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        if func not in _TOP_K:
            return result
        scores = args[0]  # [tokens, experts]
        indices = result.indices  # [tokens, top_k]
        if scores.shape[-1] != self._experts or indices.shape[-1] != self._top_k:
            return result  # such as a top-k of groups of experts
        if self._replayed_experts is not None:
            is_recorded = self._replayed_experts != unknown_expert(self._replayed_experts.dtype)
            indices = torch.where(is_recorded, self._replayed_experts.long(), indices)
            # Values by the router's own scores, so that their gradient is the router's.
            result = torch.return_types.topk((scores.gather(-1, indices), indices))
        self.choices.append(indices)
        return result

"""Routed experts of a mixture of experts (MoE): recorded when tokens are generated, replayed when
they are trained.

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
        # By the class whose router logits transformers records.
        known = (
            m._can_record_outputs or {} for m in model.modules() if isinstance(m, PreTrainedModel)
        )
        recorder: Any = next(
            (each["router_logits"] for each in known if "router_logits" in each), ()
        )
        if isinstance(recorder, OutputRecorder):
            router_class = recorder.target_class
        else:
            router_class = recorder
        routers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, router_class)
        }
        if not routers:
            raise UserError(
                f"trainer.policy.router_replay: {type(model).__name__} has no routers that transformers knows of: set "
                f"trainer.policy.router_replay=none"
            )
        config = model.config.get_text_config()
        self._family = str(config.model_type)
        self._layers = len(routers)
        self._hidden_layers = int(config.num_hidden_layers)
        self._indices = [int(number[1]) for name in routers if (number := _INDEX.search(name))]
        self.top_k = int(config.num_experts_per_tok)
        self.experts = max(int(config_value(config, name, 0)) for name in EXPERTS)
        if self.experts <= unknown_expert(torch.uint8):
            self.dtype = torch.uint8
        else:
            self.dtype = torch.int16
        if (
            config_value(config, "topk_method") == "group_limited_greedy"
        ):  # weighs experts outside its groups by 0
            raise UserError(not_replayed(self._family))
        self._given: Tensor | None = None
        self._chosen: dict[int, Tensor] | None = None
        for layer, router in enumerate(routers.values()):
            router.forward = partial(self._route, layer, router.forward)

    def record(self) -> None:
        """Record each router's choices from now on."""
        self._chosen = {}

    def chosen(self) -> np.ndarray:
        """``[tokens, layers, top_k]`` of the last forward pass."""
        assert self._chosen is not None
        layers = [self._chosen[layer] for layer in range(self._layers)]
        experts: np.ndarray = torch.stack(layers, 1).to(self.dtype).cpu().numpy()
        return experts

    def replay(self, experts: Tensor | None) -> None:
        """Set the choices of the next forward passes, ``[..., layers, top_k]``; None: the routers'
        own.

        They hold until the next call: the backward pass may recompute a layer.
        """
        if experts is None:
            self._given = None
            return
        if (
            experts.shape[-2] == self._hidden_layers > self._layers
        ):  # vLLM counts layers without experts too
            experts = experts[..., self._indices, :]
        if experts.shape[-2:] != (self._layers, self.top_k):
            raise UserError(
                f"router replay: the engine reported {experts.shape[-2]} layers with {experts.shape[-1]} experts per "
                f"token, and the trained {self._family} has {self._layers} with {self.top_k}: do both load the "
                f"same model?"
            )
        self._given = experts.reshape(-1, self._layers, self.top_k)

    def _route(self, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if self._given is None and self._chosen is None:
            return forward(*args, **kwargs)
        with _TopK(
            None if self._given is None else self._given[:, layer], self.experts, self.top_k
        ) as top:
            output = forward(*args, **kwargs)
        if len(top.choices) != 1:
            raise UserError(not_replayed(self._family))
        if self._chosen is not None:
            self._chosen[layer] = top.choices[0]
        return output


def not_replayed(family: str) -> str:
    return (
        f"trainer.policy.router_replay: the routers of {family} do not choose their experts by one top-k over all of "
        f"them, which is what can be recorded and replayed: set trainer.policy.router_replay=none"
    )


class _TopK(TorchFunctionMode):
    """Around a router: records or replaces what its top-k chooses."""

    def __init__(self, given: Tensor | None, experts: int, top_k: int) -> None:
        super().__init__()
        self._given = given
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
        if func not in _TOP_K or (args[0].shape[-1], result.indices.shape[-1]) != (
            self._experts,
            self._top_k,
        ):
            return result  # such as a top-k of groups of experts
        indices = result.indices
        if self._given is not None:
            known = self._given != unknown_expert(self._given.dtype)
            indices = torch.where(known, self._given.long(), indices)
            result = torch.return_types.topk((args[0].gather(-1, indices), indices))
        self.choices.append(indices)
        return result

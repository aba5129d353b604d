"""Weights under the names that the model's files have, for engines that load them as they load files.

Invariant: names and tensors are those of an export. transformers joins the experts of a layer when it loads them; here
that is undone, by the library itself: parameter by parameter where that gives the tensors that undoing it for all at
once would (which is tried once, without memory), and else for all at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from skyasync.config.schema import Config
from skyasync.config.schema.sampling import backend
from skyasync.engines.protocol import ENGINES
from skyasync.inference.interface import ENGINES
from skyasync.weight_sync.kinds import Kinds, empty, kinds_of

if TYPE_CHECKING:
    from skyasync.models.lora import Adapters


def wants_file_names(cfg: Config) -> bool:
    """Whether the run's engines load what they are sent as they load files."""
    engine = ENGINES.builtins().get(backend(cfg))  # one of the user's may be known to their program alone
    return engine is not None and bool(engine.can["loads_as_files"])


def has_other_names(model: PreTrainedModel) -> bool:
    """Whether anything in the model is joined that lies apart in its files."""
    return any(isinstance(conversion, WeightConverter) for conversion in get_model_conversion_mapping(model))


class Apart:
    """What is joined in a model apart again; others as they are.

    Args:
        kinds: of the whole weights, by the names of the model's parameters.
        adapters: beside the model's layers, where it has some.
    """

    def __init__(self, model: PreTrainedModel, kinds: Kinds, adapters: Adapters | None = None) -> None:
        self._model, self._adapters = model, adapters
        tensors = empty(kinds)
        at_once = kinds_of(self._undone(tensors))
        of_each = {name: kinds_of(self._undone({name: tensor})) for name, tensor in tensors.items()}
        in_turn = {name: kind for found in of_each.values() for name, kind in found.items()}
        self.one_by_one = in_turn == at_once
        self.kinds: Kinds = in_turn if self.one_by_one else at_once
        self._as_it_is = {name for name, found in of_each.items() if found == {name: kinds[name]}}

    def of_one(self, name: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one parameter."""
        yield from [(name, whole)] if name in self._as_it_is else self._undone({name: whole}).items()

    def of_all(self, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        yield from self._undone(weights).items()

    def _undone(self, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
        with self._adapters.aside() if self._adapters else nullcontext():  # transformers looks at the model's layers
            found: Mapping[str, Tensor] = revert_weight_conversion(self._model, weights)
        return found

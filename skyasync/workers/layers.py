"""Which modules of a model are its decoder layers."""

from __future__ import annotations

from torch import nn

from skyasync.workers.model import Wrapped


def decoder_layers(wrapper: Wrapped) -> list[nn.Module]:
    """By the names of classes that transformers would not split; FSDP gives each sharded one a class of its own."""
    names = set(wrapper.model._no_split_modules or ())
    return [m for m in wrapper.modules() if any(base.__name__ in names for base in type(m).__mro__)]

"""``torch``, imported at the first use of one of its names, so that the algorithms can be listed
without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> object:
            import torch

            self.__dict__[name] = getattr(torch, name)
            return self.__dict__[name]

    torch = _Torch()

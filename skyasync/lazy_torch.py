"""``torch``, imported at the first use of one of its names.

So algorithms can be listed, and settings checked, without the seconds that the import takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> object:
            import torch

            value = getattr(torch, name)
            self.__dict__[name] = value  # __getattr__ is not called for it again
            return value

    torch = _Torch()

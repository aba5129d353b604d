"""Names that a class of the library has changed, in classes of its users."""

from __future__ import annotations

import warnings
from collections.abc import Mapping


def take_former_methods(cls: type, former: Mapping[str, str]) -> None:
    """Give the methods that ``cls`` defines under former names their new names, each with a warning.

    Args:
        former: new names by former ones.
    """
    for old in former.keys() & vars(cls).keys():
        warnings.warn(f"{cls.__name__}.{old}: the method is called {former[old]} now", FutureWarning, 4)
        setattr(cls, former[old], vars(cls)[old])

"""The former name of ``skyasync.interop``; imports of it go on working for one version."""

import sys
import warnings
from importlib import import_module

warnings.warn("skyasync.compat is called skyasync.interop now: change the import", DeprecationWarning, stacklevel=2)
for _name in ("areal", "roll", "skyrl"):
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = import_module(f"skyasync.interop.{_name}")

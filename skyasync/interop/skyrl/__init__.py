"""SkyRL: settings, recipes, and the classes that its environments are written with.

An environment that was written for SkyRL changes its imports, to
``from skyasync.interop.skyrl import ...``.
"""

from __future__ import annotations

from importlib import import_module

from skyasync.interop.system import System

SYSTEM = System("skyrl", "SkyRL", order=1, has_our_keys=True)

__all__ = [
    "BaseTextEnv",
    "BaseTextEnvStepOutput",
    "ConversationType",
    "Env",
    "ToolGroup",
    "make",
    "register",
    "tool",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.gym"), name)
    globals()[name] = value
    return value

"""The off-policy mathematics of reinforcement learning, as pure functions on masked tensors.

Tensors are ``[batch, length]``. Here are the six registries: the modules of their components, and
the inputs and capabilities that these may declare.

Invariant: importing this package imports no torch, and neither do queries of what is registered and
what it needs; a module is loaded when one of its names is looked up. The functions import nothing
of the library but its registries and errors.
"""

from __future__ import annotations

from pathlib import Path

from skyasync.registry import Registry

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "CORRECTIONS",
    "KL_CONTROLLERS",
    "KL_ESTIMATORS",
    "LOSS_REDUCTIONS",
    "POLICY_LOSSES",
]

_HERE = "skyasync.algorithms"
_LOSSES = sorted(file.stem for file in Path(__file__).with_name("losses").glob("[!_]*.py"))

POLICY_LOSSES = Registry(
    "policy loss",
    [f"{_HERE}.losses.{module}" for module in _LOSSES],
    inputs="current anchor proximal behaviour reference advantages mask entropy selection",
    needs="current",
)

ADVANTAGE_ESTIMATORS = Registry(
    "advantage estimator",
    [f"{_HERE}.advantages"],
    inputs="rewards values mask group_ids",
    needs="rewards mask",
    capabilities={
        # A sample is compared with the rest of its group: in a group of one every advantage is 0.
        # With a setting's name instead of true, it is if that setting is "group".
        "group_relative": False,
        # An advantage depends on other groups of the batch as well. With a setting's name instead
        # of true, it does if that setting is "batch" or true.
        "whole_batch": False,
        # Advantages depend on rewards.
        "rewarded": True,
    },
)

KL_ESTIMATORS = Registry(
    "KL estimator", [f"{_HERE}.kl"], inputs="current reference", needs="current reference"
)

KL_CONTROLLERS = Registry("KL controller", [f"{_HERE}.kl"])

CORRECTIONS = Registry(
    "off-policy correction", [f"{_HERE}.corrections"], inputs="proximal behaviour advantages mask"
)

LOSS_REDUCTIONS = Registry(
    "loss reduction",
    [f"{_HERE}.reductions"],
    inputs="mask group_ids",
    needs="mask",
    capabilities={"by_parts": False},  # its weights can be made group by group (``divided_by``)
)

"""One golden case: the inputs and results of another framework, and the adapter for its name.

Invariant: everything is float64; results are compared on loss tokens, if the case has a mask.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Results = dict[str, Any]
HANDED_OUT = Path(__file__).with_name("golden_cases.json.gz")
ADAPTERS: dict[str, Callable[[Case], Results]] = {}
MASKS = {"mask", "final_mask", "loss_mask", "attention_mask", "response_mask"}


class Case:
    """``case["log_probs"]`` is an input as a tensor (None if it has none); ``case.params`` are the framework's
    settings.
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw, self.id, self.name, self.peer = raw, raw["id"], raw["name"], raw["peer"]
        self.params, self.inputs, self.expected = raw["params"], raw["inputs"], raw["expected"]
        self.metrics, self.grad, self.bug = (
            raw.get("metrics") or {},
            raw.get("grad"),
            raw.get("peer_bug", False),
        )
        self.leaf = (
            ("values" if raw["kind"] == "value_loss" else "log_probs")
            if self.grad is not None
            else ""
        )
        self._tensors: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor | None:
        if name not in self.inputs:
            return None
        if name not in self._tensors:
            value = tensor(self.inputs[name])
            self._tensors[name] = (
                value.bool() if name in MASKS else value.requires_grad_(name == self.leaf)
            )
        return self._tensors[name]

    @property
    def mask(self) -> Tensor | None:
        return self["mask"]

    @property
    def group_ids(self) -> Tensor:
        if "group_sizes" in self.inputs:
            sizes = torch.tensor(self.inputs["group_sizes"])
            return torch.arange(len(sizes)).repeat_interleave(sizes)
        names = {name: i for i, name in enumerate(dict.fromkeys(self.inputs["index"]))}
        return torch.tensor([names[name] for name in self.inputs["index"]])


def tensor(values: Any) -> Tensor:
    """Nested lists with numbers, booleans and None (NaN) as a float64 tensor."""

    def numbers(value: Any) -> Any:
        return (
            [numbers(v) for v in value]
            if isinstance(value, list)
            else float("nan")
            if value is None
            else float(value)
        )

    return torch.tensor(numbers(values), dtype=torch.float64)


def load_cases() -> list[Case]:
    """The cases in the file that ``GOLDEN_CASES`` names (JSON, gzipped or not), by default those next to this file."""
    path = Path(os.environ.get("GOLDEN_CASES", HANDED_OUT))
    data = path.read_bytes()
    return [
        Case(raw) for raw in json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    ]


def adapter(*families: str) -> Callable[[Callable[[Case], Results]], Callable[[Case], Results]]:
    """Declare that a function computes the cases whose name is, or begins with, one of ``families``."""

    def add(function: Callable[[Case], Results]) -> Callable[[Case], Results]:
        ADAPTERS.update(dict.fromkeys(families, function))
        return function

    return add


def find_adapter(name: str) -> Callable[[Case], Results] | None:
    """The adapter with the longest matching family."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        if ".".join(parts[:count]) in ADAPTERS:
            return ADAPTERS[".".join(parts[:count])]
    return None


def assert_close(case: Case, what: str, got: Any, expected: Any, rtol: float = 0.0) -> None:
    """Within the case's tolerance (or ``rtol``, if that is wider), on the mask's tokens if both have its shape."""
    if not isinstance(expected, int | float) and not _numeric(expected):
        assert got == expected, f"{case.id}: {what}"
        return
    wanted = tensor(expected)
    got = got.double() if isinstance(got, Tensor) else tensor(got)
    mask = case.mask
    if mask is not None and mask.shape in (got.shape, wanted.shape) and what != "grad":
        got, wanted = got.expand_as(mask)[mask], wanted.expand_as(mask)[mask]
    tolerance = case.raw["tolerance"]
    bounds = {"rtol": max(tolerance["rtol"], rtol), "atol": max(tolerance["atol"], rtol)}
    torch.testing.assert_close(
        got.detach(), wanted, msg=lambda m: f"{case.id}: {what}: {m}", **bounds
    )


def _numeric(values: Any) -> bool:
    try:
        tensor(values)
    except (TypeError, ValueError):
        return False
    return True

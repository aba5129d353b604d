"""Which models vLLM can compute with an adapter beside, as far as their ``config.json`` and vLLM's sources tell.

Invariant: read off the installed vLLM, without importing it, which would take seconds. What cannot be told is left to
vLLM.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_MARK = "SupportsLoRA"
_MODELS = "vllm.model_executor.models."
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def why_not(shape: Mapping[str, object], *, gpus: bool) -> str:
    """What keeps vLLM from adapters of a model with such a ``config.json``; "" if nothing that is known."""
    for name in _EXPERTS:
        count = shape.get(name)
        if isinstance(count, int) and count > 0 and not gpus:
            return f"vLLM's CPU kernels have no adapters in a model with experts ({name}={count})"
    named = shape.get("architectures")
    for architecture in named if isinstance(named, list) else ():
        if _adaptable(str(architecture)) is False:
            return f"vLLM has no adapters for {architecture}"
    return ""


@cache
def _adaptable(architecture: str) -> bool | None:
    """None where its sources do not tell."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0], "model_executor", "models")
    place = _places(folder / "registry.py").get(architecture)
    return _marked(folder, *place) if place else None


@cache
def _places(registry: Path) -> dict[str, tuple[str, str]]:
    """Architecture -> the module and the class of it that compute it."""
    if not registry.is_file():
        return {}
    return {
        str(key.value): (str(module.value), str(name.value))
        for table in ast.walk(ast.parse(registry.read_bytes()))
        if isinstance(table, ast.Dict)
        for key, place in zip(table.keys, table.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(place, ast.Tuple) and len(place.elts) == 2
        for module, name in [place.elts]
        if isinstance(module, ast.Constant) and isinstance(name, ast.Constant)
    }


def _marked(folder: Path, module: str, name: str) -> bool | None:
    """Whether a class, or one that it comes from, is marked as one that takes adapters."""
    file = folder / f"{module}.py"
    if not file.is_file():
        return None
    body = ast.parse(file.read_bytes()).body
    here = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    from_elsewhere = {
        alias.asname or alias.name: (node.module.removeprefix(_MODELS), alias.name)
        for node in body
        if isinstance(node, ast.ImportFrom) and node.module and (node.level == 1 or node.module.startswith(_MODELS))
        for alias in node.names
    }
    if name not in here:
        return None
    answers: list[bool | None] = []
    for base in (ast.unparse(base) for base in here[name].bases):
        if base == _MARK:
            return True
        if base in here:
            answers.append(_marked(folder, module, base))
        elif base in from_elsewhere and from_elsewhere[base][0] != "interfaces":
            answers.append(_marked(folder, *from_elsewhere[base]))
    return True if True in answers else None if None in answers else False

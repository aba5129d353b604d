"""What a value of an argument of vLLM's may be, from the annotations in its sources.

Invariant: nothing of vLLM is imported. An annotation that is not understood allows everything: vLLM says it then.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from skyasync.errors import nearest

PLAIN = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "None": (type(None),)}
#: Where names of choices stand that arguments are annotated with.
_ALIASES = ("config/*.py", "model_executor/layers/quantization/__init__.py", "model_executor/model_loader/__init__.py")
#: Arguments that are annotated as plain dictionaries.
_CLASS_OF = {"speculative_config": "SpeculativeConfig"}


def problem(path: str, name: str, value: object, annotation: str) -> str:
    """What is wrong with a value, with its key; "" if nothing is, as far as the annotation tells."""
    fields = fields_of(_CLASS_OF.get(name, "")) or next(filter(None, map(fields_of, _names(annotation))), {})
    if isinstance(value, dict) and fields:
        return next(_inside(path, value, fields), "")
    if not fits(value, annotation):
        return f"{path}={value!r} must be {annotation}, found {type(value).__name__}"
    choices = [choice for kind in _names(annotation) for choice in literals().get(kind, ())]
    others = {kind for kind in _names(annotation) if kind not in literals()} - {"str", "None"}
    if isinstance(value, str) and choices and not others and value not in choices:
        close = " or ".join(nearest(value, {str(choice) for choice in choices}))
        hint = f"did you mean {close}?" if close else f"it is one of {', '.join(map(str, choices))}"
        return f"{path}={value!r} is no choice of vLLM's: {hint}"
    return ""


def _inside(path: str, value: dict[str, Any], fields: dict[str, str]) -> Iterator[str]:
    for key, item in value.items():
        if key not in fields:
            close = " or ".join(nearest(str(key), set(fields)))
            yield f"{path}.{key} is no setting of vLLM's" + (f": did you mean {close}?" if close else "")
        elif wrong := problem(f"{path}.{key}", str(key), item, fields[key]):
            yield wrong


def fits(value: object, annotation: str) -> bool:
    """Whether a value is of one of the types that an annotation names, where these are plain or choices."""
    kinds = _names(annotation)
    if not kinds or any(kind not in PLAIN and kind not in literals() for kind in kinds):
        return True
    allowed = {kind for name in kinds for kind in PLAIN.get(name, tuple(map(type, literals().get(name, ()))))}
    return type(value) in allowed


@cache
def _names(annotation: str) -> tuple[str, ...]:
    """The parts of a union by their last names; none of an annotation that is more than that."""
    parts: list[str] = []
    left: list[ast.expr] = [ast.parse(annotation, mode="eval").body]
    while left:
        node = left.pop(0)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            left = [node.left, node.right, *left]
        elif isinstance(node, ast.Name | ast.Attribute):
            parts.append(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.Constant) and node.value is None:
            parts.append("None")
        else:
            return ()
    return tuple(parts)


@cache
def literals() -> dict[str, tuple[object, ...]]:
    """Choices by the name of their alias; those that name other aliases hold theirs."""
    found: dict[str, tuple[object, ...]] = {}
    for body in map(_body, _files()):
        for node in body:
            name, value = _assigned(node)
            if name and isinstance(value, ast.Subscript) and ast.unparse(value.value) == "Literal":
                items = value.slice.elts if isinstance(value.slice, ast.Tuple) else [value.slice]
                choices = [
                    [item.value] if isinstance(item, ast.Constant) else found.get(ast.unparse(item)) for item in items
                ]
                if None not in choices:
                    found[name] = tuple(choice for each in choices if each is not None for choice in each)
    return found


@cache
def fields_of(name: str) -> dict[str, str]:
    """The annotated fields of one of vLLM's classes of settings; none of anything else."""
    for body in map(_body, _files()) if name else ():
        for node in body:
            if isinstance(node, ast.ClassDef) and node.name == name and not node.bases:
                return {
                    field.target.id: ast.unparse(field.annotation)
                    for field in node.body
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                }
    return {}


def _assigned(node: ast.stmt) -> tuple[str, ast.expr | None]:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, node.value
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id, node.value
    return "", None


@cache
def _body(file: Path) -> tuple[ast.stmt, ...]:
    return tuple(ast.parse(file.read_bytes()).body)


@cache
def _files() -> tuple[Path, ...]:
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return ()
    folder = Path(found.submodule_search_locations[0])
    return tuple(file for pattern in _ALIASES for file in sorted(folder.glob(pattern)))

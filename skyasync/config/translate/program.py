"""A TRL program as keys: the arguments of its ``GRPOConfig`` and ``GRPOTrainer``.

Invariant: the program is parsed, never run; an argument that is no literal stays as it is written.
"""

from __future__ import annotations

import ast
from pathlib import Path

from skyasync.config.values import Value
from skyasync.errors import UserError

_CALLS = ("GRPOConfig", "GRPOTrainer", "ModelConfig", "GRPOScriptArguments", "ScriptArguments")


def arguments(text: str, path: Path) -> dict[str, Value]:
    """Keyword arguments by name; reward functions that the file defines as ``path:function``.

    Raises:
        UserError: if it is not Python.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UserError(f"{path}:{error.lineno}: not Python: {error.msg}") from None
    names = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    here = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    found: dict[str, Value] = {}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or _name(call.func) not in _CALLS:
            continue
        positional = ["model", "reward_funcs"] if _name(call.func) == "GRPOTrainer" else ["output_dir"]
        named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        for key, node in {**dict(zip(positional, call.args, strict=False)), **named}.items():
            if key != "args":
                found[key] = _value(node, names, here, path)
    return found


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _value(node: ast.expr, names: dict[str, ast.expr], here: set[str], path: Path) -> Value:
    try:
        value: Value = ast.literal_eval(node)
        return value
    except ValueError:
        pass
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(entry, names, here, path) for entry in node.elts]
    if isinstance(node, ast.Name) and node.id in here:
        return f"{path}:{node.id}"
    if isinstance(node, ast.Name) and node.id in names:
        others = {name: value for name, value in names.items() if name != node.id}  # x = f(x) ends
        return _value(names[node.id], others, here, path)
    if isinstance(node, ast.Call) and _name(node.func) == "load_dataset":
        return _dataset(node)
    return ast.unparse(node)


def _dataset(call: ast.Call) -> Value:
    """``owner/name#config:split``."""
    values = [ast.unparse(argument).strip("'\"") for argument in call.args]
    named = {keyword.arg: ast.unparse(keyword.value).strip("'\"") for keyword in call.keywords}
    name, config = [*values, "", ""][:2]
    config, split = named.get("name", config), named.get("split", "")
    return f"{named.get('path', name)}{f'#{config}' if config else ''}{f':{split}' if split else ''}"

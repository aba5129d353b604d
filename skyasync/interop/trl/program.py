"""A TRL program as keys: the arguments of its ``GRPOConfig`` and ``GRPOTrainer``, or RLOO's.

Invariant: the program is parsed, never run; an argument that is not a literal stays as it is written.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from skyasync.config.values import Value
from skyasync.errors import UserError

_CALLS = re.compile(r"\w*(GRPO|RLOO)(Config|Trainer)|ModelConfig|\w*ScriptArguments|LoraConfig")
#: Keys of ``LoraConfig``, and TRL's flags for them.
_ADAPTERS = {"r": "lora_r", "target_modules": "lora_target_modules"}


def read(text: str, path: Path) -> tuple[dict[str, Value], str, str]:
    """The training settings of a program.

    Returns:
        Keyword arguments by name, where reward functions that the file defines are ``path:function``; the trainer that
        it makes, or its configuration; the docstring of a program that reads its command line, which shows one.

    Raises:
        UserError: if it is not Python.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UserError(f"{path}:{error.lineno}: not Python: {error.msg}") from None
    names = dict(_names(tree, path))
    settings: dict[str, Value] = {}
    calls = [call for call in ast.walk(tree) if isinstance(call, ast.Call)]
    made = [_name(call.func) for call in calls]
    for call, name in zip(calls, made, strict=True):
        if not _CALLS.fullmatch(name):
            continue
        positional = ["model", "reward_funcs"] if name.endswith("Trainer") else ["output_dir"]
        named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        if name == "LoraConfig":
            positional, named = [], {_ADAPTERS.get(key, key): node for key, node in named.items()}
            settings |= {"use_peft": True, "lora_r": settings.get("lora_r", 8)}  # peft's default, not TRL's
        for key, node in {**dict(zip(positional, call.args, strict=False)), **named}.items():
            value = _value(node, names)
            if isinstance(value, dict) and key == "model_init_kwargs":
                settings |= {f"{key}.{entry}": inner for entry, inner in value.items()}
            elif key not in ("args", "peft_config", "task_type"):
                settings[key] = value
    parses = any(name in ("TrlParser", "HfArgumentParser", "parse_args_and_config") for name in made)
    if parses:  # args.model is a setting of the command line
        settings = {key: value for key, value in settings.items() if not re.search(r"\bargs\.|_args\b", str(value))}
    trainers = [name for name in made if re.fullmatch(r"\w*(GRPO|RLOO)(Config|Trainer)", name)]
    shown = ast.get_docstring(tree) or "" if parses else ""
    return settings, max(trainers, default=""), shown


def _names(tree: ast.Module, path: Path) -> Iterator[tuple[str, ast.expr]]:
    """What names stand for where they are first assigned; functions and imports as ``module:name``."""
    assigned: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (
                (alias.asname or alias.name, ast.Constant(f"{node.module}:{alias.name}")) for alias in node.names
            )
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                assigned.setdefault(target.id, node.value)  # what it begins as: later ones change it
            elif isinstance(target, ast.Tuple):
                for at, entry in enumerate(target.elts):
                    if isinstance(entry, ast.Name):
                        assigned.setdefault(entry.id, ast.Subscript(node.value, ast.Constant(at)))
    yield from assigned.items()
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    yield from ((node.name, ast.Constant(f"{path}:{node.name}")) for node in functions)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _value(node: ast.expr, names: dict[str, ast.expr]) -> Value:
    try:
        value: Value = ast.literal_eval(node)
        return value
    except ValueError:
        pass
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(entry, names) for entry in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return {key.value: _value(value, names) for key, value in zip(node.keys, node.values, strict=True)}  # type: ignore[union-attr]
    if isinstance(node, ast.Attribute) and node.attr in ("bfloat16", "float16", "float32"):
        return node.attr
    dataset = _dataset(node, names)
    if dataset is not None:
        return dataset
    if isinstance(node, ast.Name) and node.id in names:
        return _value(names[node.id], {other: value for other, value in names.items() if other != node.id})
    return ast.unparse(node)


def _dataset(node: ast.expr, names: dict[str, ast.expr]) -> Value:
    """``owner/name#config:split`` of a loaded data set, whatever is done to its rows; None for anything else."""
    if isinstance(node, ast.IfExp):
        return _dataset(node.body, names)
    if isinstance(node, ast.Name) and node.id in names:
        others = {other: value for other, value in names.items() if other != node.id}  # so that x = f(x) ends
        return _dataset(names[node.id], others)
    if isinstance(node, ast.Subscript):
        dataset, at = _dataset(node.value, names), node.slice
        if isinstance(dataset, list):
            return dataset[at.value] if isinstance(at, ast.Constant) and isinstance(at.value, int) else None
        bare = isinstance(dataset, str) and ":" not in dataset and isinstance(at, ast.Constant)
        return f"{dataset}:{at.value}" if bare and isinstance(at.value, str) else dataset  # type: ignore[attr-defined]
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Attribute) and node.func.attr != "load_dataset":
        return _dataset(node.func.value, names)
    if _name(node.func) != "load_dataset":
        return None
    given = dict(zip(("path", "name"), node.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    read = {key: _value(value, names) for key, value in given.items() if key in ("path", "name", "split")}
    whole = "#".join(str(read[key]) for key in ("path", "name") if read.get(key))
    split = read.get("split")
    return (
        [f"{whole}:{part}" for part in split] if isinstance(split, list) else f"{whole}{f':{split}' if split else ''}"
    )

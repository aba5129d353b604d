"""A TRL program as keys: the arguments of its ``GRPOConfig`` and ``GRPOTrainer``, or RLOO's.

Invariant: the program is parsed, never run; an argument that is not a literal stays as it is
written.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyasync.config.values import Value
from skyasync.errors import UserError
from skyasync.interop.limits import Budget

_CALLS = re.compile(r"\w*(GRPO|RLOO)(Config|Trainer)|ModelConfig|\w*ScriptArguments|LoraConfig")
#: Keys of ``LoraConfig``, and TRL's flags for them.
_ADAPTERS = {"r": "lora_r", "target_modules": "lora_target_modules"}
#: Methods of a data set after which its rows are the same, perhaps fewer or in another order.
_SAME_ROWS = {"shuffle", "with_format", "set_format", "to_iterable_dataset", "flatten_indices"}
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_LARGEST_NUMBER = 2**53
_OWN_ROWS = "data.train_data=[module:function]"


@dataclass
class SourceProgram:
    """The training settings of a program.

    ``settings``: keyword arguments by name, where reward functions that the file defines are
    ``path:function``. ``trainer``: the trainer that it makes, or its configuration. ``example``:
    the docstring of a program that reads its command line, which shows one. ``remarks``: key ->
    what the program does that is not carried out here.
    """

    settings: dict[str, Value] = field(default_factory=dict)
    trainer: str = ""
    example: str = ""
    remarks: dict[str, str] = field(default_factory=dict)


def read(text: str, path: Path) -> SourceProgram:
    """The training settings of a program.

    Raises:
        UserError: if it is not Python, or too large when names are replaced by their values.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UserError(f"{path}:{error.lineno}: not Python: {error.msg}") from None
    except (MemoryError, RecursionError):
        raise UserError(f"{path} is nested too deeply") from None
    except ValueError as error:  # a zero byte
        raise UserError(f"{path}: not Python: {error}") from None
    calls = [call for call in ast.walk(tree) if isinstance(call, ast.Call)]
    options = dict(_options(calls))
    expressions = _Expressions(
        dict(_names(tree, path)), options
    )  # which joins expressions of the tree: it is not walked again
    program = SourceProgram()
    settings = program.settings
    made = [_name(call.func) for call in calls]
    for call, name in zip(calls, made, strict=True):
        if not _CALLS.fullmatch(name):
            continue
        if name.endswith("Trainer"):
            positional = ["model", "reward_funcs"]
        else:
            positional = ["output_dir"]
        named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        if name == "LoraConfig":
            positional = []
            named = {_ADAPTERS.get(key, key): node for key, node in named.items()}
            settings["use_peft"] = True
            settings.setdefault("lora_r", 8)  # peft's defaults, not TRL's
            settings.setdefault("lora_alpha", 8)
            settings.setdefault("lora_dropout", 0.0)
        for key, node in {**dict(zip(positional, call.args, strict=False)), **named}.items():
            value = expressions.value(node)
            changes = expressions.changes.pop("", "")
            if changes:
                program.remarks[key] = (
                    f"{changes} is not applied: a function that returns the rows is {_OWN_ROWS}"
                )
            if isinstance(value, dict) and key == "model_init_kwargs":
                settings |= {f"{key}.{entry}": inner for entry, inner in value.items()}
            elif key not in ("args", "peft_config", "task_type"):
                settings[key] = value
    parses = any(
        name in ("TrlParser", "HfArgumentParser", "parse_args_and_config") for name in made
    )
    if parses:  # args.model is a setting of the command line
        for key in [
            key for key, value in settings.items() if re.search(r"\bargs\.|_args\b", str(value))
        ]:
            settings.pop(key)
        program.example = ast.get_docstring(tree) or ""
    trainers = [name for name in made if re.fullmatch(r"\w*(GRPO|RLOO)(Config|Trainer)", name)]
    program.trainer = max(trainers, default="")
    return program


def _options(calls: Iterable[ast.Call]) -> Iterator[tuple[str, ast.expr]]:
    """Arguments of the command line that argparse reads, with their defaults."""
    for call in calls:
        words = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
        flags = [word for word in words if isinstance(word, str) and word.startswith("--")]
        if _name(call.func) != "add_argument" or not flags:
            continue
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        default = given.get("default")
        if default is None and isinstance(action := given.get("action"), ast.Constant):
            default = {"store_true": ast.Constant(False), "store_false": ast.Constant(True)}.get(
                str(action.value)
            )
        name = given.get("dest", ast.Constant(flags[0][2:].replace("-", "_")))
        if default is not None and isinstance(name, ast.Constant):
            yield str(name.value), default


def _names(tree: ast.Module, path: Path) -> Iterator[tuple[str, ast.expr]]:
    """What names stand for where they are first assigned; functions and imports as
    ``module:name``."""
    assigned: dict[str, ast.expr] = {}
    for node in list(ast.walk(tree)):  # before expressions are joined
        if isinstance(node, ast.ImportFrom):
            yield from (
                (alias.asname or alias.name, ast.Constant(f"{node.module}:{alias.name}"))
                for alias in node.names
            )
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                before = assigned.get(target.id)
                if before is None or _continues(node.value, target.id, before):
                    assigned[target.id] = node.value
            elif isinstance(target, ast.Tuple):
                for at, entry in enumerate(target.elts):
                    if isinstance(entry, ast.Name):
                        assigned.setdefault(entry.id, ast.Subscript(node.value, ast.Constant(at)))
    yield from assigned.items()
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    yield from ((node.name, ast.Constant(f"{path}:{node.name}")) for node in functions)


def _continues(node: ast.expr, name: str, before: ast.expr) -> bool:
    """Whether a name is assigned again, by calls on its value, ``x = x.map(f)`` or ``x = f(x)``,
    which is put in then.

    Other later assignments do not count: a name has the value that it begins with.
    """
    while isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            if isinstance(node.func.value, ast.Name) and node.func.value.id == name:
                node.func.value = before
                return True
            node = node.func.value
        elif node.args:
            if isinstance(node.args[0], ast.Name) and node.args[0].id == name:
                node.args[0] = before
                return True
            node = node.args[0]
        else:
            return False
    return False


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return ""


@dataclass
class _Expressions:
    """Expressions as values.

    ``names``: what each name of the program stands for; ``options``: defaults of its flags.
    """

    names: dict[str, ast.expr]
    options: dict[str, ast.expr] = field(default_factory=dict)
    changes: dict[str, str] = field(
        default_factory=dict
    )  # of "": what was done to the rows of the data set just read
    _open: list[str] = field(
        default_factory=list
    )  # names that are being replaced, so that x = f(x) ends
    _budget: Budget = field(default_factory=lambda: Budget("the program"))

    def value(self, node: ast.expr) -> Value:
        self._budget.spend(50)
        try:
            value: Value = ast.literal_eval(node)
            return value
        except (ValueError, TypeError):
            pass
        except MemoryError:
            raise UserError("the program is nested too deeply") from None
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(entry) for entry in node.elts]
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            keys: list[Any] = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            return dict(zip(keys, map(self.value, node.values), strict=True))
        if isinstance(node, ast.Attribute):
            if node.attr in ("bfloat16", "float16", "float32"):
                return node.attr
            if (
                isinstance(node.value, ast.Name)
                and node.value.id == "args"
                and node.attr in self.options
            ):
                return self.value(self.options[node.attr])
        if isinstance(node, ast.IfExp) and (equal := self._is_equal(node.test)) is not None:
            return self.value(node.body if equal else node.orelse)
        if isinstance(node, ast.BinOp):
            return self._number(node)
        dataset = self._dataset(node)
        if dataset is not None:
            return dataset
        replaced = self._replaced(node)
        if replaced:
            self._open.append(node.id)  # type: ignore[attr-defined]
            value = self.value(replaced)
            self._open.pop()
            return value
        text = ast.unparse(node)
        self._budget.spend(len(text))
        return text

    def _is_equal(self, test: ast.expr) -> bool | None:
        """Whether a flag's default is the text that it is compared with; None for any other
        condition."""
        if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq) or test.ops[1:]:
            return None
        if not isinstance(test.left, ast.Attribute) or test.left.attr not in self.options:
            return None
        return self.value(test.left) == self.value(test.comparators[0])

    def _replaced(self, node: ast.expr) -> ast.expr | None:
        """What a name stands for; None for anything else."""
        if isinstance(node, ast.Name) and node.id not in self._open:
            return self.names.get(node.id)
        return None

    def _number(self, node: ast.BinOp) -> Value:
        """Whole numbers added, subtracted and multiplied; the text of anything else."""
        left = self.value(node.left)
        right = self.value(node.right)
        function = _OPERATORS.get(type(node.op))
        whole = type(left) is int and type(right) is int
        if not whole or function is None or (function is operator.floordiv and not right):
            return ast.unparse(node)
        result = function(left, right)  # type: ignore[arg-type]
        if abs(result) < _LARGEST_NUMBER:
            return result
        return ast.unparse(node)

    def _dataset(self, node: ast.expr) -> Value:
        """``owner/name#config:split`` of a loaded data set, whatever is done to its rows; None for
        anything else."""
        self._budget.spend(50)
        if isinstance(node, ast.IfExp):
            return self._dataset(node.body)
        replaced = self._replaced(node)
        if replaced:
            self._open.append(node.id)  # type: ignore[attr-defined]
            dataset = self._dataset(replaced)
            self._open.pop()
            return dataset
        if isinstance(node, ast.Subscript):
            dataset = self._dataset(node.value)
            if isinstance(node.slice, ast.Constant):
                index = node.slice.value
            else:
                index = None
            if isinstance(dataset, list):
                if isinstance(index, int) and index < len(dataset):
                    return dataset[index]
                return None
            bare = isinstance(dataset, str) and ":" not in dataset
            if bare and isinstance(index, str):
                return f"{dataset}:{index}"
            return dataset
        if not isinstance(node, ast.Call):
            return None
        if isinstance(node.func, ast.Attribute) and node.func.attr != "load_dataset":
            dataset = self._dataset(node.func.value)
            if dataset is not None and node.func.attr not in _SAME_ROWS:
                self._note(node)
            return dataset
        if _name(node.func) != "load_dataset":
            dataset = self._dataset(node.args[0]) if node.args else None
            if dataset is not None:
                self._note(node)
            return dataset
        given = dict(zip(("path", "name"), node.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        read = {
            key: self.value(value)
            for key, value in given.items()
            if key in ("path", "name", "split")
        }
        whole = "#".join(str(read[key]) for key in ("path", "name") if read.get(key))
        split = read.get("split")
        if isinstance(split, list):
            return [f"{whole}:{part}" for part in split]
        if split:
            return f"{whole}:{split}"
        return whole

    def _note(self, call: ast.Call) -> None:
        """Note a method, or a function, that changes the rows of a data set."""
        name = _name(call.func) or "..."
        if isinstance(call.func, ast.Attribute):
            arguments = ", ".join(map(ast.unparse, call.args))
            text = f".{name}({arguments if len(arguments) <= 40 else '...'})"
        else:
            text = f"{name}(...)"
        before = self.changes.get("", "")
        if len(before) < 120:
            self.changes[""] = before + text
        else:
            self.changes[""] = before

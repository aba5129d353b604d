"""A TRL program as keys: the arguments of its ``GRPOConfig`` and ``GRPOTrainer``, or RLOO's.

Invariant: the program is parsed, never run. An argument that cannot be evaluated stays as its
source text.
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
#: Methods of a data set that do not change its rows, except for their number and order.
_SAME_ROWS = {"shuffle", "with_format", "set_format", "to_iterable_dataset", "flatten_indices"}
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
#: Defaults of peft's ``LoraConfig``; those of TRL's command line differ.
_ADAPTER_DEFAULTS: dict[str, Value] = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
_COMMAND_LINE_PARSERS = ("TrlParser", "HfArgumentParser", "parse_args_and_config")
#: Arguments of the trainer that are objects: their own calls are read.
_OBJECTS = ("args", "peft_config", "task_type")
_LARGEST_NUMBER = 2**53  # above it, a float is not exact, and powers could fill the memory
_LONGEST_CALL = 40  # characters of a call's arguments in a remark
_LONGEST_CALLS = 120  # characters of all calls in a remark
_ROWS_FUNCTION = "data.train_data=[module:function]"


@dataclass
class SourceProgram:
    """The training settings of a program.

    Args:
        settings: keyword arguments by name; reward functions of the file are ``path:function``.
        trainer: the class of its trainer, or else of its configuration.
        example: the docstring, if the program reads its command line. It shows a command.
        remarks: setting -> changes of its value by the program, which are not carried out here.
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
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    options = dict(_options(calls))
    # _names joins expressions of the tree, which may grow exponentially: it is not walked again.
    expressions = _Expressions(dict(_names(tree, path)), options)
    program = SourceProgram()
    class_names = [_name(call.func) for call in calls]
    for call, class_name in zip(calls, class_names, strict=True):
        if _CALLS.fullmatch(class_name):
            _read_call(call, class_name, expressions, program)
    if any(name in _COMMAND_LINE_PARSERS for name in class_names):
        # args.model is a setting of the command line.
        for key, value in list(program.settings.items()):
            if re.search(r"\bargs\.|_args\b", str(value)):
                del program.settings[key]
        program.example = ast.get_docstring(tree) or ""
    for name in class_names:
        if re.fullmatch(r"\w*(GRPO|RLOO)(Config|Trainer)", name):
            # In alphabetical order a trainer is after its configuration.
            program.trainer = max(program.trainer, name)
    return program


def _read_call(
    call: ast.Call, class_name: str, expressions: _Expressions, program: SourceProgram
) -> None:
    """Add the arguments of a trainer or a configuration to the program's settings."""
    settings = program.settings
    positional = ["output_dir"]
    names: dict[str, str] = {}
    if class_name.endswith("Trainer"):
        positional = ["model", "reward_funcs"]
    elif class_name == "LoraConfig":
        positional = []
        names = _ADAPTERS
        settings["use_peft"] = True
        for key, default in _ADAPTER_DEFAULTS.items():
            settings.setdefault(key, default)
    arguments = dict(zip(positional, call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg:  # None for **arguments
            arguments[names.get(keyword.arg, keyword.arg)] = keyword.value
    for key, node in arguments.items():
        value = expressions.value(node)
        changes = expressions.take_changes()
        if changes:
            program.remarks[key] = (
                f"{changes} is not applied: a function that returns the rows is {_ROWS_FUNCTION}"
            )
        if isinstance(value, dict) and key == "model_init_kwargs":
            for entry, entry_value in value.items():
                settings[f"{key}.{entry}"] = entry_value
        elif key not in _OBJECTS:
            settings[key] = value


def _options(calls: Iterable[ast.Call]) -> Iterator[tuple[str, ast.expr]]:
    """The arguments of argparse's command line, with their defaults."""
    for call in calls:
        if _name(call.func) != "add_argument":
            continue
        flag = ""
        for argument in call.args:
            text = argument.value if isinstance(argument, ast.Constant) else None
            if isinstance(text, str) and text.startswith("--"):
                flag = text
                break
        if not flag:
            continue
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        default = keywords.get("default")
        action = keywords.get("action")
        if default is None and isinstance(action, ast.Constant):
            if action.value == "store_true":
                default = ast.Constant(False)
            elif action.value == "store_false":
                default = ast.Constant(True)
        option = flag.removeprefix("--").replace("-", "_")
        name = keywords.get("dest", ast.Constant(option))
        if default is not None and isinstance(name, ast.Constant):
            yield str(name.value), default


def _names(tree: ast.Module, path: Path) -> Iterator[tuple[str, ast.expr]]:
    """The expression of each name at its first assignment.

    Functions and imports are ``module:name``.
    """
    assigned: dict[str, ast.expr] = {}
    for node in list(ast.walk(tree)):  # a list, because _extends() joins expressions of the tree
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                reference = f"{node.module}:{alias.name}"
                yield alias.asname or alias.name, ast.Constant(reference)
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                previous = assigned.get(target.id)
                if previous is None or _extends(node.value, target.id, previous):
                    assigned[target.id] = node.value
            elif isinstance(target, ast.Tuple):
                for position, entry in enumerate(target.elts):
                    if isinstance(entry, ast.Name):
                        item = ast.Subscript(node.value, ast.Constant(position))
                        assigned.setdefault(entry.id, item)
    yield from assigned.items()
    for definition in tree.body:
        if isinstance(definition, ast.FunctionDef | ast.ClassDef):
            yield definition.name, ast.Constant(f"{path}:{definition.name}")


def _extends(node: ast.expr, name: str, previous: ast.expr) -> bool:
    """Whether an assignment calls something on the name's value: ``x = x.map(f)``, ``x = f(x)``.

    Then ``previous`` replaces the name within ``node``. Other later assignments do not count: a
    name has its first value.
    """
    while isinstance(node, ast.Call):
        # The operand: the object of a method, or the first argument of a function.
        if isinstance(node.func, ast.Attribute):
            operand = node.func.value
            if isinstance(operand, ast.Name) and operand.id == name:
                node.func.value = previous
                return True
        elif node.args:
            operand = node.args[0]
            if isinstance(operand, ast.Name) and operand.id == name:
                node.args[0] = previous
                return True
        else:
            return False
        node = operand
    return False


def _name(node: ast.expr) -> str:
    """The last name of a function's expression, such as ``map`` of ``dataset.map``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return ""


@dataclass
class _Expressions:
    """Evaluates expressions without running them.

    Args:
        names: the expression that each name of the program stands for.
        options: the defaults of its command line.
    """

    names: dict[str, ast.expr]
    options: dict[str, ast.expr]
    # Calls that changed the rows of the data set that was read.
    _changes: str = ""
    # Names that are being replaced: x = f(x) must end.
    _open: list[str] = field(default_factory=list)
    _budget: Budget = field(default_factory=lambda: Budget("the program"))

    def take_changes(self) -> str:
        """The calls that changed the rows of the data set since the last call of this method."""
        changes = self._changes
        self._changes = ""
        return changes

    def value(self, node: ast.expr) -> Value:
        """The value of an expression, or its source text."""
        self._budget.spend(50)
        try:
            value: Value = ast.literal_eval(node)
            return value
        except (ValueError, TypeError):
            pass  # no literal: its parts may have values
        except MemoryError:
            raise UserError("the program is nested too deeply") from None
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(entry) for entry in node.elts]
        if isinstance(node, ast.Dict):
            keys: list[Any] = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            if len(keys) == len(node.keys):
                return dict(zip(keys, map(self.value, node.values), strict=True))
        if isinstance(node, ast.Attribute):
            if node.attr in ("bfloat16", "float16", "float32"):
                return node.attr
            is_option = isinstance(node.value, ast.Name) and node.value.id == "args"
            if is_option and node.attr in self.options:
                return self.value(self.options[node.attr])
        if isinstance(node, ast.IfExp):
            equal = self._is_equal(node.test)
            if equal is not None:
                return self.value(node.body if equal else node.orelse)
        if isinstance(node, ast.BinOp):
            return self._number(node)
        dataset = self._dataset(node)
        if dataset is not None:
            return dataset
        replacement = self._replacement(node)
        if replacement:
            self._open.append(node.id)  # type: ignore[attr-defined]
            value = self.value(replacement)
            self._open.pop()
            return value
        text = ast.unparse(node)
        self._budget.spend(len(text))
        return text

    def _is_equal(self, test: ast.expr) -> bool | None:
        """Whether ``args.flag == value`` holds for the flag's default; None for other conditions."""
        if not isinstance(test, ast.Compare) or len(test.ops) > 1:
            return None
        flag = test.left
        if not isinstance(test.ops[0], ast.Eq) or not isinstance(flag, ast.Attribute):
            return None
        if flag.attr not in self.options:
            return None
        return self.value(flag) == self.value(test.comparators[0])

    # DELETE _replaced
    def _replacement(self, node: ast.expr) -> ast.expr | None:
        """The expression that a name stands for; None for anything else."""
        if isinstance(node, ast.Name) and node.id not in self._open:
            return self.names.get(node.id)
        return None

    def _number(self, node: ast.BinOp) -> Value:
        """Whole numbers added, subtracted and multiplied; the source text of anything else."""
        left = self.value(node.left)
        right = self.value(node.right)
        function = _OPERATORS.get(type(node.op))
        # Not isinstance: bool is an int.
        if type(left) is not int or type(right) is not int:
            return ast.unparse(node)
        if function is None:
            return ast.unparse(node)
        if function is operator.floordiv and right == 0:
            return ast.unparse(node)
        result = function(left, right)
        if abs(result) < _LARGEST_NUMBER:
            return result
        return ast.unparse(node)

    def _dataset(self, node: ast.expr) -> Value:
        """``owner/name#config:split`` of a data set that is loaded; None for anything else.

        Calls that change its rows are noted.
        """
        self._budget.spend(50)
        if isinstance(node, ast.IfExp):
            return self._dataset(node.body)
        replacement = self._replacement(node)
        if replacement:
            self._open.append(node.id)  # type: ignore[attr-defined]
            dataset = self._dataset(replacement)
            self._open.pop()
            return dataset
        if isinstance(node, ast.Subscript):
            return self._dataset_entry(node)
        if not isinstance(node, ast.Call):
            return None
        function = _name(node.func)
        if function == "load_dataset":
            return self._loaded_dataset(node)
        if isinstance(node.func, ast.Attribute):
            dataset = self._dataset(node.func.value)
            if function in _SAME_ROWS:
                return dataset
        else:
            dataset = self._dataset(node.args[0]) if node.args else None
        if dataset is not None:
            self._note(node)
        return dataset

    def _dataset_entry(self, node: ast.Subscript) -> Value:
        """``dataset["train"]``, or an entry of a list of splits."""
        dataset = self._dataset(node.value)
        index = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(dataset, list):
            if isinstance(index, int) and index < len(dataset):
                return dataset[index]
            return None
        has_no_split = isinstance(dataset, str) and ":" not in dataset
        if has_no_split and isinstance(index, str):
            return f"{dataset}:{index}"
        return dataset

    def _loaded_dataset(self, call: ast.Call) -> Value:
        """The data set, or the list of its splits, that ``load_dataset`` returns."""
        arguments = dict(zip(("path", "name"), call.args, strict=False))
        for keyword in call.keywords:
            if keyword.arg:
                arguments[keyword.arg] = keyword.value
        values = {}
        for key, node in arguments.items():
            if key in ("path", "name", "split"):
                values[key] = self.value(node)
        names = [str(values[key]) for key in ("path", "name") if values.get(key)]
        dataset = "#".join(names)
        split = values.get("split")
        if isinstance(split, list):
            return [f"{dataset}:{entry}" for entry in split]
        if split:
            return f"{dataset}:{split}"
        return dataset

    def _note(self, call: ast.Call) -> None:
        """Note a method, or a function, that changes the rows of a data set."""
        if len(self._changes) >= _LONGEST_CALLS:
            return
        name = _name(call.func) or "..."
        if isinstance(call.func, ast.Attribute):
            arguments = ", ".join(map(ast.unparse, call.args))
            if len(arguments) > _LONGEST_CALL:
                arguments = "..."
            self._changes += f".{name}({arguments})"
        else:
            self._changes += f"{name}(...)"

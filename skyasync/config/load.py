"""From arguments to a checked configuration object.

Invariant: a configuration that ``load_config`` returns has only known keys. Every value has its
key's type and lies within its bounds or among its choices, and no two values contradict each other.
All that is wrong is reported at once, one line for each problem, before torch, Ray or a model is
touched.

Layers, each overriding the one before::

    schema defaults < default_config < preset < --config FILE (in order) < key=value (in order)
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_origin

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from skyasync.config.check import check_config
from skyasync.config.command_line import (
    Assignment,
    CommandLine,
    print_help,
    read_command_line,
    read_file,
    unknown_key,
)
from skyasync.config.keys import Key, Keys
from skyasync.config.schema import Config
from skyasync.config.secrets import Secrets, hidden
from skyasync.config.values import (
    Value,
    WrongTypeError,
    convert,
    escape,
    free,
    from_python,
    parse,
    written,
)
from skyasync.errors import UserError
from skyasync.other_frameworks import other_frameworks

log = logging.getLogger(__name__)

C = TypeVar("C")

MODEL_KEY = "trainer.policy.model.path"
PLAN_KEY = "trainer.plan"
PRESET_KEY = "trainer.algorithm.preset"
DATA_KEY = "data.train_data"
RECIPE = "recipe"
COMMAND_LINE = "command line"
_ORIGINS = "_origins"  # in a configuration's ``__dict__``


class ConfigError(UserError):
    """Everything that is wrong with a configuration: ``problems``, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


@dataclasses.dataclass(frozen=True)
class TypedSetting:
    """A typed value for a key, or for an entry of a free mapping; ``where`` as in
    ``Assignment``."""

    path: str
    value: Any
    where: str = ""


def load_config(
    argv: Sequence[str],
    *,
    schema: type[C] = Config,  # type: ignore[assignment]
    default_config: Path | None = None,
    plan: str | type | None = None,
) -> C:
    """The configuration that a command line asks for, as an instance of ``schema``.

    Args:
        argv: ``key=value`` overrides, ``--config FILE.yaml`` (several: the later wins),
            ``--help [GROUP]``. A string where a list of strings is expected is a list of one. Lists
            and free mappings are replaced as a whole; ``mapping.entry=value`` sets one entry.
            ``${other.key}`` refers to another key.
        schema: ``Config``, or a subclass of it with groups and keys of one's own.
        default_config: a YAML file used when neither ``--config`` nor the policy's model path is
            given: whole, or with training data of one's own its model alone.
        plan: the execution plan (a name or a class), where the experiment fixes one and
            ``trainer.plan`` does not count; "" for one that is not known yet.

    Raises:
        ConfigError: with all problems found.
        SystemExit: after printing the help that was asked for.
    """
    keys = Keys.of(schema)
    line = read_command_line(argv, keys)
    if line.help is not None:
        print_help(keys, line.help)
        raise SystemExit(0)
    for note in line.notes:
        log.warning(note)
    problems = list(line.problems)
    settings, explicit = _layers(line, default_config, keys, problems)
    config = _merge(schema, settings, keys, problems)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    try:
        result = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:  # a reference inside a free mapping that leads nowhere
        raise ConfigError([f"{error.full_key}: {_broken_reference(error)}"]) from None
    assert isinstance(result, schema)
    if isinstance(result, Config):
        chosen = result.trainer.plan if plan is None else plan
        explicit_paths = {path for path, of_plan in explicit if of_plan in (None, chosen)}
        try:
            contradictions = check_config(result, plan=plan, given=explicit_paths)
        except UserError as error:  # of a file that a setting names
            contradictions = [str(error)]
        if contradictions:
            raise ConfigError(contradictions)
    vars(result)[_ORIGINS] = {s.path: s.where.removesuffix(": ") or COMMAND_LINE for s in settings}
    return result


def origins(config: object) -> dict[str, str]:
    """Who has set what: key -> ``COMMAND_LINE``, a file and its line, ``preset NAME``, ``RECIPE``
    (default_config)."""
    return dict(vars(config).get(_ORIGINS, {}))


def parse_or_exit(
    argv: Sequence[str] | None = None,
    *,
    schema: type[C] = Config,  # type: ignore[assignment]
    default_config: Path | None = None,
    plan: str | type | None = None,
) -> C:
    """``load_config`` for a program's first line: problems are printed to stderr and end it with
    status 2.

    ``argv`` are by default the arguments of the process; the others are as for ``load_config``.
    """
    try:
        arguments = sys.argv[1:] if argv is None else argv
        return load_config(arguments, schema=schema, default_config=default_config, plan=plan)
    except UserError as error:
        exit_with(error)


def exit_with(error: UserError) -> NoReturn:
    """Print a user's error, one line per problem, and leave with status 2."""
    for problem in str(error).splitlines():
        print(f"error: {problem}", file=sys.stderr)
    raise SystemExit(2)


def dump_config(config: Config, *, secrets: bool = True) -> str:
    """The whole configuration as YAML, in the schema's order; ``--config`` on it gives an equal
    object.

    Args:
        secrets: False writes ``***`` for every secret, and ``${oc.env:NAME}`` for a secret variable
            of the environment.
    """
    variables = Secrets() if secrets else Secrets.of()

    def plain(value: object) -> object:
        """Only what YAML can hold; text that OmegaConf would take for a reference is escaped."""
        if isinstance(value, dict):
            return {name: plain(entry) for name, entry in value.items()}
        if isinstance(value, list | tuple):
            return [plain(entry) for entry in value]
        if isinstance(value, enum.Enum):
            return value.name
        if isinstance(value, str):
            return variables.refer(escape(value))
        return value

    groups = dataclasses.asdict(config)
    if not secrets:
        groups = hidden(groups, variables=Secrets())  # secret variables become references instead
    shown = {name: plain(group) for name, group in groups.items()}
    return OmegaConf.to_yaml(OmegaConf.create(shown))


def _layers(
    line: CommandLine, default_config: Path | None, keys: Keys, problems: list[str]
) -> tuple[list[TypedSetting], set[tuple[str, str | None]]]:
    """All settings in the order in which they apply; and the keys that the user has chosen, with
    the plan they are for.

    A file that names most keys is a configuration that was dumped: its user has not chosen them one
    by one. A key of a file is for the plan that the file names, if it names one.
    """
    on_line = {assignment.path for assignment in line.assignments}
    chosen: set[tuple[str, str | None]] = {(path, None) for path in on_line}

    def typed(assignments: Sequence[Assignment]) -> list[TypedSetting]:
        settings = []
        for assignment in assignments:
            path = assignment.path
            where = assignment.where
            key = keys.holder(path)
            if path in keys.groups:
                problems.append(
                    f"{where}{path} is a group, not a key: set one of its keys, see --help {path}"
                )
            elif key is None:
                problems.append(where + unknown_key(path, keys, free(assignment.node), line.given))
            else:
                is_key = path == key.path  # else an entry of a free mapping, which may be anything
                try:
                    value = convert(assignment.node, key.type if is_key else Any)
                    if (
                        isinstance(value, str)
                        and is_key
                        and _takes_one_text(key)
                        and not _of_list(value, keys)
                    ):
                        value = [value]  # it has references, which is why it is no list yet
                    settings.append(TypedSetting(path, value, where))
                except WrongTypeError as error:
                    if key.choices:
                        allowed = f" (allowed: {', '.join(map(written, key.choices))})"
                    else:
                        allowed = ""
                    problems.append(
                        f"{where}{path}: {error}{allowed}{_hint(path, free(assignment.node))}"
                    )
        # A free mapping as a whole comes before its entries, whatever their order.
        return sorted(settings, key=lambda setting: setting.path not in keys)

    default: list[TypedSetting] = []
    if default_config and not line.files and MODEL_KEY not in on_line:
        for setting in typed(read_file(default_config, keys, problems)):
            if DATA_KEY not in on_line or setting.path == MODEL_KEY:
                default.append(dataclasses.replace(setting, where=RECIPE))
    explicit: list[TypedSetting] = []
    for file in line.files:
        settings = typed(read_file(file, keys, problems))
        if 2 * len(settings) < len(keys.by_path):
            plan = next(
                (str(setting.value) for setting in settings if setting.path == PLAN_KEY), None
            )
            chosen |= {(setting.path, plan) for setting in settings}
        explicit += settings
    explicit += typed(line.assignments)

    preset: list[TypedSetting] = []
    presets = [setting.value for setting in default + explicit if setting.path == PRESET_KEY]
    if PRESET_KEY in keys and (name := presets[-1] if presets else keys[PRESET_KEY].default):
        from skyasync.algorithms.presets import apply_preset

        try:
            values = apply_preset(name)
            preset = typed(
                [Assignment(path, from_python(v), f"preset {name}: ") for path, v in values.items()]
            )
        except UserError as error:
            problems.append(f"{PRESET_KEY}={name}: {error}")
    return default + preset + explicit, chosen


def _takes_one_text(key: Key) -> bool:
    """Whether a text is accepted as a list of one."""
    try:
        return convert(parse("text"), key.type) == ["text"]
    except WrongTypeError:
        return False


def _of_list(text: str, keys: Keys) -> bool:
    """Whether a text is a reference to a list, and nothing else."""
    reference = re.fullmatch(r"\$\{([\w.]+)\}", text)
    return (
        reference is not None
        and reference[1] in keys
        and get_origin(keys[reference[1]].type) is list
    )


@functools.lru_cache(maxsize=8)
def _defaults(schema: type) -> DictConfig:
    """Made once for each schema: a copy takes a seventh of the time."""
    config = OmegaConf.structured(schema)
    OmegaConf.set_struct(config, True)
    return config


def _merge(
    schema: type, settings: Sequence[TypedSetting], keys: Keys, problems: list[str]
) -> DictConfig:
    """The settings over the defaults. All that are set are checked: bounds, choices and names; a
    default is right."""
    config = copy.deepcopy(_defaults(schema))
    for setting in settings:
        holder = keys.holder(setting.path)
        try:
            if (
                holder
                and holder.path != setting.path
                and OmegaConf.select(config, holder.path) is None
            ):
                # the first entry of a mapping that was null
                OmegaConf.update(config, holder.path, {})
            OmegaConf.update(
                config, setting.path, setting.value, merge=False, force_add=setting.path not in keys
            )
        except OmegaConfBaseException as error:
            problems.append(f"{setting.where}{setting.path}: {_broken_reference(error)}")
    for path, where in {
        setting.path: setting.where for setting in settings if setting.path in keys
    }.items():
        key = keys[path]
        try:
            value = OmegaConf.select(config, path, throw_on_resolution_failure=True)
            if OmegaConf.is_list(value):
                elements = list(value)
            else:
                elements = [value]
        except OmegaConfBaseException as error:
            problems.append(f"{where}{path}: {_broken_reference(error)}")
            continue
        for element in elements if value != key.default else ():
            problem = key.problem(element)
            if problem:
                # an own value that says more than another framework's
                more_exact = f"did you mean '{element}_"
                if more_exact in problem:
                    hint = ""
                else:
                    hint = _hint(path, element)
                problems.append(f"{where}{path}={written(element)}: {problem}{hint}")
    last_values = {setting.path: setting.value for setting in settings}
    for key in keys:
        if last_values.get(key.path, key.default) == MISSING:
            problems.append(f"{key.path} has no value and no default: write {key.path}=VALUE")
    return config


def _hint(path: str, value: Value) -> str:
    """Our value for a wrong one, if another framework has that."""
    hint = other_frameworks().value_hint(path, value)
    if hint:
        return f"; {hint}"
    return ""


def _broken_reference(error: OmegaConfBaseException) -> str:
    """OmegaConf's message, its first line; with types already right, only a ``${reference}`` can be
    wrong."""
    first_line = str(error).partition("\n")[0]
    return f"{first_line} (a literal ${{ is written \\${{)"

"""``environment.judges``: language models that judge responses. Each is a reward function by the
name ``judge:NAME``.

Invariant: what ``judges_of`` reads without complaint has been found right by ``check_judges``; a
key for a server is never here, only the name of the environment variable that holds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any
from urllib.parse import urlsplit

from skyasync.config.keys import Keys, entry_problem, key
from skyasync.config.schema.environment import EnvironmentConfig, check_domains, judges
from skyasync.config.values import written
from skyasync.errors import unknown

PREFIX = "judge:"
PARSERS = ("yes_no", "score")
PLACEHOLDER = re.compile(r"\{\{([A-Za-z_][\w.]*)\}\}|\{([A-Za-z_][\w.]*)\}")
# the placeholders, one of which shows what is to be judged
RESPONSES = (
    "response",
    "final_response",
)
_WHERE = "environment.judges"
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_REFERENCE = re.compile(r"(\S+\.py|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")
#: The default: whether an answer that is known was given.
PROMPT = """\
Is the response to this question right? It is right if its final answer means the same as the right answer, however it \
is written.

Question:
{question}

Right answer:
{ground_truth}

Response:
{final_response}

Answer with one word, yes or no."""


@dataclass(frozen=True)
class JudgeConfig:
    """One judge: a model behind an address, or the run's own engines."""

    base_url: str = key("")
    """Address of a server in OpenAI's form, `http://host:8000/v1`; or else `engine`."""
    model: str = key("")
    """The model's name at the server; needed with `base_url`."""
    api_key_env: str = key("")
    """The environment variable that contains the server's key; empty: no key."""
    engine: str = key("", choices=("", "policy"))
    """`policy`: the run's engines grade, with their current weights."""
    prompt: str = key(PROMPT)
    """The question, a file or text with placeholders in braces."""
    system_prompt: str = key("")
    """A system message before the question."""
    parser: str = key("yes_no")
    """How the answer is read: `yes_no`, `score`, a regular expression, `file.py:function`."""
    offset: float = key(0.0)
    """Subtracted from the grade."""
    scale: float = key(1.0)
    """Factor of the difference."""
    clip: list[float] = key([])
    """Bounds of the result, `[low, high]`."""
    temperature: float = key(0.0, low=0.01, high=2.0, also=(0.0,))
    """Sampling temperature of the judge."""
    max_tokens: int = key(512, low=1)
    """Maximum number of tokens of its answer, thinking included."""
    extra_body: dict[str, Any] = key({})
    """Further fields of the request; `null` removes one (`max_tokens: null`)."""
    timeout_s: float = key(60.0, above=0.0)
    """Seconds for one answer."""
    retries: int = key(6, low=0)
    """Further attempts, with pauses of 1, 2, 4, ... 30 s between them."""
    max_concurrent: int = key(64, low=1)
    """Maximum number of concurrent questions."""
    cache: bool = key(True)
    """Reuse the answers to questions asked before (not with `engine`, whose weights change)."""


def judges_of(mapping: Mapping[str, Any]) -> dict[str, JudgeConfig]:
    """The checked mapping as objects, by the names in it."""
    return {str(name): JudgeConfig(**entry) for name, entry in mapping.items()}


def is_judge(func: str) -> bool:
    """Whether a reward function's name is a judge's."""
    return func.startswith(PREFIX)


def is_reference(parser: str) -> bool:
    """Whether a parser is a function's, not a regular expression."""
    return bool(_REFERENCE.fullmatch(parser))


def is_text(prompt: str) -> bool:
    """Whether a prompt is the text itself, not a file's name."""
    return "{" in prompt or "\n" in prompt


def check_judges(environment: EnvironmentConfig) -> Iterator[str]:
    """The problems of the judges, one line each."""
    mapping = environment.judges
    for name, entry in mapping.items():
        yield from _problems(f"{_WHERE}.{name}", str(name), entry)
    if any(check_domains(environment.domains)):
        return  # which is told where they are checked
    for func in judges(environment):
        name = func.removeprefix(PREFIX)
        if is_judge(func) and name not in mapping:
            if mapping:
                names = unknown("judge", name, map(str, mapping))
            else:
                names = f"there is no judge {name!r}"
            yield f"{names}: {func} needs {_WHERE}.{name}.base_url (and model), or {_WHERE}.{name}.engine=policy"


def _problems(where: str, name: str, entry: object) -> Iterator[str]:
    if not _NAME.fullmatch(name):
        yield f"{where}: a judge's name has letters, digits, _ and - only"
        return
    if not isinstance(entry, Mapping):
        yield f"{where} must be a mapping with base_url and model, or engine, found {entry!r}"
        return
    problems = []
    for field_name, value in entry.items():
        numbers = isinstance(value, list) and all(
            type(n) in (int, float) and isfinite(n) for n in value
        )
        interval = isinstance(value, list) and numbers and len(value) == 2 and value[0] < value[1]
        if field_name in ("api_key", "key", "token"):  # whose value is not to be repeated
            problem = ": write no key into a configuration; name the environment variable that holds it, api_key_env"
        elif field_name == "clip" and value != [] and not interval:
            problem = f": expected [low, high], two numbers, found {value!r}"
        elif (
            field_name == "api_key_env"
            and isinstance(value, str)
            and not re.fullmatch(r"([A-Za-z_]\w*)?", value)
        ):
            problem = " is not the name of an environment variable (is it the key itself? Put that into a variable)"
        else:
            problem = entry_problem(JudgeConfig, str(field_name), value)
        if problem:
            problems.append(f"{where}.{field_name}{problem}")
    yield from problems
    if problems:
        return

    judge = JudgeConfig(**entry)
    if judge.base_url and judge.engine:
        yield f"{where} has both base_url and engine: remove one of them"
    elif judge.base_url:
        url = urlsplit(judge.base_url)
        key = f"{where}.base_url"
        if url.username or url.password or url.query:
            yield f"{key} has a name or a key in it, which would be written down: put it into api_key_env's variable"
        elif url.scheme not in ("http", "https") or not url.hostname:
            yield f"{key}={judge.base_url}: expected http://HOST:PORT/v1 or https://HOST/v1"
        elif url.path.rstrip("/").endswith("/completions"):
            yield f"{key}={judge.base_url}: leave out /chat/completions, which is added"
        if not judge.model:
            yield f"{where}.model is empty: say what the server calls its model"
    elif judge.engine:
        for name in ("model", "api_key_env", "extra_body", "timeout_s", "retries", "cache"):
            value = vars(judge)[name]
            if value != vars(JudgeConfig())[name]:
                yield f"{where}.{name}={written(value)} has no effect with engine=policy: it is read with base_url"
    else:
        yield (
            f"{where} needs base_url (with model) for a server in OpenAI's form, or engine=policy for the run's own "
            f"engines"
        )
    if is_text(judge.prompt):
        yield from (f"{where}{problem}" for problem in shows_response(judge.prompt))
    parser = judge.parser
    if re.fullmatch(r"([A-Za-z_]\w*)?", parser) and parser not in PARSERS:
        answer = unknown("parser", parser, [*PARSERS, "a regular expression", "file.py:function"])
        yield f"{where}.parser{'' if parser else ' is empty'}: {answer}"
        return
    if parser not in PARSERS and not is_reference(parser):
        yield from (f"{where}.parser{problem}" for problem in pattern_problems(parser, "result"))
    if judge.scale == 0.0:
        yield f"{where}.scale=0 makes every result the same: it is a factor"


def pattern_problems(pattern: str, owner: str) -> Iterator[str]:
    """The problem of a regular expression that finds a ``what`` in a text, to follow its key's
    path."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield f"={pattern} is not a regular expression: {error}"
        return
    if groups > 1:
        yield f"={pattern} has {groups} groups: one, around the {owner}, or none"


def shows_response(prompt: str) -> Iterator[str]:
    """The problem of a prompt's text, to follow its judge's path."""
    if not set(placeholders(prompt)) & set(RESPONSES):
        yield ".prompt does not show the judge the response: put {response} (or {final_response}) where it belongs"


def placeholders(prompt: str) -> list[str]:
    """The names in braces, in order; a name in double braces is text."""
    return [name for _, name in PLACEHOLDER.findall(prompt) if name]


def table() -> str:
    """The settings of a judge as rows of Markdown."""
    rows = []
    for setting in Keys.of(JudgeConfig):
        if setting.name == "prompt":
            shown = "yes or no, see below"
        else:
            shown = f"`{written(setting.default)}`"
        rows.append(f"| `{setting.name}` | {shown} | {setting.doc} |")
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows]) + "\n"

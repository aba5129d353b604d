"""What is written down of keys and passwords: ``***``.

Invariant: a value is hidden if its name, in the configuration or among the environment's variables,
is a secret's, or if it is the password of an address. A value from such a variable
(``${oc.env:NAME}``) is hidden under any key. What is hidden in the configuration is hidden in text
too, if it is long enough to differ from a word.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from skyasync.config.schema import Config

HIDDEN = "***"
SHORTEST = 8  # characters of what is looked for in text
_NAME = re.compile(
    r"((api|access|private|secret)[_-]?key|((access|api|auth|bearer|hf|refresh|session)[_-]?|^)token|secret|"
    r"passw(or)?d|passphrase|credentials?|authorization)$",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH(?!OR)", re.IGNORECASE)
# characters; what is shorter and has no digit may be a word (TOKENIZERS_BACKEND=huggingface)
LONG = 20
_PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^/\s:@]*:)[^@/\s]+(?=@)", re.IGNORECASE)
_QUERY = re.compile(
    r"([?&][^=&\s]*(?:key|token|secret|password|signature)=)[^&\s\"']+", re.IGNORECASE
)


def is_secret(name: str) -> bool:
    """Whether a setting of this name holds a secret: ``api_key`` does, ``api_key_env`` and
    ``max_tokens`` do not."""
    return _NAME.search(name) is not None


def hidden(value: Any, name: str = "", variables: Secrets | None = None) -> Any:  # noqa: ANN401  (of a configuration)
    """A copy of a part of the configuration without its secrets.

    Args:
        name: the key's own.
        variables: the secrets of the environment, by default of this process.
    """
    if variables is None:
        variables = Secrets.of()
    if isinstance(value, Mapping):
        return {key: hidden(entry, str(key), variables) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [hidden(entry, name, variables) for entry in value]
    if isinstance(value, str) and value:
        if is_secret(name):
            return HIDDEN
        return variables.hide_all(value)
    return value


def without_passwords(text: str) -> str:
    """The text without passwords and query tokens in its addresses."""
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\g<1>{HIDDEN}", _PASSWORD.sub(rf"\g<1>{HIDDEN}", text))


class Secrets:
    """Texts that no file and no terminal of a run may show.

    Args:
        values: those too short to be told from a word are left out.
        variables: of values that are variables of the environment, the variable's name.
    """

    def __init__(
        self, values: Collection[str] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        self._values = sorted(
            {value for value in values if len(value) >= SHORTEST}, key=len, reverse=True
        )
        self._variables = variables or {}

    @classmethod
    def of(cls, cfg: Config | None = None, environment: Mapping[str, str] = os.environ) -> Secrets:
        """The secrets of the configuration and of the environment."""
        values = []
        variables = {}
        for name, text in environment.items():
            # Not a path (of an agent's socket), a number or a word.
            if (
                not _VARIABLE.search(name)
                or text.startswith("/")
                or text.isdigit()
                or any(map(str.isspace, text))
            ):
                continue
            if is_secret(name) or len(text) >= LONG or any(map(str.isdigit, text)):
                values.append(text)
                variables[text] = name
        if cfg is not None:
            values += [
                text for path, text in _texts(asdict(cfg)) if is_secret(path.rpartition(".")[2])
            ]
            judges = cfg.environment.judges.values()
            values += [environment.get(str(judge.get("api_key_env") or ""), "") for judge in judges]
        return cls(values, variables)

    def hide(self, text: str) -> str:
        for value in self._values:
            if value in text:
                text = text.replace(value, HIDDEN)
        return text

    def refer(self, text: str) -> str:
        """The text with ``${oc.env:NAME}`` for the secret variables in it: as a configuration it
        can be read again."""
        for value in self._values:
            if value in text and value in self._variables:
                text = text.replace(value, f"${{oc.env:{self._variables[value]}}}")
        return text

    def hide_all(self, text: str) -> str:
        """As ``hide``; also hides the passwords of addresses."""
        return without_passwords(self.hide(text))


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:  # noqa: ANN401  (what a configuration holds)
    """All texts, each with the key that it belongs to."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _texts(entry, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts(entry, path)
    elif isinstance(value, str):
        yield path, value


def check_hidden(cfg: Config) -> Iterator[str]:
    """Values that were hidden when they were written down: a run cannot use these."""
    for path, text in _texts(asdict(cfg)):
        secret = text == HIDDEN and is_secret(path.rpartition(".")[2])
        if secret or f":{HIDDEN}@" in text or (f"={HIDDEN}" in text and "://" in text):
            yield f"{path} is a secret that a run's config.yaml does not hold ({HIDDEN}): give it again"

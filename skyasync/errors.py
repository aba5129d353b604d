"""Errors that a user can correct: one line with the value found, the allowed ones, the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 400  # characters of a headline: a few lines of a terminal
# The beginnings of notes that errors of user code get.
WHILE_PLAYING = "while playing the episode"
RAISED_BY = "raised by reward function"


class UserError(Exception):
    """Bad input from the user. The command line prints its message alone, without a traceback."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, from a scheduler or a machine that shuts down.

    It ends a run as Ctrl-C does, with a time limit.
    """


class RayEndedError(RuntimeError):
    """One of Ray's own processes has ended, so the run cannot continue."""


class NonFiniteError(RuntimeError):
    """A loss, gradient or reward is NaN or infinite; the weights have not been changed by it."""


class NonFiniteRewardError(UserError, ValueError):
    """A reward is NaN or infinite; the message names its function or environment."""


class TransientError(Exception):
    """Raised by an environment, tool, reward function or agent program: another try may succeed.

    A step that raises it must have changed nothing: it is called again with the same action.
    """


class MissingExtraError(UserError):
    """An optional package is not installed; the message has the command that adds it."""

    def __init__(self, requirer: str, extra: str) -> None:
        super().__init__(
            f'{requirer} is not installed; add it with: uv pip install "skyasync[{extra}]"'
        )


class MissingVLLMError(MissingExtraError):
    """vLLM is not installed; there are two packages of it."""

    def __init__(self, requirer: str = "vLLM") -> None:
        # Not the base class's __init__, which names one package.
        UserError.__init__(
            self,
            f'{requirer} is not installed; add it with: uv pip install "skyasync[vllm]" '
            f'(with a GPU), or in a clone of the repository "skyasync[cpu]" (without)',
        )


def headline(error: BaseException) -> str:
    """One line about an error, which may be of another process.

    It has the type and message of the first cause, the reward function and the episode.
    """
    original = error
    cause = getattr(original, "cause", None)  # of Ray's errors, which wrap those of other processes
    while isinstance(cause, BaseException):
        original = cause
        cause = getattr(original, "cause", None)
    lines = [line.strip() for line in str(original).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}..."
    kind = type(original).__name__
    if isinstance(original, UserError) and text:
        facts = [text]
    elif text:
        facts = [f"{kind}: {text}"]
    else:
        facts = [kind]
    for note in vars(original).get("__notes__", ()):
        if note.startswith((RAISED_BY, WHILE_PLAYING)):
            facts.append(note)
    return ", ".join(facts)


def nearest(name: str, options: Iterable[str], count: int = 3) -> list[str]:
    """The options most similar to ``name``, best first; may be empty."""
    return difflib.get_close_matches(name, list(options), n=count, cutoff=0.5)


def unknown(kind: str, name: str, options: Iterable[str]) -> str:
    """One line for a name that is not among ``options``: the name, the nearest, all options."""
    options = sorted(options)
    close = nearest(name, options)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"unknown {kind} {name!r}: {hint}allowed: {', '.join(options)}"

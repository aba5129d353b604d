"""Errors a user can act on: one line that says what was found, what is allowed, and the nearest
name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 400  # characters of a headline
WHILE_PLAYING = "while playing the episode"  # begins the note of an error in one
RAISED_BY = "raised by reward function"  # begins the note of its error


class UserError(Exception):
    """Bad input from the user. The command line prints its message alone, without a traceback."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, from a scheduler or a machine that shuts down: as Ctrl-C, with a time limit and a
    message of its own."""


class RayEndedError(RuntimeError):
    """One of Ray's own processes has ended, so the run cannot continue."""


class NonFiniteError(RuntimeError):
    """A loss, gradient or reward is NaN or infinite; the weights have not been changed by it."""


class NonFiniteRewardError(UserError, ValueError):
    """A reward is NaN or infinite; the message says whose."""


class TransientError(Exception):
    """Raised by an environment, a tool, a reward or an agent program: the same call may well
    succeed later.

    A step that raises it must have changed nothing: it is called again with the same action.
    """


class MissingExtraError(UserError):
    """An optional package is not installed; the message carries the command that adds it, and keeps
    all others."""

    def __init__(self, requirer: str, extra: str) -> None:
        super().__init__(
            f'{requirer} is not installed; add it with: uv pip install "skyasync[{extra}]"'
        )


class MissingVLLMError(MissingExtraError):
    """vLLM is not installed; there are two packages of it."""

    def __init__(self, requirer: str = "vLLM") -> None:
        UserError.__init__(
            self,
            f'{requirer} is not installed; add it with: uv pip install "skyasync[vllm]" (with a GPU), or in a clone of the '
            f'repository "skyasync[cpu]" (without)',
        )


def headline(error: BaseException) -> str:
    """One line about an error, perhaps of another process: the first cause's kind and message, the
    reward function and the episode."""
    seen = error
    while isinstance(
        cause := getattr(seen, "cause", None), BaseException
    ):  # Ray's errors carry the original
        seen = cause
    lines = [line.strip() for line in str(seen).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}..."
    kind = type(seen).__name__
    if isinstance(seen, UserError) and text:
        summary = text
    elif text:
        summary = f"{kind}: {text}"
    else:
        summary = kind
    notes = (
        note
        for note in vars(seen).get("__notes__", ())
        if note.startswith((RAISED_BY, WHILE_PLAYING))
    )
    return ", ".join([summary, *notes])


def nearest(name: str, options: Iterable[str], count: int = 3) -> list[str]:
    """The options most similar to ``name``, best first; may be empty."""
    return difflib.get_close_matches(name, list(options), n=count, cutoff=0.5)


def unknown(kind: str, name: str, options: Iterable[str]) -> str:
    """One line for a name that is not among ``options``: what was found, the nearest, what is
    allowed."""
    options = sorted(options)
    close = nearest(name, options)
    if close:
        hint = f"did you mean {' or '.join(repr(c) for c in close)}? "
    else:
        hint = ""
    return f"unknown {kind} {name!r}: {hint}allowed: {', '.join(options)}"

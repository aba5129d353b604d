"""The nearest right key for a wrong one.

Invariant: one line, and every key it names exists.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from skyasync.config.keys import Keys
from skyasync.config.values import Value
from skyasync.other_frameworks import UNKNOWN, other_frameworks

#: Below this similarity a key is no help.
_CUTOFF = 0.6
#: Candidates this close to the best are worth naming too.
_MARGIN = 0.03


def unknown_key(path: str, keys: Keys, value: object = UNKNOWN, given: Mapping[str, Value] | None = None) -> str:
    """What to say about a key that the schema does not have.

    Args:
        value: what it was set to, if that is known.
        given: everything that was set, by anyone's keys.
    """
    start = f"unknown key {path!r}"
    defaults = {key.path: key.default for key in keys}
    hint = other_frameworks().key_hint(path, value, given or {}, defaults if given is not None else {})
    if hint:
        return f"{start}: {hint}{_our_own(path, hint, keys)}"
    parent = _parent_key(path, keys)
    if parent:
        return f"{start}: {parent} is a value, not a group; write {parent}=VALUE"
    close = nearest_keys(path, keys)
    if close:
        return f"{start}: did you mean {' or '.join(close)}?"
    group = _known_group(path, keys)
    return f"{start}: see --help {group}" if group else f"{start}: see --help for all keys"


def _our_own(path: str, hint: str, keys: Keys) -> str:
    """Keys of ours of the same name that mean something else."""
    own = [key.path for key in keys if key.path.endswith(f".{path}")]
    if not own or any(name in hint for name in own):
        return ""
    return f"; {' and '.join(own)} {'are other keys' if own[1:] else 'is another key'}"


def nearest_keys(path: str, keys: Keys, count: int = 2) -> list[str]:
    """The most similar keys, best first: by the whole path, or by its last part wherever that may live.

    Keys that take another to be read are not named beside one that is always read.
    """
    scored = sorted(((_similarity(path, key.path), key.path) for key in keys), key=lambda pair: -pair[0])
    best = scored[0][0] if scored else 0.0
    close = [candidate for score, candidate in scored[:count] if score >= max(_CUTOFF, best - _MARGIN)]
    always = [path for path in close if not keys[path].when]
    return always if always[:1] == close[:1] else close


def _similarity(path: str, candidate: str) -> float:
    whole = _ratio(path, candidate)
    last, candidate_last = path.rpartition(".")[2], candidate.rpartition(".")[2]
    if last == candidate_last:
        return 1.0 + whole
    if set(last.split("_")) < set(candidate_last.split("_")):
        return 0.7 + 0.2 * whole
    # Mostly the last part: long common groups would make strangers look alike.
    return 0.75 * _ratio(last, candidate_last) + 0.25 * whole


def _ratio(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()


def _parent_key(path: str, keys: Keys) -> str:
    parts = path.split(".")
    prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
    return next((prefix for prefix in prefixes if prefix in keys), "")


def _known_group(path: str, keys: Keys) -> str:
    parts = path.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in keys.groups), "")

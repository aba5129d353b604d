"""Conditions under which keys are read: the check and the help text agree."""

from __future__ import annotations

from operator import attrgetter

from hypothesis import given
from hypothesis import strategies as st

from skyasync.config import Config
from skyasync.config.keys import Key, Keys, When
from skyasync.config.values import written

KEYS = Keys.of(Config)
CONDITIONS = list({key.when: None for key in KEYS if key.when and not key.when.choices})


def holds(text: str, cfg: Config) -> bool:
    """Whether an alternative holds, in the notation of help: ``a.b``, ``a.b=c|d``, ``not a.b``."""
    path, _, values = text.removeprefix("not ").partition("=")
    value = attrgetter(path)(cfg)
    return (written(value) in values.split("|") if values else bool(value)) is not text.startswith(
        "not "
    )


def some(key: Key) -> object:
    """Another value than the default."""
    if isinstance(key.default, bool):
        return not key.default
    if options := key.options():
        return next(option for option in reversed(options) if option != key.default)
    return {str: "x", int: 1, float: 1.0}.get(
        key.type, ["x"] if isinstance(key.default, list) else {"x": 1}
    )


@given(st.sampled_from(CONDITIONS), st.data())
def test_a_condition_is_what_help_says_of_it(condition: When, data: st.DataObject) -> None:
    cfg = Config()
    for path in condition.paths:
        key = KEYS[path]
        value = data.draw(st.sampled_from([key.default, some(key), *key.options()]))
        setattr(attrgetter(key.group)(cfg), key.name, value)
    assert condition(cfg) is any(holds(text, cfg) for text in condition.alternatives)


def test_conditions_name_keys_that_exist() -> None:
    assert {path for key in KEYS if key.when for path in key.when.paths} <= KEYS.by_path.keys()

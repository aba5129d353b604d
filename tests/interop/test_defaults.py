"""Defaults of other frameworks, as their own sources have them: each that differs from ours is translated.

``*/defaults.tsv`` holds what the sources say: a key, its default and, if that is not carried over, the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from skyasync.config.keys import Keys
from skyasync.config.schema import Config
from skyasync.config.values import Value, value_of
from skyasync.interop.conversion import ConversionContext, NoCounterpartError, converted
from skyasync.interop.recipe import SourceRecipe
from skyasync.interop.system import TableRow, systems
from skyasync.interop.translation import translated

HERE = Path(__file__).parent
DERIVED = sorted(file.parent.name for file in HERE.glob("*/defaults.tsv"))
KEYS = Keys.of(Config)


@dataclass(frozen=True)
class Default:
    """A key of a framework with its default there; ``reason`` is why it is not carried over."""

    key: str
    value: Value
    reason: str


def defaults(system: str) -> list[Default]:
    lines = (HERE / system / "defaults.tsv").read_text().splitlines()
    found = []
    for line in lines[1:]:
        key, value, *reason = line.split("\t")
        found.append(Default(key, value_of(value), "".join(reason)))
    return found


def carries(row: TableRow, default: Default, context: ConversionContext) -> bool:
    """Whether a recipe without the key gets here what it has there."""
    if row.default:
        return value_of(row.default) == default.value
    try:
        settings = converted(row, default.value, context) or {}
    except NoCounterpartError:
        return False
    return all(path in KEYS and KEYS[path].default == value for path, value in settings.items())


@pytest.mark.parametrize("system", DERIVED)
def test_a_default_that_differs_from_ours_is_translated_or_has_a_reason(system: str) -> None:
    table, known = systems()[system].table, defaults(system)
    context = ConversionContext(
        {}, {d.key: d.value for d in known}, {key.path: key.default for key in KEYS}
    )
    wrong, needless = [], []
    for default in known:
        row = table.find(default.key)
        assert row is not None, default.key
        carried = carries(row, default, context)
        if not carried and not default.reason:
            wrong.append((default.key, default.value, row.default))
        if carried and default.reason:
            needless.append(default.key)
    assert wrong == []
    assert needless == [], "reasons for defaults that are carried over"


@pytest.mark.parametrize("system", DERIVED)
def test_the_defaults_of_a_table_are_those_of_the_source(system: str) -> None:
    known = {default.key for default in defaults(system)}
    rows = [row for row in systems()[system].table.rows if row.kind == "key" and row.default]
    assert [row.names for row in rows if not known.intersection(row.names)] == []


@pytest.mark.slow
@pytest.mark.parametrize("system", DERIVED)
def test_a_default_is_in_the_translation_unless_it_is_ours(system: str) -> None:
    """Those that nothing reads without another setting may be missing."""
    text = translated(SourceRecipe({}), system)
    title = systems()[system].title
    assert f"# {title}'s default" in text
    expected = {
        "openrlhf": [
            "warmup_ratio: 0.03",
            "scheduler: cosine_with_min_lr",
            "adam_betas: [0.9, 0.95]",
        ],
        "skyrl": ["off_policy_correction: none", "use_kl_loss: true", "weight_decay: 0.01"],
        "roll": ["scheduler: linear", "loss_reduction: sequence_mean", "top_p: 0.7"],
        "verl": ["dtype: bfloat16", "policy_loss_type: dual_clip", "off_policy_correction: none"],
        "trl": ["dtype: bfloat16", "scheduler: linear", "epochs: 3", "off_policy_correction: none"],
        "areal": ["warmup_ratio: 0.001", "ratio_anchor: behaviour", "off_policy_correction: none"],
    }
    assert [line for line in expected[system] if line not in text] == []

"""Presets named after a framework have its defaults, or those of one of its recipes."""

import pytest

from skyasync.algorithms.presets import apply_preset
from skyasync.config import Config, load_config
from skyasync.config.keys import Keys
from skyasync.config.values import free, parse
from skyasync.interop.conversion import ConversionContext, NoCounterpartError, converted
from skyasync.interop.system import systems

KEYS = Keys.of(Config)
A = "trainer.algorithm."
#: The subject of a preset, which its framework does only on request.
OF_THE_RECIPE = {
    "skyrl": set(),
    "openrlhf_async": {f"{A}advantage_estimator", f"{A}off_policy_correction", f"{A}use_kl_loss",
                       f"{A}kl_estimator_type", f"{A}kl_loss_coef"},
    "areal": {f"{A}policy_loss_type", f"{A}advantage_estimator"},
    "roll_ppo": {f"{A}advantage_estimator"},
    "roll_tis": {f"{A}advantage_estimator", f"{A}policy_loss_type"},
    "roll_cispo": {f"{A}advantage_estimator", f"{A}policy_loss_type"},
}  # fmt: skip


def defaults(system: str) -> dict[str, object]:
    found: dict[str, object] = {}
    context = ConversionContext(defaults={key.path: key.default for key in KEYS})
    for row in systems()[system].table.rows:
        if row.default and row.kind == "key":
            try:
                settings = converted(row, free(parse(row.default)), context) or {}
            except NoCounterpartError:
                continue
            for path, value in settings.items():
                found.setdefault(path, value)
    return found


@pytest.mark.parametrize("preset", OF_THE_RECIPE)
def test_a_preset_of_a_system_has_the_system_s_defaults(preset: str) -> None:
    theirs = defaults(preset.partition("_")[0])
    own = apply_preset(preset)
    shared = {path for path in own if path in theirs} - OF_THE_RECIPE[preset]
    assert shared
    assert {path: own[path] for path in shared} == {path: theirs[path] for path in shared}


@pytest.mark.parametrize("preset", OF_THE_RECIPE)
def test_a_preset_of_a_system_loads(preset: str) -> None:
    assert load_config([f"trainer.algorithm.preset={preset}"]).trainer.algorithm.preset == preset

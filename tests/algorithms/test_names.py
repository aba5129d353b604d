"""Names: tables and decorators agree, defaults agree, presets exist, and errors need no torch."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from skyasync import algorithms
from skyasync.algorithms import (
    ADVANTAGE_ESTIMATORS,
    CORRECTIONS,
    KL_ESTIMATORS,
    LOSS_REDUCTIONS,
    POLICY_LOSSES,
)
from skyasync.algorithms.binding import parameters, setting
from skyasync.algorithms.objective import Objective
from skyasync.algorithms.presets import PRESETS, apply_preset
from skyasync.config.schema import Config
from skyasync.config.schema.algorithm import AlgorithmConfig
from skyasync.errors import UserError
from skyasync.registry import Registry

REGISTRIES = {name: getattr(algorithms, name) for name in algorithms.__all__}
FUNCTIONS = [(name, key) for name, registry in REGISTRIES.items() for key in registry.names()]
TENSORS = {
    "POLICY_LOSSES": {
        "current", "anchor", "proximal", "behaviour", "reference", "advantages", "mask", "entropy", "selection",
    },
    "CORRECTIONS": {"proximal", "behaviour", "advantages", "mask"},
    "ADVANTAGE_ESTIMATORS": {"rewards", "values", "mask", "group_ids", "lengths"},
    "KL_CONTROLLERS": {"value"},
    "KL_ESTIMATORS": {"current", "reference"},
    "LOSS_REDUCTIONS": {"mask", "group_ids"},
}  # fmt: skip


@pytest.mark.parametrize("registry", REGISTRIES.values(), ids=REGISTRIES)
def test_table_and_decorators_agree(registry: Registry) -> None:
    for home in registry.homes:
        importlib.import_module(home)
    assert set(registry) - set(registry.user_parts()) == set(registry.builtins())


def test_a_file_of_losses_needs_no_entry_in_a_list() -> None:
    files = Path(algorithms.__file__).with_name("losses").glob("[!_]*.py")
    assert {home.rpartition(".")[2] for home in POLICY_LOSSES.homes} == {
        file.stem for file in files
    }


@pytest.mark.parametrize(("registry", "name"), FUNCTIONS)
def test_every_function_takes_known_tensors_and_says_what_it_computes(
    registry: str, name: str
) -> None:
    function = REGISTRIES[registry][name]
    assert set(parameters(function)[0]) <= TENSORS[registry]
    assert function.__doc__


@pytest.mark.parametrize(("registry", "name"), FUNCTIONS)
def test_a_functions_defaults_are_those_of_its_keys(registry: str, name: str) -> None:
    function = REGISTRIES[registry][name]
    selectors = [function.select] if hasattr(function, "select") else []
    for part in (function, *selectors):
        keys, defaults = getattr(part, "configuration_keys", {}), parameters(part)[1]
        for parameter, key in keys.items():
            value = setting(AlgorithmConfig(), key, None)
            assert value is not None, f"{key} is no key of trainer.algorithm"
            if (name, parameter) not in PAPERS_OWN:
                assert defaults[parameter] == value, key


#: Defaults of functions that differ from the configuration's common settings.
PAPERS_OWN = {("gmpo", "eps_low"), ("gmpo", "eps_high")}


@pytest.mark.parametrize("name", PRESETS.names())
def test_a_preset_sets_existing_keys_and_makes_an_objective(name: str) -> None:
    cfg = Config()
    assert PRESETS[name].source
    for path, value in apply_preset(name).items():
        *groups, key = path.split(".")
        holder = cfg
        for group in groups:
            holder = getattr(holder, group)
        assert type(value) is type(getattr(holder, key)), path
        setattr(holder, key, value)
    objective = Objective(cfg.trainer.algorithm)
    assert objective.corrected
    assert cfg.trainer.algorithm.advantage_estimator in ADVANTAGE_ESTIMATORS.names()


def test_presets_cover_every_pg_variant_of_roll() -> None:
    losses = {
        PRESETS[n].settings["trainer.algorithm.policy_loss_type"]
        for n in PRESETS.names()
        if n.startswith("roll_")
    }
    assert losses == {"vanilla", "tis", "topr", "cispo", "kimi15", "ppo"}


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UserError, match="areal"):
        apply_preset("areall")


def test_names_are_known_without_torch() -> None:
    program = (
        "import sys, skyasync.algorithms as a, skyasync.algorithms.presets, skyasync.algorithms.shaping\n"
        "names = [n for r in a.__all__ for n in getattr(a, r).names()]\n"
        "assert 'ppo' in names and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_setting_has_a_sentence() -> None:
    def sentences(cls: type) -> list[str]:
        fields = dataclasses.fields(cls)
        nested = [f.default_factory for f in fields if dataclasses.is_dataclass(f.default_factory)]
        return [f.metadata["doc"] for f in fields if "doc" in f.metadata] + [
            s for n in nested for s in sentences(n)
        ]

    assert all(text.endswith(".") for text in sentences(AlgorithmConfig))


def test_the_names_that_recipes_rely_on_exist() -> None:
    assert {"ppo", "dual_clip", "gspo", "cispo", "sapo", "topr", "tis", "kimi15", "vanilla", "decoupled_ppo", "m2po",
            "clip_cov", "kl_cov", "dppo", "rollout_is"} <= set(POLICY_LOSSES.names())  # fmt: skip
    assert {
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce++",
        "reinforce++_baseline",
        "gae",
        "maxrl",
    } <= set(ADVANTAGE_ESTIMATORS.names())
    assert {"k1", "k2", "k3", "abs"} <= set(KL_ESTIMATORS.names())
    assert {"token_mean", "sequence_mean", "prompt_mean", "seq_mean_token_sum_norm"} <= set(
        LOSS_REDUCTIONS.names()
    )
    assert {"token_tis", "icepop", "sequence_mask_tis", "geometric_mask", "outlier_mask"} <= set(
        CORRECTIONS.names()
    )


def test_the_documentation_has_every_name() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = "".join(
        path.read_text()
        for path in (docs / "algorithms.md", *sorted((docs / "reference").glob("*.md")))
    )
    names = [key for _, key in FUNCTIONS] + PRESETS.names()
    assert not [name for name in names if f"`{name}`" not in page]

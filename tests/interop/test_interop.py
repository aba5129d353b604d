"""The declarations of every framework, the former name of the package, and errors without the package."""

import subprocess
import sys
from pathlib import Path

import pytest

from skyasync import interop
from skyasync.interop.system import System, systems
from skyasync.other_frameworks import UNKNOWN, OtherFrameworks, other_frameworks


def test_a_folder_is_a_system() -> None:
    folders = {path.parent.name for path in Path(interop.__path__[0]).glob("*/settings.tsv")}
    assert folders == set(systems())
    assert all(name == system.name for name, system in systems().items())


@pytest.mark.parametrize("system", systems().values(), ids=systems())
def test_what_a_system_declares_is_there(system: System) -> None:
    for name in system.adapters:
        assert system.adapter(name)
    assert callable(system.translation.finish)
    assert {row.function for row in system.table.rows} >= set(system.translation.CONVERSIONS)


def test_asking_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom skyasync.other_frameworks import other_frameworks\nother_frameworks().titles()\n"
        "sys.exit(bool({'torch', 'numpy', 'ray', 'tree_sitter', 'skyasync.config.schema'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_without_the_package_every_question_has_an_answer() -> None:
    nothing = OtherFrameworks()
    assert type(other_frameworks()) is not OtherFrameworks
    assert (nothing.key_hint("train.batch_size", UNKNOWN, {}, {}), nothing.value_hint("a", 1)) == (
        "",
        "",
    )
    assert (
        nothing.titles(),
        nothing.variables(),
        nothing.environments,
        nothing.reward_signatures(),
    ) == (
        [],
        {},
        {},
        (),
    )


def test_a_name_that_a_system_does_not_have_is_no_attribute() -> None:
    with pytest.raises(ImportError, match="RayPPOTrainr"):
        from skyasync.interop.skyrl import RayPPOTrainr  # noqa: F401

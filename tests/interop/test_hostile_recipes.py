"""A recipe of somebody else ends in one line, within its limits of size, depth and time, and reads no secret."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from skyasync.__main__ import command
from skyasync.errors import UserError
from skyasync.interop import shell
from skyasync.interop.limits import LARGEST_FILE, LONGEST_VALUE, MOST_KEYS
from skyasync.interop.recipe import read_recipe
from tests.interop.test_translate import flat

pytestmark = pytest.mark.slow

SECONDS = 10.0  # of a core, on a loaded machine
START = "python -m verl.trainer.main_ppo trainer.total_epochs=3"
CHAIN = ";".join("A${A//x/xxxxxxxxxx}".replace("A$", "A=$") for _ in range(12))
DOUBLED_LIST = ";".join('A=("${A[@]}" "${A[@]}")' for _ in range(40))
BOMB = "\n".join(f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 9)}]" for at in range(1, 12))
MAPPINGS = "\n".join(f"a{at}: &a{at} {{x: *a{at - 1}, y: *a{at - 1}}}" for at in range(1, 40))
REFERENCES = [f"${{a{at}}}" for at in range(12)]
LISTS = "\n".join(f"a{at}: [{', '.join([REFERENCES[at - 1]] * 9)}]" for at in range(1, 12))
TEXTS = "\n".join(f"a{at}: {REFERENCES[at - 1] * 9}" for at in range(1, 12))
CALLS = "\n".join("x40 = f(x40, x40)" for _ in range(2000))
NAMES = "\n".join(f"x{at} = [x{at + 1}, x{at + 1}]" for at in range(40))
PROGRAM = "from trl import GRPOConfig\nx40 = [1]\n"

HOSTILE = {
    "doubled variable": ("run.sh", f"A=xxxx;{';'.join(['A=$A$A'] * 45)}\n{START} trainer.project_name=$A"),
    "doubled by itself": ("run.sh", f"A=xxxx;{';'.join(['A+=$A'] * 45)}\n{START} trainer.project_name=$A"),
    "replacement": ("run.sh", f"A=x;{CHAIN}\n{START} trainer.project_name=$A"),
    "doubled list": ("run.sh", f"A=(x y);{DOUBLED_LIST}\n{START} trainer.project_name=$A"),
    "power": ("run.sh", f"{START} trainer.total_training_steps=$(({'(' * 6}9{'**64)' * 6}))"),
    "cut": ("run.sh", f"A={'a*' * 30000}b\n{START} trainer.project_name=${{A%%*c}}"),
    "evaluation": ("run.sh", f"A='{';'.join(['eval $A'] * 40)}'\neval $A\n{START}"),
    "statements": ("run.sh", "a\n" * 200_000 + START),
    "words": ("run.sh", f"{START} {' a.b=1' * 80_000}"),
    "keys": ("run.sh", f"{START} {' '.join(f'a.b{at}=1' for at in range(30_000))}"),
    "parentheses": ("run.sh", "(" * 100_000),
    "aliases": ("c.yaml", f"a0: &a0 x\n{BOMB}\ntrainer: {{total_epochs: 3}}"),
    "aliases of mappings": ("d.yaml", f"a0: &a0 {{x: 1}}\n{MAPPINGS}\ntrainer: {{total_epochs: 3}}"),
    "an alias of itself": ("e.yaml", "trainer: &a {total_epochs: 3, more: *a}"),
    "references to lists": ("f.yaml", f"a0: x\n{LISTS}\ntrainer: {{total_epochs: 3}}"),
    "references in texts": ("g.yaml", f"a0: xxxxxxxx\n{TEXTS}\ntrainer: {{total_epochs: 3}}"),
    "names of a program": ("t.py", f"{PROGRAM}{NAMES}\nGRPOConfig(run_name=x0)"),
    "calls of a program": ("s.py", f"{PROGRAM}{CALLS}\nGRPOConfig(run_name=x40)"),
    "brackets of a program": ("u.py", f"{PROGRAM}y = {'[' * 5000}{']' * 5000}"),
    "signs of a program": ("v.py", f"{PROGRAM}y = {'-' * 100_000}1"),
    "zero byte of a program": ("w.py", f"{PROGRAM}\0"),
    "empty lines of a notebook": (
        "n.ipynb", json.dumps({"cells": [{"cell_type": "code", "source": ["\n" * 200_000, "GRPOConfig()"]}]}),
    ),
    "a large file": ("large.sh", f"# {'x' * LARGEST_FILE}\n{START}"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_recipe_is_translated_or_ends_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, text = HOSTILE[name]
    (tmp_path / file).write_text(text)
    begin = time.process_time()
    try:
        command(["translate", str(tmp_path / file)])
    except SystemExit as end:
        assert end.code == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert len(error) < 400
    else:
        assert len(capsys.readouterr().out) < 20 * LONGEST_VALUE
    assert time.process_time() - begin < SECONDS


@pytest.mark.parametrize(
    "name", ["doubled variable", "replacement", "aliases", "names of a program", "keys"]
)
def test_the_line_says_the_limit(name: str, tmp_path: Path) -> None:
    file, text = HOSTILE[name]
    (tmp_path / file).write_text(text)
    with pytest.raises(UserError, match=r"at most [\d,]+ "):
        read_recipe([str(tmp_path / file)])


@pytest.mark.parametrize("times", [1, 6])
def test_a_script_that_sources_itself_is_read_once(times: int, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{'source run.sh; ' * times}\n{START}\n")
    assert read_recipe([str(tmp_path / "run.sh")]).keys == {"trainer.total_epochs": 3}


def test_scripts_that_source_one_another_end(tmp_path: Path) -> None:
    names = [f"s{at}.sh" for at in range(8)]
    for name in names:
        (tmp_path / name).write_text("".join(f"source {other}\n" for other in names) + START)
    begin = time.process_time()
    with pytest.raises(UserError, match="at most"):
        read_recipe([str(tmp_path / "s0.sh")])
    assert time.process_time() - begin < SECONDS


def test_a_recipe_reads_no_variable_of_the_environment_that_may_be_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets = {
        "HF_TOKEN": "hf_0123456789abcdef",
        "WANDB_API_KEY": "w-77aa",
        "MY_URL": "https://u:p4ss@h",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", "/home/me")
    words = " ".join(
        f"trainer.project_name=x-${name} data.train_files=${{{name}:-none}}" for name in secrets
    )
    (tmp_path / "run.sh").write_text(
        f"{START} {words} data.val_files=$HOME/test.parquet trainer.x=$HF_TOKEN\n"
    )
    command(["translate", str(tmp_path / "run.sh")])
    text = capsys.readouterr().out
    assert [value for value in secrets.values() if value in text] == []
    assert flat(text)["data.val_data"] == ["/home/me/test.parquet"]
    assert "#   trainer.project_name=x-$MY_URL: a shell fills it in: write it by hand" in text


def test_a_script_s_variables_are_its_own(tmp_path: Path) -> None:
    assert shell.read("A=1; run $A ${B:-2} $C", environment={}).commands == [
        ["run", "1", "2", "$C"]
    ]
    many = " ".join(f"a.b{at}=1" for at in range(MOST_KEYS - 1))
    (tmp_path / "run.sh").write_text(f"{START} {many}")
    assert len(read_recipe([str(tmp_path / "run.sh")]).keys) == MOST_KEYS

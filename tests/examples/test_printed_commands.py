"""The commands of SkyRL's tutorial on asynchronous training, with its names of files and keys."""

from __future__ import annotations

import os
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from skyasync.cli.train import TINY_CONFIG
from skyasync.config import load_config
from skyasync.config.schema import Config
from tests.config.test_contradictions import PRINTED

ROOT = Path(__file__).parents[2]
SCRIPT = "examples/async/async_run_gsm8k.sh"


def script(folder: Path, *arguments: str) -> Config:
    """The arguments that the script's run would get."""
    uv = folder / "uv"
    uv.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    uv.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder)}
    done = subprocess.run(["bash", SCRIPT, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True,
                          check=True)  # fmt: skip
    words = done.stdout.splitlines()
    assert words[:5] == ["run", "--extra", "vllm", "-m", "examples.async.main_async"]
    return load_config(words[5:], plan="one_step_off")


@pytest.mark.parametrize("more", [[], ["trainer.algorithm.use_kl_loss=true"]])
def test_the_entry_point_takes_the_printed_settings(more: list[str]) -> None:
    program = import_module("examples.async.main_async")
    config = load_config([*PRINTED, *more], default_config=TINY_CONFIG, plan="one_step_off")
    assert program.AsyncPPOExp(config).cfg.trainer.placement.ref_num_gpus_per_node == 4


def test_the_script_hands_on_its_arguments_and_they_win(tmp_path: Path) -> None:
    assert script(tmp_path).trainer.logger == ["jsonl"]
    config = script(tmp_path, "trainer.logger=console", "trainer.epochs=3", *PRINTED)
    assert (config.trainer.logger, config.trainer.epochs) == (["console"], 3)
    assert (
        config.trainer.placement.ref_num_gpus_per_node
        == config.trainer.placement.policy_num_gpus_per_node
        == 4
    )
    assert config.data.train_data == [f"{tmp_path}/data/gsm8k/train.parquet"]

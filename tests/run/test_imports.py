"""Libraries of models are imported by the processes that have models; in the others they would delay the start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTROLLER = (
    "skyasync.run.controller",
    "skyasync.run.components",
    "skyasync.inference.ray_engine",
    "skyasync.inference.client",
    "skyasync.workers.dispatch",
    "skyasync.trainer.plans.fully_async",
    "skyasync.rollout.generator",
    "skyasync.weight_sync.sync",
    "skyasync.weight_sync.colocation",
)
OF_MODELS = {
    "transformers.modeling_utils",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
}
BEFORE_THE_RANKS_START = (
    "skyasync.run.placement",
    "skyasync.inference.ray_engine",
    "skyasync.workers.rank_actors",
)
PROGRAM = ("skyasync", "skyasync.run.experiment", "skyasync.run.launch", "skyasync.cli.train")


def imported(modules: tuple[str, ...]) -> set[str]:
    """Names of all modules that are loaded after these have been imported in a new process."""
    code = f"import importlib, sys; [importlib.import_module(name) for name in {modules!r}]; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.slow
def test_the_controller_imports_no_library_of_models() -> None:
    assert not imported(CONTROLLER) & OF_MODELS


@pytest.mark.slow
def test_the_program_imports_torch_only_in_its_processes() -> None:
    assert not imported(PROGRAM) & {"torch", "transformers"}


@pytest.mark.slow
def test_the_controller_starts_the_ranks_before_it_imports_torch() -> None:
    assert "torch" not in imported(BEFORE_THE_RANKS_START)

"""The notebook runs from its first cell to its last, at smaller size, in a real kernel and a folder of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from skyasync.examples.tiny.model import build

ROOT = Path(__file__).parents[2]
SMALL = ("trainer.plan=one_step_off", "trainer.max_training_steps=2", "trainer.eval_interval=0",
         "trainer.eval_before_train=false", "trainer.train_batch_size=8", "trainer.epochs=1", "trainer.report=false",
         "generator.n_samples_per_prompt=4",
         "generator.eval_n_samples_per_prompt=1", "generator.backend=transformers")  # fmt: skip


class _ThisPython(KernelSpecManager):
    """A kernel of the Python that runs the tests, whatever is installed for the user."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="this", language="python")


def test_the_notebook_has_no_outputs_and_says_which_cell_is_to_be_changed() -> None:
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code] == [[]] * len(code)
    assert "parameters" in code[0].metadata["tags"]


@pytest.mark.slow
@pytest.mark.recipe
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    model = build(out=tmp_path / "model", steps=20, progress=False)
    lines = [*SMALL, f"trainer.policy.model.path={model}", f"--config={_tiny()}"]
    notebook.cells[1].source = f"settings = {lines!r}"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    manager = AsyncKernelManager(kernel_spec_manager=_ThisPython())
    client = NotebookClient(
        notebook, km=manager, timeout=240, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    assert (tmp_path / "runs" / "quickstart" / "metrics.jsonl").exists()
    assert (tmp_path / "runs" / "close" / "metrics.jsonl").exists()


def _tiny() -> Path:
    from skyasync.cli.train import TINY_CONFIG

    return TINY_CONFIG

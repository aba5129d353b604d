"""Compiled layers have the same gradient; what cannot be compiled is rejected."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from skyasync.config.check import check_config
from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.models.fsdp.loading import check_attention_compiler, check_compiler
from skyasync.workers.policy import PolicyWorker
from tests.models.test_shapes import distance, gradient, ragged
from tests.workers.conftest import config_for, make_batch

pytestmark = pytest.mark.slow


def compiled(path: str, backend: str, checkpointing: bool = False) -> torch.Tensor:
    cfg = config_for(path)
    cfg.trainer.policy.torch_compile = backend != ""
    cfg.trainer.policy.gradient_checkpointing = checkpointing
    worker = PolicyWorker(cfg, threads=1)
    torch.compiler.reset()
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        worker.setup()
    worker.forward_backward(ragged())
    return gradient(worker)


@pytest.mark.matrix
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.recipe)])
def test_traced_layers_have_the_gradient_of_the_others(
    untied_model: str, checkpointing: bool
) -> None:
    """Everything but the generation of machine code, which takes long."""
    expected = compiled(untied_model, "")
    assert distance(compiled(untied_model, "aot_eager", checkpointing), expected) < 1e-6


def test_packed_rows_of_any_shape_share_compiled_code(untied_model: str) -> None:
    """Frames are counted over micro-batches that differ in tokens, rows and blocks."""
    cfg = config_for(untied_model)
    cfg.trainer.policy.torch_compile = True
    worker = PolicyWorker(cfg, threads=1)
    torch.compiler.reset()
    counter = CompileCounter()
    with patch.object(torch, "compile", partial(torch.compile, backend=counter)):
        worker.setup()
    assert worker.backend.model.packs
    counts = []
    for groups, longest in ((2, 9), (4, 30), (3, 17), (5, 24), (2, 40), (6, 12)):
        worker.forward_backward(make_batch(groups=groups, longest_response=longest))
        counts.append(counter.frame_count)
    torch.compiler.reset()
    assert counts[0] and counts[-1] == counts[2] <= 16, counts


@pytest.mark.recipe
def test_compiled_layers_have_the_gradient_of_the_others(untied_model: str) -> None:
    """Minutes on a busy machine. Fused operations round differently: 1.3e-6 was seen."""
    assert distance(compiled(untied_model, "inductor"), compiled(untied_model, "")) < 5e-6


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"torch_compile=true.*no-such-compiler.*CXX"):
        check_compiler(torch.device("cpu"))


@pytest.mark.parametrize("missing", ["compiler", "named compiler", "headers"])
def test_a_gpu_without_what_triton_needs_says_so_before_the_first_batch(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    compilers = {"compiler": None, "named compiler": None, "headers": "/usr/bin/gcc"}
    monkeypatch.setattr("shutil.which", lambda name: compilers[missing])
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    if missing == "named compiler":
        monkeypatch.setenv("CC", "icx")
    expected = {
        "compiler": "no gcc or clang here",
        "named compiler": "no icx here",
        "headers": "Python.h",
    }
    with pytest.raises(UserError, match=expected[missing]):
        check_attention_compiler(torch.device("cuda"))
    check_attention_compiler(torch.device("cpu"))


def adapters(cfg: Config) -> None:
    cfg.trainer.policy.lora.rank = 4


def selective(cfg: Config) -> None:
    cfg.trainer.policy.gradient_checkpointing = "selective"


@pytest.mark.parametrize(
    ("change", "named"), [(adapters, "lora.rank=4"), (selective, "=selective")]
)
def test_what_compiled_layers_would_not_see_is_refused(
    change: Callable[[Config], None], named: str
) -> None:
    cfg = config_for("nowhere")
    cfg.trainer.policy.torch_compile = True
    change(cfg)
    assert any("torch_compile" in problem and named in problem for problem in check_config(cfg))

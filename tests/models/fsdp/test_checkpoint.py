from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from skyasync.errors import UserError
from skyasync.models.backend import SaveResult
from skyasync.models.fsdp import checkpoint
from skyasync.utils import manifest
from skyasync.workers.policy import PolicyWorker
from tests.full_disk import files_end_at
from tests.workers.conftest import config_for, make_batch, make_model


def started(model: str) -> PolicyWorker:
    worker = PolicyWorker(config_for(model), threads=1)
    worker.setup()
    return worker


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="reads Linux's record of memory"
)
def test_saving_takes_much_less_memory_than_the_state_that_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 1 << 23)
    worker = started(make_model(tmp_path / "model", tied=True, intermediate_size=50_000))
    worker.update_policy(make_batch())
    size = 3 * sum(
        p.nbytes for p in worker.backend.model.parameters()
    )  # the weights and two moments
    assert size > 100 << 20
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
    before = _memory("VmHWM")
    worker.save(str(tmp_path / "saved"))
    assert len(list((tmp_path / "saved").iterdir())) > 5
    assert _memory("VmHWM") - before < size / 4


def test_a_checkpoint_of_another_model_is_refused_by_name(
    tmp_path: Path, tied_model: str, untied_model: str
) -> None:
    started(tied_model).save(str(tmp_path))
    with pytest.raises(UserError, match=r"only the policy has model\.lm_head\.weight"):
        started(untied_model).load(str(tmp_path))


def test_a_parameter_without_a_gradient_has_no_optimizer_state_after_loading_either(
    tmp_path: Path, tied_model: str
) -> None:
    worker = started(tied_model)
    still = worker.backend.model.model.base_model.norm.weight
    still.requires_grad_(False)
    worker.update_policy(make_batch())
    worker.save(str(tmp_path))
    other = started(tied_model)
    other.update_policy(make_batch())
    other.load(str(tmp_path))
    names = {id(p): name for name, p in other.backend.model.named_parameters()}
    assert {names[id(p)] for p in other.backend.optimizer.state} == set(names.values()) - {
        "model.model.norm.weight"
    }
    assert torch.equal(other.backend.model.model.base_model.norm.weight, still)


def _memory(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))


def test_an_asynchronous_save_has_the_state_at_its_beginning(
    tmp_path: Path, tied_model: str, recwarn: pytest.WarningsRecorder
) -> None:
    worker = started(tied_model)
    worker.update_policy(make_batch())
    worker.save(str(tmp_path / "at once"))
    worker.begin_save(str(tmp_path / "behind"))
    worker.update_policy(make_batch(seed=1))
    asynchronous = finished(worker)
    (name,) = asynchronous.files
    first, second = (load_file(tmp_path / folder / name) for folder in ("at once", "behind"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert [
        str(warning.message) for warning in recwarn if "torch.distributed" in str(warning.message)
    ] == []


def finished(worker: PolicyWorker) -> SaveResult:
    while (found := worker.saved()) is None:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_takes_no_more_is_an_answer_and_the_worker_goes_on(
    asynchronous: bool, tmp_path: Path, tied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = started(tied_model)
    worker.update_policy(make_batch())

    def full(self: manifest.SummingFile, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def save() -> SaveResult:
        if not asynchronous:
            return worker.save(str(tmp_path / "saved"))
        worker.begin_save(str(tmp_path / "saved"))
        return finished(worker)

    with monkeypatch.context() as patched:
        patched.setattr(manifest.SummingFile, "write", full)
        assert "No space left on device" in save().problem
    shutil.rmtree(tmp_path / "saved")
    worker.update_policy(make_batch(seed=1))
    assert save().files


def test_a_fault_of_another_kind_is_an_error(
    tmp_path: Path, tied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = started(tied_model)

    def breaks(self: manifest.SummingFile, data: bytes) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(manifest.SummingFile, "write", breaks)
    with pytest.raises(ZeroDivisionError):
        worker.save(str(tmp_path))


def test_a_real_limit_of_the_system_is_an_answer_too(tmp_path: Path, tied_model: str) -> None:
    worker = started(tied_model)
    with files_end_at(1000):
        assert worker.save(str(tmp_path / "saved")).problem == "File too large"


def test_a_model_of_another_shape_is_refused_naming_the_key(
    tmp_path: Path, tied_model: str
) -> None:
    started(tied_model).save(str(tmp_path / "saved"))
    wider = make_model(tmp_path / "model", tied=True, intermediate_size=48)
    with pytest.raises(
        UserError,
        match=r"trainer\.policy\.model\.path.*\[64, 32\] there and \[48, 32\] in the policy",
    ):
        started(wider).load(str(tmp_path / "saved"))

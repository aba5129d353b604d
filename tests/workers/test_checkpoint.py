from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyasync.errors import UserError
from skyasync.workers import checkpoint
from skyasync.workers.policy import PolicyWorker
from tests.workers.conftest import config_for, make_batch, make_model


def started(model: str) -> PolicyWorker:
    worker = PolicyWorker(config_for(model), threads=1)
    worker.setup()
    return worker


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's record of memory")
def test_saving_takes_much_less_memory_than_the_state_that_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 1 << 23)
    worker = started(make_model(tmp_path / "model", tied=True, intermediate_size=50_000))
    worker.update_policy(make_batch())
    size = 3 * sum(p.nbytes for p in worker.model.parameters())  # the weights and two moments
    assert size > 100 << 20
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before = _memory("VmHWM")
    worker.save(str(tmp_path / "saved"))
    assert len(list((tmp_path / "saved").iterdir())) > 5
    assert _memory("VmHWM") - before < size / 4


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path, tied_model: str, untied_model: str) -> None:
    started(tied_model).save(str(tmp_path))
    with pytest.raises(UserError, match=r"only the policy has model\.lm_head\.weight"):
        started(untied_model).load(str(tmp_path))


def test_a_parameter_without_a_gradient_has_no_moments_after_loading_either(tmp_path: Path, tied_model: str) -> None:
    worker = started(tied_model)
    still = worker.model.model.base_model.norm.weight
    still.requires_grad_(False)
    worker.update_policy(make_batch())
    worker.save(str(tmp_path))
    other = started(tied_model)
    other.update_policy(make_batch())
    other.load(str(tmp_path))
    names = {id(p): name for name, p in other.model.named_parameters()}
    assert {names[id(p)] for p in other.optimizer.state} == set(names.values()) - {"model.model.norm.weight"}
    assert torch.equal(other.model.model.base_model.norm.weight, still)


def _memory(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))

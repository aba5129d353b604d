"""The lower bound of a run's memory: a run that cannot fit is rejected before it starts, one that may fit never is."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from skyasync.config import Config, load_config
from skyasync.errors import UserError
from skyasync.preflight.model import check_memory
from skyasync.utils.machine import Machine

GIB = 1 << 30
LAPTOP = Machine(0, 0, 32 * GIB)
GPUS = Machine(8, 80 * GIB, 1 << 40)


def run_of(
    folder: Path, billions: float, *settings: str, dtype: str = "bfloat16", files: str | None = None
) -> Config:
    """A model of so many parameters, as a sparse file.

    Args:
        dtype: in its config.json.
        files: the dtype of its weights; None: the same.
    """
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": dtype}))
    name, each = {"bfloat16": ("BF16", 2), "float32": ("F32", 4)}[files or dtype]
    count = int(billions * 1e9)
    header = json.dumps(
        {"weight": {"dtype": name, "shape": [count], "data_offsets": [0, count * each]}}
    ).encode()
    header += b" " * (-len(header) % 8)
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + count * each)
    return load_config([f"trainer.policy.model.path={folder}", "data.train_data=[x]", *settings])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_that_cannot_fit_is_one_line(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        check_memory(run_of(tmp_path, 7, dtype=dtype), LAPTOP)
    assert "7B parameters take at least 104 GiB, and this machine has 32 GiB" in str(refused.value)
    assert "trainer.policy.lora.rank" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("dtype", "files"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_parameters_are_counted_in_files_of_another_dtype_than_the_configs(
    dtype: str, files: str, tmp_path: Path
) -> None:
    check_memory(run_of(tmp_path, 2, dtype=dtype, files=files), LAPTOP)
    with pytest.raises(UserError, match=r"its 7B parameters take at least 104 GiB"):
        check_memory(run_of(tmp_path, 7, dtype=dtype, files=files), LAPTOP)


def test_weights_that_cannot_be_read_are_left_to_their_loader(tmp_path: Path) -> None:
    cfg = run_of(tmp_path, 7)
    os.truncate(tmp_path / "model.safetensors", 100)
    check_memory(cfg, LAPTOP)


@pytest.mark.parametrize(
    "settings",
    [
        ["trainer.policy.lora.rank=8"],
        ["trainer.policy.freeze=[model.embed_tokens]"],
        ["trainer.policy.optimizer_config.bf16_stochastic_round=true", "trainer.policy.model.dtype=bfloat16",
         "trainer.policy.optimizer_config.name=adamw_8bit"],
    ],
)  # fmt: skip
def test_what_may_fit_is_not_refused(settings: list[str], tmp_path: Path) -> None:
    check_memory(run_of(tmp_path, 5, *settings), LAPTOP)


def test_weights_that_a_folder_holds_twice_are_counted_once(tmp_path: Path) -> None:
    cfg = run_of(
        tmp_path, 7
    )  # as Mistral's folders: transformers' files, and one of another library
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    names = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(names))
    (tmp_path / "consolidated.safetensors").touch()
    os.truncate(tmp_path / "consolidated.safetensors", 14 * 10**9)
    check_memory(cfg, replace(LAPTOP, host_memory=110 * GIB))


def test_ranks_share_it_on_gpus(tmp_path: Path) -> None:
    ranks = "trainer.placement.policy_num_gpus_per_node="
    with pytest.raises(UserError, match=r"each GPU has 80 GiB: use more ranks than 1"):
        check_memory(run_of(tmp_path, 8, f"{ranks}1"), GPUS)
    with pytest.raises(UserError, match=r"at least 119 GiB"):
        check_memory(run_of(tmp_path, 32, f"{ranks}8", "trainer.policy.fsdp_size=4"), GPUS)
    check_memory(run_of(tmp_path, 32, f"{ranks}8"), GPUS)
    check_memory(run_of(tmp_path, 8, f"{ranks}1", "trainer.policy.cpu_offload=parameters"), GPUS)


def test_a_model_of_the_hub_is_not_looked_at() -> None:
    check_memory(
        load_config(["trainer.policy.model.path=acme/large", "data.train_data=[x]"]), LAPTOP
    )

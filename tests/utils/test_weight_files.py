"""Tampered and damaged safetensors: one line that names the file, wherever they are read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from skyasync.cli.export import read_weights
from skyasync.errors import UserError
from skyasync.inference.backends.transformers.model import EmbeddedModel
from skyasync.inference.interface import EngineConfig
from skyasync.models.fsdp import checkpoint
from skyasync.models.heads import load_causal_lm
from skyasync.rollout import partial_rollouts
from skyasync.utils.weight_files import INDEX, check_model_files, weights_of
from tests.inference.tiny_llama import save_tiny_llama

Header = dict[str, Any]


def parts_of(data: bytes) -> tuple[Header, bytes]:
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def file_of(header: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def edited(data: bytes, edit: Callable[[Header, str], object]) -> bytes:
    """The file with its last tensor's entry in the header changed."""
    header, body = parts_of(data)
    ends = {
        name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
    }
    edit(header, max(ends, key=lambda name: ends[name]))
    return file_of(json.dumps(header).encode(), body)


def without_last(data: bytes) -> bytes:
    """A sound file without its last tensor."""
    header, body = parts_of(data)
    ends = {
        name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
    }
    first, _ = header.pop(max(ends, key=lambda name: ends[name]))["data_offsets"]
    return file_of(json.dumps(header).encode(), body[:first])


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "header too large": lambda data: struct.pack("<Q", 1 << 60) + data[8:],
    "header beyond the file": lambda data: struct.pack("<Q", len(data)) + data[8:],
    "recursion": lambda data: file_of(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b""),
    "shape": lambda data: edited(data, lambda header, name: header[name].update(shape=[7, 7])),
    "huge shape": lambda data: edited(
        data, lambda header, name: header[name].update(shape=[1 << 62, 1 << 62])
    ),
    "negative shape": lambda data: edited(
        data, lambda header, name: header[name].update(shape=[-1])
    ),
    "offsets": lambda data: edited(
        data, lambda header, name: header[name].update(data_offsets=[5, 1])
    ),
    "offsets beyond": lambda data: edited(
        data, lambda header, name: header[name].update(data_offsets=[0, 1 << 50])
    ),
    "dtype": lambda data: edited(data, lambda header, name: header[name].update(dtype="F99")),
    "no entry": lambda data: edited(data, lambda header, name: header.update({name: 5})),
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "text": lambda data: b"<html>404</html>" * 20,
}
MISFITS: dict[str, Callable[[bytes], bytes]] = {
    "missing tensor": without_last,
    "metadata that is no JSON": lambda data: edited(
        data,
        lambda header, name: header.update(
            __metadata__=dict.fromkeys(header.get("__metadata__", {}), "{")
        ),
    ),
    "flat": lambda data: edited(
        data,
        lambda header, name: header[name].update(
            shape=[torch.Size(header[name]["shape"]).numel(), 1, 1]
        ),
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tiny_llama(tmp_path_factory.mktemp("model"), tied=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[bytes, str, nn.Module]:
    """A checkpoint's file, its name, and its model."""
    folder = tmp_path_factory.mktemp("step_000001") / "policy"
    loaded = load_causal_lm(str(model), torch.float32)
    result = checkpoint.save(loaded, torch.optim.AdamW(loaded.parameters()), 1, folder)
    assert not result.problem
    (file,) = folder.glob("*.safetensors")
    return file.read_bytes(), file.name, loaded


def one_line(error: UserError, file: str) -> bool:
    text = str(error)
    return file in text and "\n" not in text and len(text) < 600


@pytest.mark.parametrize("attack", [*DAMAGED, *MISFITS])
def test_a_checkpoint_is_not_resumed_or_exported_from_and_the_error_is_one_line(
    saved: Any, attack: str, tmp_path: Path
) -> None:
    data, name, loaded = saved
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / name).write_bytes((DAMAGED | MISFITS)[attack](data))
    with pytest.raises(UserError) as raised:
        checkpoint.load(loaded, torch.optim.AdamW(loaded.parameters()), tmp_path / "policy")
    assert one_line(raised.value, str(tmp_path / "policy"))
    if attack in DAMAGED:
        with pytest.raises(UserError) as raised:
            read_weights(tmp_path)
        assert one_line(raised.value, name)


@pytest.mark.parametrize("attack", DAMAGED)
def test_a_models_folder_is_rejected_by_every_reader(
    model: Path, attack: str, tmp_path: Path
) -> None:
    for file in model.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(
            DAMAGED[attack](data) if file.suffix == ".safetensors" else data
        )
    for read in (
        lambda: check_model_files(tmp_path),
        lambda: load_causal_lm(str(tmp_path), torch.float32),
        lambda: EmbeddedModel(EngineConfig(str(tmp_path))),
    ):
        with pytest.raises(UserError, match="is damaged, or no safetensors file") as raised:
            read()
        assert one_line(raised.value, "model.safetensors")


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../no"}}', "[" * 9999]
)
def test_an_index_that_names_no_files_is_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(UserError) as raised:
        check_model_files(tmp_path)
    assert one_line(raised.value, INDEX)


def test_misfits_of_a_reader_are_one_line_and_other_errors_are_left(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its weights are damaged, or do not fit the model: KeyError"), \
            weights_of(tmp_path):  # fmt: skip
        raise KeyError("layer")
    with pytest.raises(FileNotFoundError), weights_of(tmp_path):
        raise FileNotFoundError


@pytest.mark.parametrize("attack", DAMAGED)
def test_saved_rollouts_are_not_read_and_the_error_is_one_line(attack: str, tmp_path: Path) -> None:
    file = tmp_path / partial_rollouts.FILE
    partial_rollouts.write(file, partial_rollouts.RolloutState({}, []))
    file.write_bytes(DAMAGED[attack](file.read_bytes()))
    with pytest.raises(UserError, match="is damaged, or no file of rollouts") as raised:
        partial_rollouts.read(file, lambda identity: None)  # type: ignore[arg-type,return-value]
    assert one_line(raised.value, partial_rollouts.FILE)

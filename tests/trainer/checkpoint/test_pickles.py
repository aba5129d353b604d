"""Files of other users run no code: nothing unpickles them."""

from __future__ import annotations

import ast
import os
import pickle
from pathlib import Path

import pytest

import skyasync

ROOT = Path(skyasync.__file__).parent
#: Modules whose pickles are messages between processes of one run.
AMONG_PROCESSES = {
    "utils/rpc.py",
    "utils/rpc_server.py",
    "utils/subprocess_worker.py",
    "rewards/llm_judge.py",
    "rewards/reward_functions.py",
}
CALLS = {"torch.load", "np.load", "numpy.load", "yaml.unsafe_load"}
LOADERS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def reaches(tree: ast.AST) -> set[str]:
    """Names in a module that could unpickle."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names} & LOADERS
        elif isinstance(node, ast.ImportFrom):
            found |= {
                (node.module or "").partition(".")[0],
                *(alias.name for alias in node.names),
            } & LOADERS
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in CALLS:
            found.add(ast.unparse(node))
    return found


def test_no_module_unpickles_what_comes_from_outside() -> None:
    found = {
        file.relative_to(ROOT).as_posix(): names
        for file in ROOT.rglob("*.py")
        if any(name in (text := file.read_text()) for name in LOADERS | CALLS)
        and (names := reaches(ast.parse(text)))
    }
    assert set(found) == AMONG_PROCESSES, found
    assert reaches(ast.parse("import torch\nx = torch.load('a')")) == {"torch.load"}


class Hostile:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.mark}",)


def test_another_users_checkpoint_runs_no_code(tmp_path: Path) -> None:
    """The checkpoint has a pickle under every name at which torch's reader would look for one."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import FileSystemReader

    from skyasync.cli.export import read_weights

    mark, policy = tmp_path / "mark", tmp_path / "policy"
    policy.mkdir()
    for name in (".metadata", "__0_0.distcp", "optimizer.pt", "pytorch_model.bin"):
        (policy / name).write_bytes(pickle.dumps(Hostile(mark)))
    save_file({"model.a": torch.ones(2)}, policy / "model.safetensors")
    assert read_weights(tmp_path)["a"].tolist() == [1.0, 1.0]
    (policy / "more.safetensors").write_bytes(pickle.dumps(Hostile(mark)))
    with pytest.raises(Exception):  # noqa: B017  (whatever it says of such a file)
        read_weights(tmp_path)
    assert not mark.exists()
    with pytest.raises(BaseException):  # noqa: B017
        dcp.load({"a": torch.zeros(1)}, storage_reader=FileSystemReader(str(policy)), no_dist=True)
    assert mark.exists(), "torch's own reader would have run it"

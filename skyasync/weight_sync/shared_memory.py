"""Weights as one safetensors file in shared memory.

Invariant: a file is complete before its name exists (it is renamed into place), and whoever wrote it
removes it; files left by a killed process are swept by the next writer on the machine. It carries the digests of its
tensors as their writer had them, by which a reader proves what it holds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from skyasync.errors import UserError
from skyasync.weight_sync.kinds import Kinds, bytes_of, kinds_of
from skyasync.weight_sync.tensor_file import writing

PREFIX = "skyasync-weights-"  # then the writer's process: <number>-<namespace>
OWNER_ALONE = 0o600
ABOUT = ":about"  # what a file says of itself besides its digests; no tensor's name begins so


def directories() -> tuple[Path, ...]:
    """Shared memory where the system has it, then the folder for temporary files."""
    shm, temporary = Path("/dev/shm"), Path(tempfile.gettempdir())
    return (shm, temporary) if os.access(shm, os.W_OK) else (temporary,)


def directory_for(size: int) -> Path:
    """The first of ``directories()`` with room for ``size`` bytes: a container's shared memory may be 64 MB.

    Raises:
        UserError: if none has.
    """
    free = {folder: shutil.disk_usage(folder).free for folder in directories()}
    for folder, room in free.items():
        if room > size:
            return folder
    found = ", ".join(f"{folder} has {room >> 20} MiB" for folder, room in free.items())
    raise UserError(f"the weights take {size >> 20} MiB on their way to the engines; free: {found}")


def write_weights(weights: Mapping[str, Tensor], folder: str = "", said: Mapping[str, str] | None = None) -> str:
    """Write tensors that are all there; see ``write_one_by_one``."""
    return write_one_by_one(kinds_of(weights), weights.items(), folder, said)


def write_one_by_one(
    kinds: Kinds, weights: Iterable[tuple[str, Tensor]], folder: str = "", said: Mapping[str, str] | None = None
) -> str:
    """Write full tensors as they come, in the dtypes of ``kinds``, and return the file's path.

    Args:
        folder: of several machines; empty is memory of this one.
        said: what goes with them; by default their digests.

    Raises:
        UserError: if there is no room for them.
    """
    sweep(folder)
    where = Path(folder) if folder else directory_for(sum(map(bytes_of, kinds.values())))
    path = where / f"{PREFIX}{os.getpid()}-{_numbers(folder)}-{uuid.uuid4().hex[:8]}.safetensors"
    unfinished = path.with_suffix(".writing")
    try:
        unfinished.touch(OWNER_ALONE)
        with writing(unfinished, kinds, said) as file:
            for name, tensor in weights:
                file.put(name, tensor)
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return str(path)


def read_weights(path: str) -> dict[str, Tensor]:
    """The tensors of a file, mapped rather than copied where the system can.

    Raises:
        FileNotFoundError: if it is not there; most likely its writer runs on another machine.
    """
    if not Path(path).exists():
        raise not_here(path)
    return load_file(path)


def not_here(path: str) -> FileNotFoundError:
    """What to say of weights that this machine does not have."""
    if path.startswith("/proc/") and not Path(path).parent.exists():  # memory of a process
        return FileNotFoundError(f"{path} is gone: the process that had these weights in its memory has ended")
    return FileNotFoundError(
        f"{path} is not on {socket.gethostname()}: generator.weight_sync_backend=shared_memory reaches other machines "
        f"for engines that the run has started on nodes of its Ray cluster; servers of generator.engines need a folder "
        f"that both see (generator.weight_sync_dir), and GPUs may have generator.weight_sync_backend=nccl"
    )


def read_digests(path: str) -> dict[str, str]:
    """By name, the digest of each tensor before it was written; see ``skyasync.weight_sync.digests``."""
    with safe_open(path, framework="pt") as file:
        return {name: said for name, said in file.metadata().items() if name != ABOUT}


def remove_weights(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def sweep(folder: str = "") -> None:
    """Remove files whose writer no longer lives, as far as this process can know and may remove them.

    Containers may share the memory but not the numbers of processes, so those of other namespaces are left alone.
    """
    pattern = f"{PREFIX}*-{_numbers(folder)}-*"
    for path in (path for place in ([Path(folder)] if folder else directories()) for path in place.glob(pattern)):
        writer = path.name.removeprefix(PREFIX).split("-")[0]
        if writer.isdigit() and not _alive(int(writer)):
            with contextlib.suppress(OSError):  # another user's, or swept by somebody else just now
                path.unlink()


def _numbers(folder: str) -> str:
    """What a process's number is one of: this machine's, in a folder that others write to as well."""
    return f"{_namespace()}@{socket.gethostname().replace('-', '_')}" if folder else _namespace()


def _namespace() -> str:
    """Which numbering of processes this one lives in; empty where the system has only one."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return ""


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

"""Weights by a safetensors file, in shared memory of the machine or in a shared folder.

Invariant: a file is complete before its name exists (it is renamed into place), and its writer
removes it; files of a killed process are removed by the next writer on the machine. It carries the
digests of its tensors as their writer had them, by which a reader proves what it has. Names, dtypes
and shapes are known before, so the header comes first and each tensor is written as soon as it is
there: no more than one is in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from skyasync.errors import UserError
from skyasync.weight_sync.delta import DeltaEncoder, Encoded, WeightsHeader
from skyasync.weight_sync.tensors import TensorSpecs, bytes_of, specs_of
from skyasync.weight_sync.transfers.base import PolicyRanks, WeightTransfer
from skyasync.weight_sync.update import WeightUpdate

if TYPE_CHECKING:
    from skyasync.weight_sync.full_tensors import FullTensors
    from skyasync.weight_sync.transfers.remote import RemoteEngines

PREFIX = "skyasync-weights-"  # then the writer's process: <number>-<namespace>
OWNER_ALONE = 0o600  # weights are private to the user
HEADER_KEY = ":about"  # of ``WeightsHeader`` among the digests; no tensor's name begins so
PIECE = 1 << 18  # elements that are converted and written at a time, in the processor's cache
PENDING_DIGEST = "0" * 16  # as long as a digest: the header is written again in its place
_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class FileTransfer(WeightTransfer):
    """Sends all weights, a delta or adapters.

    Args:
        encoding: "full", "delta" or "adapter".
        remote: engines on other nodes that do not see the file.
    """

    proves_content = True
    sender = "file"

    def __init__(
        self, policy: PolicyRanks, encoding: str = "full", remote: RemoteEngines | None = None
    ) -> None:
        super().__init__(policy)
        self._encoding = encoding
        self._remote = remote
        self._retained_update: WeightUpdate | None = None
        self._resent = 0  # updates besides the first that name its file, and are to be released

    async def publish(self, version: int) -> WeightUpdate:
        self._retained_update = None
        self._resent = 0
        written, *_ = await self._ranks("write", self._encoding)
        update = _update(version, written)
        if self._remote is None:
            return update
        return await self._remote.announce(update)

    async def send(self, update: WeightUpdate) -> None:
        if self._remote is not None:
            await self._remote.send(update)

    async def publish_whole(self, update: WeightUpdate) -> WeightUpdate:
        if self._encoding == "delta":
            update = _update(update.version, await self._rank_0("write_whole", True))
        if self._remote is None:
            full_update = update
        else:
            full_update = await self._remote.announce_again(update)
        # After a delta the full weights have a file of their own; else both updates name one.
        if self._encoding != "delta":
            self._resent += 1
        return full_update

    async def release(self, update: WeightUpdate) -> None:
        if self._resent:
            self._resent -= 1
        elif not self.expects_late_engines or self._encoding == "delta":
            await self._rank_0("remove", update.info["path"])
        elif self._retained_update is None:
            path = await self._rank_0("keep", update.info["path"])
            self._retained_update = WeightUpdate(
                update.version, update.backend, {"path": path}, update.content, update.base
            )

    async def for_late_engine(self, version: int) -> WeightUpdate:
        if self._encoding == "delta":
            # From the encoder's copy, which has the weights of the latest sync.
            update = _update(version, await self._rank_0("write_whole", False))
        else:
            assert self._retained_update is not None
            update = self._retained_update
        if self._remote is None:
            return update
        return await self._remote.announce(update, late=True)

    async def release_retained(self) -> None:
        update = self._retained_update
        self._retained_update = None
        if update is not None:
            await self._rank_0("remove", update.info["path"])


Written = tuple[str, str, str, dict[str, float]]
"""A file: its path, the content of the weights, the content that a delta is of or "", metrics."""


def _update(version: int, written: Written) -> WeightUpdate:
    path, content, base, metrics = written
    return WeightUpdate(version, "shared_memory", {"path": path}, content, base, metrics)


class FileSender:
    """The writer on each policy rank.

    Args:
        folder: of several machines; empty is memory of this one.
    """

    def __init__(
        self,
        weights: Callable[[], FullTensors],
        adapter: Callable[[], Any],
        rank: int,
        folder: str = "",
    ) -> None:
        self._weights = weights
        self._adapter = adapter
        self._rank = rank
        self._folder = folder
        self._delta = DeltaEncoder()
        self._retained_file: tuple[str, int | None] = ("", None)  # path and descriptor

    def write(self, encoding: str = "full") -> Written | None:
        """Write a file on rank 0; all ranks call it."""
        if self._rank == 0:
            self._drop()  # the retained file first: there is space for one
        if encoding == "adapter":
            adapter = self._adapter()
            if self._rank == 0:
                return self._written(adapter.encode())
            return None
        tensors = self._weights()
        if self._rank != 0:
            tensors.only_gather()
            return None
        if encoding == "delta":
            return self._written(self._delta.encode(tensors.specs, tensors))
        return write_one_by_one(tensors.specs, tensors, self._folder), "", "", {}

    def write_whole(self, fell_back: bool) -> Written:
        """Write all weights of the latest delta."""
        return self._written(self._delta.whole(fell_back=fell_back))

    def _written(self, encoded: Encoded) -> Written:
        path = write_encoded(encoded, self._folder)
        return path, encoded.content, encoded.header.base, encoded.metrics

    def keep(self, path: str) -> str:
        """Retain a file until the next one.

        In memory of this machine it loses its name, so that the kernel frees it with this process,
        however that ends.

        Returns:
            The path by which processes of this user find it from now on.
        """
        self._drop()
        if self._folder:
            self._retained_file = path, None
        else:
            descriptor = os.open(path, os.O_RDWR)
            remove_weights(path)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            self._retained_file = path, descriptor
        return path

    def remove(self, path: str) -> None:
        if path == self._retained_file[0]:
            self._drop()
        else:
            remove_weights(path)

    def _drop(self) -> None:
        path, descriptor = self._retained_file
        self._retained_file = ("", None)
        if descriptor is not None:
            os.close(descriptor)
        elif path:
            remove_weights(path)


def read_file(path: str) -> tuple[dict[str, Tensor], dict[str, str], WeightsHeader]:
    """Tensors, digests, and the header."""
    weights = read_weights(path)
    digests, header = read_metadata(path)
    return weights, digests, header


def read_metadata(path: str) -> tuple[dict[str, str], WeightsHeader]:
    """The digest of each tensor before it was written, by name, and the header."""
    with safe_open(path, framework="pt") as file:
        digests = dict(file.metadata() or {})
    return digests, WeightsHeader(**json.loads(digests.pop(HEADER_KEY, "{}")))


def write_encoded(encoded: Encoded, folder: str = "") -> str:
    """Write weights with their digests and header; returns the path."""
    header = json.dumps(encoded.header.message())
    return write_weights(encoded.tensors, folder, encoded.digests | {HEADER_KEY: header})


def directories() -> tuple[Path, ...]:
    """Shared memory if the system has it, then the folder for temporary files."""
    shm = Path("/dev/shm")
    temporary = Path(tempfile.gettempdir())
    if os.access(shm, os.W_OK):
        return (shm, temporary)
    return (temporary,)


def write_weights(
    weights: Mapping[str, Tensor], folder: str = "", metadata: Mapping[str, str] | None = None
) -> str:
    """Write tensors that are all there; see ``write_one_by_one``."""
    return write_one_by_one(specs_of(weights), weights.items(), folder, metadata)


def write_one_by_one(
    specs: TensorSpecs,
    weights: Iterable[tuple[str, Tensor]],
    folder: str = "",
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write full tensors as they come, in the dtypes of ``specs``, and return the file's path.

    Args:
        folder: of several machines; empty is memory of this one.
        metadata: text stored with them; by default their digests.

    Raises:
        UserError: if there is no space for them.
    """
    sweep(folder)
    if folder:
        target = Path(folder)
    else:
        target = _with_space(sum(map(bytes_of, specs.values())))
    writer = f"{os.getpid()}-{_namespace(folder)}"
    unique = uuid.uuid4().hex[:8]
    path = target / f"{PREFIX}{writer}-{unique}.safetensors"
    scratch = path.with_suffix(".writing")
    try:
        scratch.touch(OWNER_ALONE)  # before the first byte: no other user may read it
        with writing(scratch, specs, metadata) as file:
            for name, tensor in weights:
                file.put(name, tensor)
        scratch.rename(path)
    finally:
        scratch.unlink(missing_ok=True)
    return str(path)


def _with_space(size: int) -> Path:
    """The first directory with more than ``size`` bytes: a container's shm may have 64 MB."""
    free = {path: shutil.disk_usage(path).free for path in directories()}
    for path, space in free.items():
        if space > size:
            return path
    spaces = [f"{path} has {space >> 20} MiB" for path, space in free.items()]
    raise UserError(
        f"the weights take {size >> 20} MiB on their way to the engines; free: {', '.join(spaces)}"
    )


def read_weights(path: str) -> dict[str, Tensor]:
    """The tensors of a file, mapped rather than copied where the system can.

    Raises:
        FileNotFoundError: if it is not there; most likely its writer runs on another machine.
    """
    if not Path(path).exists():
        raise missing_file_error(path)
    return load_file(path)


def missing_file_error(path: str) -> FileNotFoundError:
    """The error for weights that this machine does not have."""
    if path.startswith("/proc/") and not Path(path).parent.exists():  # memory of a process
        return FileNotFoundError(
            f"{path} is gone: the process that had these weights in its memory has ended"
        )
    return FileNotFoundError(
        f"{path} is not on {socket.gethostname()}: generator.weight_sync_backend=shared_memory reaches other machines "
        f"for engines that the run has started on nodes of its Ray cluster; servers of generator.engines need a folder "
        f"that both see (generator.weight_sync_dir), and GPUs may have generator.weight_sync_backend=nccl"
    )


def remove_weights(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def sweep(folder: str = "") -> None:
    """Remove files whose writer has ended, as far as this process can know and may remove them.

    Containers may share the memory but not the numbers of processes, so those of other namespaces
    are left alone.
    """
    folders = (Path(folder),) if folder else directories()
    for directory in folders:
        for path in directory.glob(f"{PREFIX}*-{_namespace(folder)}-*"):
            writer = path.name.removeprefix(PREFIX).split("-")[0]
            if writer.isdigit() and not _process_exists(int(writer)):
                # It may be another user's, or just have been removed by another process.
                with contextlib.suppress(OSError):
                    path.unlink()


def _process_exists(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    return True


def _namespace(folder: str = "") -> str:
    """The name of a space in which a process's number is unique."""
    namespace = ""  # of a system that has only one
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid").removeprefix("pid:[").removesuffix("]")
    if folder:  # it may have writers of other machines; "-" separates the file name's fields
        return f"{namespace}@{socket.gethostname().replace('-', '_')}"
    return namespace


class TensorFile:
    """A safetensors file that is being written.

    Args:
        specs: of all tensors that will be put, in any order.
        metadata: text stored with them; None: their digests.
    """

    def __init__(
        self, file: BinaryIO, specs: TensorSpecs, metadata: Mapping[str, str] | None
    ) -> None:
        self._file = file
        self._specs = specs
        self._with_digests = metadata is None
        if metadata is None:
            self._metadata = dict.fromkeys(specs, PENDING_DIGEST)
        else:
            self._metadata = dict(metadata)
        self._missing = set(specs)
        self._offsets = self._write_header()

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor in the dtype of its spec."""
        dtype, shape = self._specs[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has the shape {list(tensor.shape)}; expected {list(shape)}")
        self._file.seek(self._offsets[name])
        hasher = xxhash.xxh3_64()
        elements = tensor.detach().cpu().reshape(-1)
        for start in range(0, len(elements), PIECE):
            piece = elements[start : start + PIECE].to(dtype)
            data = piece.view(torch.uint8).numpy().data  # NumPy has no bfloat16
            self._file.write(data)
            if self._with_digests:
                hasher.update(data)
        if self._with_digests:
            self._metadata[name] = hasher.hexdigest()
        self._missing.discard(name)

    def finish(self) -> None:
        if self._missing:
            raise ValueError(f"tensors are missing: {sorted(self._missing)[:3]}")
        if self._with_digests:
            self._file.seek(0)
            self._write_header()

    def _write_header(self) -> dict[str, int]:
        """Write the safetensors header; returns the offset of each tensor in the file."""
        entries: dict[str, object] = {}
        if self._metadata:
            entries["__metadata__"] = self._metadata
        offsets = {}
        end = 0
        # Large elements first, so that all are aligned; by name, so that the layout is unique.
        for name in sorted(self._specs, key=self._file_order):
            dtype, shape = self._specs[name]
            offsets[name] = end
            end += bytes_of(self._specs[name])
            entries[name] = {
                "dtype": _DTYPE_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [offsets[name], end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the format's padding: the data begins aligned
        self._file.write(len(text).to_bytes(8, "little") + text)
        data_start = 8 + len(text)
        return {name: data_start + offset for name, offset in offsets.items()}

    def _file_order(self, name: str) -> tuple[int, str]:
        dtype, _ = self._specs[name]
        return -dtype.itemsize, name


@contextmanager
def writing(
    path: Path, specs: TensorSpecs, metadata: Mapping[str, str] | None = None
) -> Iterator[TensorFile]:
    """The file is complete when this ends without an error."""
    with open(path, "wb") as file:
        tensors = TensorFile(file, specs, metadata)
        yield tensors
        tensors.finish()

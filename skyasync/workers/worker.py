"""One rank of a role: the calls that every role has.

Invariant: all ranks of a role get the same calls in the same order, one at a time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import torch
from torch.profiler import ProfilerActivity, profile

from skyasync.config.schema import Config
from skyasync.models.backend import LOOPBACK, ModelBackend, SaveResult
from skyasync.utils import manifest
from skyasync.utils.manifest import Sums
from skyasync.workers.roles import ROLES

_PROFILE_ROWS = 40  # of the table: the longest operations


class Worker:
    """One rank of a role, in plain Python: the dispatch makes it an actor, a test may call it.

    A role without a model adds its methods to this class. For a batch they return a tensor,
    ``[batch, length]`` or ``[batch]``, on the CPU: of this rank's rows, which may be none.

    Args:
        device: "cpu" or "cuda".
        threads: CPU threads of this rank; 0 leaves the library's default.
        role: the name of its entry in the table, if several entries have this class.
        total_steps: optimizer steps of the run, for decaying learning rates; 0 if not known.

    Attributes:
        role_name: the name of its entry in the table.
        backends: its models, if it has any.
    """

    role_name: ClassVar[str] = ""

    def __init__(
        self,
        cfg: Config,
        rank: int = 0,
        world_size: int = 1,
        device: str = "cpu",
        threads: int = 0,
        *,
        role: str = "",
        total_steps: int = 0,
    ) -> None:
        self.cfg = cfg
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self.role = ROLES[role or self.role_name]
        self.settings = self.role.settings(cfg)
        self.total_steps = total_steps
        self.backends: list[ModelBackend] = []
        if threads:
            torch.set_num_threads(threads)

    def node(self) -> tuple[str, str]:
        """Identity and address of this rank's Ray node."""
        import ray  # the rest of a worker runs without it

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def open_rendezvous(self, host: str) -> int:
        """Listen for the other ranks on a port of ``host``, which is returned (rank 0).

        0: the ranks need not find each other.
        """
        return 0

    def setup(self, host: str = LOOPBACK, port: int = 0) -> None:
        """Load its models, on all ranks at once."""

    def hidden_size(self) -> int:
        """The hidden size of its model, by which rows are divided; 0: by their tokens."""
        if self.backends:
            return self.backends[0].hidden_size
        return 0

    def shares_prefixes(self) -> bool:
        """Whether its model computes shared prefixes of rows once."""
        return bool(self.backends) and self.backends[0].shares_prefixes

    def begin_profile(self) -> None:
        """Record the work of this rank from here on."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()

    def end_profile(self, folder: str) -> None:
        """Write the recorded work into a folder.

        ``<role>_rank<n>.json`` is a trace for Perfetto, ``.txt`` a table of the longest operations.
        """
        self._profile.stop()
        path = Path(folder)
        name = f"{self.role.name}_rank{self.rank}"
        path.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(path / f"{name}.json"))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        averages = self._profile.key_averages()
        table = averages.table(sort_by=f"self_{device}_time_total", row_limit=_PROFILE_ROWS)
        (path / f"{name}.txt").write_text(table, encoding="utf-8")

    def ready(self) -> int:
        """The process id, after the earlier calls are done."""
        return os.getpid()

    def offload(self) -> None:
        """Move device memory to host memory, for other processes that need the device."""
        for backend in self.backends:
            backend.offload()

    def onload(self) -> None:
        """Undo ``offload``."""
        for backend in self.backends:
            backend.onload()

    def save(self, folder: str) -> SaveResult | None:
        """Write the state that training changes into an empty folder. Called if the role trains.

        A full disk may be reported as ``SaveResult.problem``: an error ends all ranks.
        """
        raise NotImplementedError(
            f"the role {self.role.name} trains, and its worker cannot save what it has learned"
        )

    def begin_save(self, folder: str) -> None:
        """Begin a ``save``, in the background if the worker can; ``saved`` has the result."""
        self._save_result = self.save(folder) or SaveResult()

    def saved(self) -> SaveResult | None:
        """The result of the latest ``begin_save``; None while it is being written."""
        return self._save_result

    def verify(self, folder: str, sums: Sums) -> list[str]:
        """The problems of a checkpoint's files; each rank reads its share of them."""
        rank_sums = dict(sorted(sums.items())[self.rank :: self.world_size])
        return list(manifest.damage(Path(folder), rank_sums))

    def load(self, folder: str) -> None:
        """Read a folder of ``save``, which any number of ranks wrote."""
        raise NotImplementedError(
            f"the role {self.role.name} trains, and its worker cannot load what it has learned"
        )

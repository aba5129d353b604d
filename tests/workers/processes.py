"""Ranks in processes without Ray: forks of a process that has imported the libraries (``tests.fork_server``).

A function of a test module is called on all ranks at once, with the rank's ``Rank`` first. The error of one rank is
raised here; the other ranks, which may wait for it in a collective, are then killed, and the next call starts new ones.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from skyasync.config.schema import Config
from skyasync.workers.model_worker import LOOPBACK, ModelWorker
from tests.fork_server import fork_spawned_processes

ANSWER_S = 120.0
REMAINING_S = 2.0


@dataclass
class Rank:
    """The state that a rank's process keeps from call to call."""

    rank: int
    count: int
    worker: Any = None
    notes: dict[str, Any] = field(default_factory=dict)


class Ranks:
    """``count`` processes; started when first called.

    Args:
        fork_socket: address of the fork server.
    """

    def __init__(self, count: int, fork_socket: Path) -> None:
        self.count, self._fork_socket = count, fork_socket
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The answers of all ranks, in their order.

        Raises:
            AssertionError: with the traceback of the first rank that failed.
        """
        if not all(process.is_alive() for process in self._processes):
            self.close()  # an earlier test has lost a rank
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while len(answers) + len(errors) < self.count:
            waiting = [p for i, p in enumerate(self._pipes) if i not in answers and i not in errors]
            ready = wait(waiting, REMAINING_S if errors else ANSWER_S)
            if not ready:
                errors.setdefault(
                    -1, f"ranks {[self._pipes.index(p) for p in waiting]} gave no answer"
                )
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    good, answer = pipe.recv()
                except EOFError:
                    self._processes[rank].join()
                    good, answer = False, f"its process ended with {self._processes[rank].exitcode}"
                (answers if good else errors)[rank] = answer
        if errors:
            if len(answers) + len(errors) < self.count or -1 in errors:
                self.close()
            raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, text in errors.items()))
        return [answers[rank] for rank in range(self.count)]

    def set_up(self, worker: type[ModelWorker], cfg: Config, **options: Any) -> None:
        """Every rank creates a worker, which connects to the others as in Ray."""
        port = self.call(_make, worker, cfg, options)[0]
        self.call(_set_up, port)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(self.count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, self.count), daemon=True)
            with fork_spawned_processes(self._fork_socket):
                process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)


def _serve(pipe: Connection, rank: int, count: int) -> None:
    state = Rank(rank, count)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(state, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _make(state: Rank, worker: type[ModelWorker], cfg: Config, options: dict[str, Any]) -> int:
    if dist.is_initialized():
        dist.destroy_process_group()
    state.notes = {}
    state.worker = worker(cfg, rank=state.rank, world_size=state.count, threads=1, **options)
    return state.worker.open_rendezvous(LOOPBACK) if state.rank == 0 and state.count > 1 else 0


def _set_up(state: Rank, port: int) -> None:
    state.worker.setup(LOOPBACK, port)

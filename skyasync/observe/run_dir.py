"""The folder of one run: who writes what where.

Invariant: two runs never share a folder unless the second one says that it resumes the first. A resumed
run replaces what the interrupted one had written beyond the point of resuming; nothing is doubled.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyasync.config.secrets import Secrets
from skyasync.errors import UserError
from skyasync.observe import jsonl

log = logging.getLogger(__name__)

OWNER_ALONE = 0o700  # prompts, samples and weights are nobody else's to read


def default_run_name(plan: str) -> str:
    """``one_step_off-20260801-142305``: sorts by plan, then by local time."""
    return f"{plan}-{time.strftime('%Y%m%d-%H%M%S')}"


def shown(path: Path) -> str:
    """As a person in the working folder would name it: from there if it is inside, else whole."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def check_name(root: Path | str, name: str) -> Path:
    """The absolute ``root``.

    Raises:
        UserError: for a name that is empty or leads out of it.
    """
    root = Path(root).expanduser().resolve()
    if not name.strip() or not (root / name).resolve().is_relative_to(root) or (root / name).resolve() == root:
        raise UserError(f"run name {name!r} must name a folder inside {root}")
    return root


class RunDirectory:
    """``<root>/<name>/``, made on construction.

    Args:
        root: the folder that holds the runs.
        name: the run's name; where it is taken, ``-2``, ``-3``, ... is added.
        resume: use exactly ``name``, whether it exists or not.

    Attributes:
        secrets: what is seen in none of its files.

    Raises:
        UserError: for a name that is empty or leads out of ``root``.
    """

    def __init__(self, root: Path | str, name: str, *, resume: bool = False) -> None:
        root = check_name(root, name)
        self._new = not (resume and (root / name).exists())
        self.path = _existing(root / name) if resume else _unused(root / name)
        self.secrets = Secrets()
        self._rewound: set[Path] = set()  # files that go on behind the step at which this run began
        self._ledger_due: list[tuple[int, Mapping[str, Any]]] = []  # not written yet, in the order of steps

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def origins(self) -> Path:
        """Which settings are whose; see ``skyasync.config.load.origins``."""
        return self.path / "origins.json"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def ledger(self) -> Path:
        """How every prompt ended; see ``skyasync.trainer.checkpoint.ledger.audit``."""
        return self.path / "ledger.jsonl"

    @property
    def timeline(self) -> Path:
        return self.path / "timeline.json"

    @property
    def reward_plot(self) -> Path:
        return self.path / "reward.png"

    @property
    def logs(self) -> Path:
        """What the run's processes have printed."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def error(self) -> Path:
        """What ended the run, if an error did: the whole traceback."""
        return self.path / "error.txt"

    def save_error(self, traceback: str) -> None:
        """A disk that does not take it is a line: the error itself is on its way to the user."""
        try:
            self.error.write_text(self.secrets.hide_all(traceback), encoding="utf-8")
        except OSError as problem:
            with suppress(OSError):
                self.error.unlink(missing_ok=True)
            log.warning("%s was not written: %s", shown(self.error), problem)

    def discard(self) -> None:
        """Take the folder away again, if it is new: the run has not begun."""
        if self._new:
            shutil.rmtree(self.path, ignore_errors=True)

    def save_config(self, yaml: str) -> None:
        """Write the resolved configuration; a resumed run's replaces the first one's."""
        jsonl.replace_text(self.config, yaml)

    def write_samples(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Append one line per record, ``step`` first."""
        self._append(self.samples, step, map(self._hide, records))

    def write_ledger(self, step: int, ended: Mapping[str, Any]) -> None:
        """How the prompts of a step ended; what the disk does not take is written with a later step's."""
        self._ledger_due.append((step, ended))
        while self._ledger_due:
            due, how = self._ledger_due[0]
            self._append(self.ledger, due, [how])
            self._ledger_due.pop(0)

    def _hide(self, record: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.secrets.hide(value) if isinstance(value, str) else value for name, value in record.items()}

    def _append(self, file: Path, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """The first call of a resumed run drops the lines of ``step`` and later ones: those steps are redone."""
        if file not in self._rewound:
            jsonl.keep_rows(file, lambda row: row["step"] < step)
            self._rewound.add(file)
        jsonl.append_rows(file, ({"step": step, **record} for record in records))


def _existing(path: Path) -> Path:
    path.mkdir(OWNER_ALONE, parents=True, exist_ok=True)
    return path


def _unused(path: Path) -> Path:
    """The first of ``path``, ``path-2``, ... that this call created: safe when two runs start at once."""
    for number in itertools.count(1):
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            candidate.mkdir(OWNER_ALONE, parents=True)
        except FileExistsError:
            continue
        return candidate
    raise AssertionError("unreachable")

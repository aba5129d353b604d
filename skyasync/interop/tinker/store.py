"""Sessions, models, training requests with their results, and checkpoints, in one SQLite file.

Invariant: a training request is stored before its id is answered. Its result is stored in the same
transaction as the model's state after it. So a server that starts again repeats the requests since
a model's last state, and none of them has an effect twice.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

SCHEMA = """
create table if not exists sessions (id text primary key, about text, created real);
create table if not exists models (
    id text primary key, session text, rank integer, seed integer, about text, created real, used real,
    state_seq integer default -1, state text default '');
create table if not exists requests (
    id text primary key, model text, seq integer, kind text, payload blob, result blob, ok integer, retrieved integer
    default 0, attempts integer default 0);
create index if not exists by_model on requests (model, seq);
create table if not exists samplers (id text primary key, session text, number integer, snapshot text);
create table if not exists checkpoints (
    path text primary key, number integer, model text, kind text, folder text, rank integer, named integer,
    created real, expires real, about text);
"""
RETAINED_RESULTS = 64
"""Requests of a model after which a retrieved result is deleted: an answer may be lost on its way,
and the client retrieves it again."""


class StoredRequest(NamedTuple):
    """A training request.

    Args:
        attempts: servers that have begun it. While it has no result, all of them but the present
            one were lost.
    """

    id: str
    seq: int
    kind: str
    payload: bytes
    result: bytes | None
    ok: bool
    attempts: int = 0


class Checkpoint(NamedTuple):
    """Saved adapters, with the columns of their table.

    Args:
        number: its policy version.
        kind: weights, sampler_weights or external_weights.
        named: the client has named it; otherwise it is a snapshot for a sampler.
        metadata: the client's ``user_metadata``.
    """

    path: str
    number: int
    model: str
    kind: str
    folder: str
    rank: int
    named: bool
    created: float
    expires: float | None
    metadata: dict[str, str] | None


class Store:
    """The tables of a server.

    Args:
        folder: the server's; the file and the checkpoints are in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._database = sqlite3.connect(folder / "tinker.sqlite", check_same_thread=False)
        self._database.row_factory = sqlite3.Row
        self._database.execute("pragma journal_mode=wal")  # commits without rewriting the file
        self._database.executescript(SCHEMA)
        columns = [row["name"] for row in self._rows("pragma table_info(requests)")]
        if "attempts" not in columns:  # a file of an earlier release
            self._database.execute("alter table requests add column attempts integer default 0")
        self._version = 0  # of this server's newest checkpoint

    def close(self) -> None:
        self._database.close()

    def _write(self, statement: str, *values: object) -> None:
        with self._database:
            self._database.execute(statement, values)

    def _rows(self, statement: str, *values: object) -> list[sqlite3.Row]:
        return self._database.execute(statement, values).fetchall()

    # ---------------------------------------------------------------- sessions and samplers

    def add_session(self, session: str, metadata: Mapping[str, Any]) -> None:
        text = json.dumps(dict(metadata))
        self._write("insert into sessions values (?, ?, ?)", session, text, time.time())

    def sessions(self, offset: int, limit: int) -> list[str]:
        """The ids of a page, the newest session first."""
        rows = self._rows(
            "select id from sessions order by rowid desc limit ? offset ?", limit, offset
        )
        return [row["id"] for row in rows]

    def has_session(self, session: str) -> bool:
        return bool(self._rows("select 1 from sessions where id = ?", session))

    def session(self, session: str) -> dict[str, Any]:
        """The session's metadata. Raises ``KeyError`` if there is no such session."""
        for row in self._rows("select about from sessions where id = ?", session):
            metadata: dict[str, Any] = json.loads(row["about"])
            return metadata
        raise KeyError(session)

    def add_sampler(self, sampler: str, session: str, number: int, snapshot: str) -> None:
        """Add a sampler, unless the client has repeated its request.

        Args:
            snapshot: the folder of its checkpoint; "" samples from the base model.
        """
        statement = "insert or ignore into samplers values (?, ?, ?, ?)"
        self._write(statement, sampler, session, number, snapshot)

    def samplers(self, session: str) -> list[str]:
        rows = self._rows("select id from samplers where session = ?", session)
        return [row["id"] for row in rows]

    def snapshot(self, sampler: str) -> str | None:
        """The folder of a sampler's checkpoint; None if there is no such sampler."""
        rows = self._rows("select snapshot from samplers where id = ?", sampler)
        if rows:
            return rows[0]["snapshot"]
        return None

    # ---------------------------------------------------------------- models and their requests

    def add_model(
        self, model: str, session: str, rank: int, seed: int, metadata: Mapping[str, Any]
    ) -> None:
        now = time.time()
        text = json.dumps(dict(metadata))
        names = "id, session, rank, seed, about, created, used"
        statement = f"insert or ignore into models ({names}) values (?, ?, ?, ?, ?, ?, ?)"
        self._write(statement, model, session, rank, seed, text, now, now)

    def models(self, session: str = "") -> list[dict[str, Any]]:
        """All models, or those of a session; the newest first."""
        if session:
            rows = self._rows("select * from models where session = ? order by rowid desc", session)
        else:
            rows = self._rows("select * from models order by rowid desc")
        return [_read(row) for row in rows]

    def model(self, model: str) -> dict[str, Any]:
        """Raises ``KeyError`` if there is no such model."""
        for row in self._rows("select * from models where id = ?", model):
            return _read(row)
        raise KeyError(model)

    def add_request(self, request: str, model: str, seq: int, kind: str, payload: bytes) -> None:
        names = "id, model, seq, kind, payload"
        statement = f"insert or ignore into requests ({names}) values (?, ?, ?, ?, ?)"
        self._write(statement, request, model, seq, kind, payload)

    def request(self, request: str) -> StoredRequest | None:
        requests = self._requests("id = ?", request)
        return requests[0] if requests else None

    def count_attempt(self, request: str, number: int) -> None:
        """Count a server that begins a request (1), or that leaves it to the next server (-1)."""
        self._write("update requests set attempts = attempts + ? where id = ?", number, request)

    def unfinished(self) -> list[str]:
        """The models that have requests without a result."""
        rows = self._rows("select distinct model from requests where result is null")
        return [row["model"] for row in rows]

    def since_state(self, model: str) -> list[StoredRequest]:
        """The successful requests of the model since its last state, in order."""
        state = "(select state_seq from models where id = model)"
        return self._requests(f"model = ? and ok = 1 and seq > {state}", model)

    def last_finished(self, model: str) -> int:
        """The sequence id of the last request that has a result; -1 if none has."""
        # Results before the last state may be deleted: the state's own request counts as well.
        finished = "select max(seq) from requests where model = ? and result is not null"
        [(state_seq, result_seq)] = self._rows(
            f"select (select state_seq from models where id = ?), ({finished})", model, model
        )
        return max(state_seq, -1 if result_seq is None else result_seq)

    def _requests(self, condition: str, *values: object) -> list[StoredRequest]:
        names = ", ".join(StoredRequest._fields)
        rows = self._rows(f"select {names} from requests where {condition} order by seq", *values)
        return [StoredRequest(*row)._replace(ok=bool(row["ok"])) for row in rows]

    def finish(
        self,
        request: StoredRequest,
        model: str,
        result: bytes,
        *,
        ok: bool,
        state: str = "",
        checkpoint: Checkpoint | None = None,
    ) -> str:
        """Store a result.

        Args:
            state: the folder of the model's state after this request, if it was saved.
            checkpoint: the checkpoint that the request has made; it replaces one of the same path.

        Returns:
            A folder that can be deleted, "" if there is none.
        """
        obsolete = ""
        with self._database as database:  # one transaction
            database.execute(
                "update requests set result = ?, ok = ? where id = ?", (result, ok, request.id)
            )
            database.execute("update models set used = ? where id = ?", (time.time(), model))
            if state:
                [[obsolete]] = self._rows("select state from models where id = ?", model)
                database.execute(
                    "update models set state = ?, state_seq = ? where id = ?",
                    (state, request.seq, model),
                )
                # Requests before a state are not repeated: their payloads are large.
                database.execute(
                    "update requests set payload = x'' "
                    "where model = ? and seq <= ? and result is not null",
                    (model, request.seq),
                )
                database.execute(
                    "delete from requests where model = ? and seq <= ? and retrieved = 1",
                    (model, request.seq - RETAINED_RESULTS),
                )
            if checkpoint is not None:
                replaced = self._rows(
                    "select folder from checkpoints where path = ?", checkpoint.path
                )
                for row in replaced:
                    obsolete = row["folder"]
                values = (*checkpoint[:-1], json.dumps(checkpoint.metadata))
                database.execute(
                    "insert or replace into checkpoints values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    values,
                )
        return str(obsolete)

    def retrieved(self, request: str) -> None:
        """Note that the client has retrieved a result."""
        self._write("update requests set retrieved = 1 where id = ?", request)

    # ---------------------------------------------------------------- checkpoints

    def next_version(self) -> int:
        """A new policy version.

        A version is never used twice, also after its checkpoint was removed: engines may still
        have its weights.
        """
        [(number,)] = self._rows("select coalesce(max(number), 0) from checkpoints")
        self._version = max(self._version, int(number)) + 1
        return self._version

    def expire(self, path: str, expires: float | None) -> None:
        self._write("update checkpoints set expires = ? where path = ?", expires, path)

    def checkpoint(self, name: str) -> Checkpoint | None:
        """The checkpoint with this path or this folder.

        A checkpoint that replaces another one of its path has a new folder.
        """
        rows = self._rows("select * from checkpoints where path = ? or folder = ?", name, name)
        checkpoints = self._unexpired(rows)
        return checkpoints[0] if checkpoints else None

    def checkpoints(self, model: str = "", *, named: bool | None = None) -> list[Checkpoint]:
        """Checkpoints that have not expired, the oldest first.

        Expired ones are removed with their files.
        """
        checkpoints = []
        rows = self._rows("select * from checkpoints order by created, number")
        for checkpoint in self._unexpired(rows):
            if model in ("", checkpoint.model) and named in (None, checkpoint.named):
                checkpoints.append(checkpoint)
        return checkpoints

    def _unexpired(self, rows: list[sqlite3.Row]) -> list[Checkpoint]:
        checkpoints = []
        for row in rows:
            checkpoint = Checkpoint(*row)._replace(metadata=json.loads(row["about"]))
            if checkpoint.expires is not None and checkpoint.expires < time.time():
                self.remove_checkpoint(checkpoint)
            else:
                checkpoints.append(checkpoint)
        return checkpoints

    def remove_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._write("delete from checkpoints where path = ?", checkpoint.path)
        shutil.rmtree(checkpoint.folder, ignore_errors=True)  # a folder without a row is never read


def _read(row: sqlite3.Row) -> dict[str, Any]:
    return {**dict(row), "about": json.loads(row["about"])}

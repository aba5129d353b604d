"""Streamed data: the same prompts as of loaded data, in an order determined by the seed, resumable anywhere."""

from __future__ import annotations

import itertools
import json
import logging
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync import load_config
from skyasync.config.schema import Config
from skyasync.data import sources
from skyasync.data.datasets import stream_prompts
from skyasync.data.prompts import PromptStream
from skyasync.data.sources import InterleavedSources, reader
from skyasync.data.stream import BlockStream, StreamedPrompts
from skyasync.errors import UserError
from skyasync.preflight.data import check_data
from skyasync.rollout.types import Prompt, PromptId
from tests.rollout.episodes import tokenizer

HERE = "tests.data.test_stream"
ROWS = [{"prompt": f"sort {number}", "answer": number} for number in range(50)]


def without_end() -> Iterator[dict[str, Any]]:
    return ({"prompt": f"q{number}"} for number in itertools.count())


def fifty() -> Iterator[dict[str, Any]]:
    return iter(ROWS)


def long_ones() -> list[dict[str, Any]]:
    return [{"prompt": "far too long " * 99} for _ in range(20)]


def configured(source: str, *more: str) -> Config:
    given = ["trainer.policy.model.path=m", "environment.env_class=e"]
    if not any("data.streaming" in each for each in more):
        given.append("data.streaming=true")
    if not any("max_training_steps" in each for each in more):
        given.append("trainer.max_training_steps=9")
    return load_config([*given, f"data.train_data=[{source}]", *more])


# ---------------------------------------------------------------- lines that are not rows

WRONG_LINES = {
    "list": (b"[1, 2]", "data row 2 is not an object with columns; found '[1, 2]'"),
    "number": (b"7", "data row 2 is not an object with columns; found '7'"),
    "deep": (b"[" * 200_000 + b"]" * 200_000, "row 2 is nested too deeply"),
    "half": (b'{"prompt": "x', "row 2 is not valid JSON: "),
    "bytes": (b'{"prompt": "\xff"}', "row 2 is not UTF-8: invalid start byte"),
}  # fmt: skip


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("kind", WRONG_LINES)
def test_a_line_that_is_no_row_is_one_line_that_names_it(
    kind: str, streaming: bool, tmp_path: Path
) -> None:
    line, message = WRONG_LINES[kind]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n\n{"prompt": "b"}\n' + line + b'\n{"prompt": "c"}\n')
    cfg = configured(str(file), f"data.streaming={str(streaming).lower()}")
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        if streaming:
            stream_prompts(cfg.data.train_data, cfg, tokenizer())
        else:
            list(*check_data(cfg, {}, train=True, evaluate=False))
    assert "\n" not in str(raised.value)


def test_text_with_line_separators_of_unicode_is_one_row(tmp_path: Path) -> None:
    rows = [{"prompt": f"before{separator}after"} for separator in "\u2028\u2029\x85"]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    assert list(reader(str(file), configured(str(file)))(0)) == rows
    assert [
        dict(row) for row in sources.rows(str(file), configured(str(file)), is_eval=False)
    ] == rows


# ---------------------------------------------------------------- reading from any row


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=7)
    (tmp_path / "rows.jsonl").write_text("\n\n".join(map(json.dumps, ROWS)) + "\n")
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "test.jsonl").write_text('{"prompt": "held out", "answer": 0}\n')
    return {
        "parquet": str(tmp_path / "rows.parquet"), "jsonl": str(tmp_path / "rows.jsonl"),
        "saved": str(tmp_path / "saved"), "folder": str(folder), "function": f"{HERE}:fifty",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "saved", "folder", "function"])
def test_a_source_reads_on_from_any_row(
    kind: str,
    files: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sources, "OFFSET_INTERVAL", 8)
    monkeypatch.setattr(sources, "ROWS_AT_ONCE", 3)
    read = reader(files[kind], configured(files[kind]))
    for start in (0, 1, 6, 7, 30, 49, 50, 20):
        assert [dict(row) for row in read(start)] == ROWS[start:]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 7))
def test_sources_take_turns_and_what_they_have_given_finds_the_place_again(
    sizes: list[int], count: int
) -> None:
    def reads() -> list[Any]:
        return [lambda start, n=n, size=size: iter([{"n": n, "i": i} for i in range(start, size)])
                for n, size in enumerate(sizes)]  # fmt: skip

    source, found, positions = InterleavedSources(reads()), list[dict[str, Any]](), []
    while True:
        positions.append((len(found), source.rows_read))
        rows = source.take(count)
        found += rows
        if len(rows) < count:
            break
    assert sorted((row["n"], row["i"]) for row in found) == [
        (n, i) for n, size in enumerate(sizes) for i in range(size)
    ]
    first = [row["n"] for row in found if row["i"] == 0]
    assert found[: len(first)] == [
        {"n": n, "i": 0} for n in first
    ]  # one of each before the second of any
    for after, given_then in positions:
        other = InterleavedSources(reads())
        other.seek(given_then)
        assert other.take(99) == found[after:]


@pytest.mark.parametrize(
    ("write", "source", "problem"),
    [
        ('[{"prompt": "a"}]', "{}/a.json", "is one JSON list; write it as JSON lines"),
        ('{"prompt": "a"}\n{"pro', "{}/a.jsonl", "cannot be read"),
        ("not parquet", "{}/a.parquet", "cannot be read"),
        (None, "{}/a.jsonl", "does not exist"),
        (None, "owner/name:train[:10]", "asks for a slice"),
    ],
)
def test_what_cannot_be_streamed_is_refused_by_name(
    tmp_path: Path, write: str | None, source: str, problem: str
) -> None:
    path = source.format(tmp_path)
    if write is not None:
        Path(path).write_text(write)
    with pytest.raises(UserError, match=problem):
        list(reader(path, Config())(0))


# ---------------------------------------------------------------- the stream


class Rows:
    """Counts the rows in memory."""

    def __init__(self, size: int, left_out: frozenset[int] = frozenset()) -> None:
        self.size, self.left_out, self.opened = size, left_out, 0

    def read(self, start: int) -> Iterator[dict[str, Any]]:
        self.opened += 1
        return ({"number": number} for number in range(start, self.size))

    def as_prompts(self, first: int, rows: Any) -> list[Prompt]:
        numbered = enumerate(rows, first)
        return [
            Prompt(PromptId(0, n), [], "e", row)
            for n, row in numbered
            if row["number"] not in self.left_out
        ]

    def stream(
        self, buffer: int, batch: int = 3, seed: int = 1, total: int = 60, window: int = 0
    ) -> BlockStream:
        return BlockStream(
            StreamedPrompts([self.read], self.as_prompts, buffer), batch, seed, total, window
        )


SIZES = {"size": st.integers(1, 25), "buffer": st.integers(1, 30), "seed": st.integers(0, 3)}
POSITIONS = {
    "position": st.integers(0, 70),
    "left_out": st.frozensets(st.integers(1, 24), max_size=12),
}


def ids(stream: PromptStream, position: int = 0) -> list[PromptId]:
    cursor, read = stream.cursor(position), list[PromptId]()
    while prompts := cursor.take(stream._batch_size).prompts:
        read += [prompt.id for prompt in prompts]
    return read


@given(**SIZES, left_out=POSITIONS["left_out"])
def test_each_pass_has_every_row_once_and_none_is_out_of_its_block(
    size: int, buffer: int, seed: int, left_out: frozenset[int]
) -> None:
    if buffer <= max(left_out, default=0) or 0 in left_out:
        left_out = frozenset()
    rows = Rows(size, left_out)
    found, kept = ids(rows.stream(buffer, seed=seed)), [n for n in range(size) if n not in left_out]
    assert len(found) == 60
    for epoch in range(60 // len(kept)):
        this = found[epoch * len(kept) : (epoch + 1) * len(kept)]
        assert sorted(this) == [PromptId(epoch, n) for n in kept]
        assert [identity.row // buffer for identity in this] == sorted(n // buffer for n in kept)


@settings(max_examples=40)
@given(**SIZES, **POSITIONS)
def test_a_mark_and_a_position_are_all_that_a_resumed_run_needs(
    size: int, buffer: int, seed: int, position: int, left_out: frozenset[int]
) -> None:
    if len(left_out & set(range(min(size, buffer)))) == min(size, buffer):
        left_out = frozenset()
    rows = Rows(size, left_out)
    whole = rows.stream(buffer, seed=seed)
    every = ids(whole)
    position = min(position, 59)
    resumed = rows.stream(buffer, seed=seed)
    resumed.seek(rows.stream(buffer, seed=seed).mark(position))
    assert [resumed.prompt(place).id for place in range(position, 60)] == every[position:]
    for identity in every[position:][::-1]:
        assert resumed.of_identity(identity).id == identity
    assert resumed.digest == whole.digest


@pytest.mark.parametrize("buffer", [1, 7, 50, 300])
def test_rows_are_read_once_a_pass_although_later_prompts_are_in_flight(buffer: int) -> None:
    rows = Rows(1000)
    stream = rows.stream(buffer, total=2000, window=60)
    assert stream.rows == buffer and stream.steps() == 667
    for position in range(1900):
        stream.prompt(position)
        stream.prompt(position + 60)  # in flight
    assert rows.opened <= 3  # once a pass, and of the next


def test_what_is_held_does_not_grow_with_the_data() -> None:
    class Large(Rows):
        def read(self, start: int) -> Iterator[dict[str, Any]]:
            return ({"number": number, "text": bytes(10_000)} for number in range(start, self.size))

    stream = Large(5000).stream(100, total=5000)  # 50 MB, in blocks of 1 MB
    tracemalloc.start()
    ids(stream)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6


@pytest.mark.parametrize("buffer", [5, 7, 20])
def test_a_source_that_gives_its_rows_once_is_an_error_at_the_next_pass(buffer: int) -> None:
    class Once(Rows):
        def read(self, start: int) -> Iterator[dict[str, Any]]:
            return iter(()) if self.opened else super().read(start)

    stream = Once(20).stream(buffer, total=40)
    assert len({stream.prompt(position).id for position in range(20)}) == 20
    with pytest.raises(
        UserError, match="no rows in pass 2: a function must give its rows each time"
    ):
        stream.prompt(20)


def test_another_order_than_the_checkpoints_is_refused() -> None:
    rows = Rows(20)
    mark = rows.stream(5).mark(11)
    with pytest.raises(UserError, match=r"data\.shuffle_buffer=5, this one has 6"):
        rows.stream(6).seek(mark)
    with pytest.raises(UserError, match=r"without data\.streaming"):
        rows.stream(5).seek([])
    held = PromptStream([Prompt(PromptId(0, 0), [], "e")], 1, 1, 1)
    with pytest.raises(UserError, match=r"data\.streaming=true"):
        held.seek(mark)


# ---------------------------------------------------------------- from a configuration


def test_a_source_without_an_end_is_streamed_and_too_long_prompts_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cfg = configured(
        f"{HERE}:without_end,{HERE}:long_ones",
        "data.shuffle_buffer=10",
        "trainer.train_batch_size=8",
    )
    with caplog.at_level(logging.WARNING):
        stream = PromptStream.of_run(cfg, stream_prompts(cfg.data.train_data, cfg, tokenizer()))
        texts = [stream.prompt(position).messages[0]["content"] for position in range(stream.total)]
    assert len(set(texts)) == 72 == stream.total and {text[0] for text in texts} == {"q"}
    assert texts != sorted(texts, key=lambda text: int(text[1:]))
    assert (
        "5 of 10 prompts so far have more than trainer.max_prompt_length=512 tokens and are left out"
        in caplog.text
    )


def test_data_without_a_prompt_that_is_short_enough_is_refused() -> None:
    cfg = configured(f"{HERE}:long_ones")
    with pytest.raises(UserError, match="has no rows whose prompt is short enough"):
        stream_prompts(cfg.data.train_data, cfg, tokenizer())


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("trainer.max_training_steps=0", "has no known end: set trainer.max_training_steps=N"),
        ("trainer.epochs=2", "trainer.epochs=2 has no effect with data.streaming=true"),
        (
            "environment.domains={a: {proportion: 0.5}}",
            "environment.domains.a.proportion needs the rows",
        ),
    ],
)
def test_what_needs_all_rows_is_refused_by_key(more: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem.replace(".", r"\.")):
        configured(f"{HERE}:fifty", more)

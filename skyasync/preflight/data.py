"""Checks of the first rows of each source: they exist, have their columns, and fit the limits.

Invariant: files are read with light libraries and no further than needed; a function of the user's
is called once, here, and its rows are the run's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path

from skyasync.config.load import origins
from skyasync.config.schema import Config
from skyasync.config.schema.data import TASK_SOURCE, eval_sources
from skyasync.data.datasets import as_prompt, check_rows
from skyasync.data.sources import FILES, HUB, Row, check_file, parse_line, rows
from skyasync.errors import UserError, unknown
from skyasync.observability.metric_names import METRICS
from skyasync.preflight.parts import check_environment, check_installed
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import Prompt

LOOKED_AT = 3  # rows of a source whose columns are checked; most errors are in all rows
# For finding a prompt that is short enough; the run's processes tokenise all prompts anyway.
PATIENCE_S = 1.0


def check_data(
    cfg: Config,
    program_rows: dict[str, Iterable[Row]],
    *,
    train: bool,
    evaluate: bool,
) -> list[Iterator[Prompt]]:
    """Check the sources of prompts.

    Args:
        program_rows: receives the rows of sources that are functions.
        train: check ``data.train_data``.
        evaluate: check ``data.val_data`` and ``data.val_sets``.

    Returns:
        The training prompts, as far as they can be read cheaply.

    Raises:
        UserError: for the first problem.
    """
    if train and not cfg.data.train_data:
        raise UserError("there are no training prompts: name data.train_data")
    if evaluate:
        check_evaluation(cfg)
    training_sources = cfg.data.train_data if train else []
    for source in training_sources:
        _check_source(source, cfg, program_rows, evaluated=False)
    if evaluate:
        for source in eval_sources(cfg.data):
            _check_source(source, cfg, program_rows, evaluated=True)
    return [_prompts(source, cfg, program_rows) for source in training_sources]


def check_evaluation(cfg: Config) -> None:
    """Raise ``UserError`` for settings of evaluation without held-out prompts."""
    trainer = cfg.trainer
    check_metric_name(trainer.ckpt_best_metric, "trainer.ckpt_best_metric")
    if eval_sources(cfg.data):
        return
    if trainer.ckpt_best_metric.startswith("eval/"):
        raise UserError(
            f"trainer.ckpt_best_metric={trainer.ckpt_best_metric} needs held-out prompts: set data.val_data or "
            f"data.val_sets"
        )
    for name in ("eval_interval", "eval_minutes"):
        path = f"trainer.{name}"
        value = getattr(trainer, name)
        if value and path in origins(cfg):  # a default is no error
            raise UserError(
                f"{path}={value:g} has no effect without held-out prompts: set data.val_data or data.val_sets, or "
                f"remove it"
            )


def check_metric_name(name: str, key: str) -> None:
    """Raise ``UserError`` for a misspelled name of a metric of evaluation.

    Other names are allowed: components may add metrics.
    """
    if not name.startswith("eval/"):
        return
    names = [metric.name for metric in METRICS if metric.name.startswith("eval/")]
    names = [metric for metric in names if "<" not in metric]  # a pattern of names
    if name in names:
        return
    similar = get_close_matches(name, names, n=1, cutoff=0.85)
    if similar:
        raise UserError(f"{key}={name}: there is no such metric: did you mean {similar[0]}?")


def check_lengths(prompts: list[Iterator[Prompt]], tokenizer: Tokenizer, cfg: Config) -> None:
    """Raises ``UserError`` if no training prompt is short enough; gives up after ``PATIENCE_S``."""
    from skyasync.rollout.chat import ChatTokenizer

    chat = ChatTokenizer(tokenizer, cfg.data.apply_chat_template)
    limit = cfg.trainer.max_prompt_length
    deadline = None
    shortest = None
    for prompt in chain.from_iterable(prompts):
        # From the first prompt on: a slow source has its own limit.
        deadline = deadline or time.monotonic() + PATIENCE_S
        length = len(chat.prompt(prompt.messages))
        if length <= limit or time.monotonic() > deadline:
            return
        shortest = min(length, shortest or length)
    if shortest is not None:
        raise UserError(
            f"no prompt has at most trainer.max_prompt_length={limit} tokens: raise it to at least {shortest}, the "
            f"shortest"
        )


def _check_source(
    source: str,
    cfg: Config,
    program_rows: dict[str, Iterable[Row]],
    *,
    evaluated: bool,
) -> None:
    """Check the columns of a source's first rows, and the environments that they name."""
    prompts = []
    for index, row in enumerate(first_rows(source, cfg, program_rows)):
        prompts.append(as_prompt(index, row, cfg))
    for prompt in prompts:
        if prompt.env_class != "agent":  # else the agent's program plays it
            check_environment(prompt.env_class)
    check_rows(prompts, cfg, is_eval=evaluated)


def first_rows(source: str, cfg: Config, program_rows: dict[str, Iterable[Row]]) -> list[Row]:
    """A few rows of a source; none if the source would have to be loaded for them.

    Args:
        program_rows: receives the rows if the source is a function.

    Raises:
        UserError: if there is no such source, or it has no rows.
    """
    if source.startswith(TASK_SOURCE):
        from skyasync.rewards import REWARDS, reasoning

        check_installed(REWARDS, "reasoning_gym")
        from reasoning_gym.factory import DATASETS

        task = source.removeprefix(TASK_SOURCE)
        tasks = DATASETS.keys() - {"composite"}
        if task not in tasks:
            raise UserError(unknown("reasoning_gym task", task, tasks))
        options = dict(cfg.data.reasoning_gym.get(task, {}))
        for name in reasoning.OURS:  # settings that the task does not have
            options.pop(name, None)
        if options:
            reasoning.make(task, options, seed=0, size=1)  # raises an error for a wrong option
        return []

    place, colon, _ = source.rpartition(":")
    if source in program_rows:  # the program's own rows
        pass
    elif place.endswith(".py") or (colon and "/" not in place):  # a function
        generated_rows = rows(source, cfg, is_eval=False)
        if cfg.data.streaming:  # it is called again for each pass, and its rows may have no end
            program_rows = {source: list(islice(generated_rows, LOOKED_AT))}
        elif isinstance(generated_rows, Sized):
            program_rows[source] = generated_rows
        else:
            program_rows[source] = list(generated_rows)
    elif Path(source).suffix not in FILES:
        folder = Path(source.partition(":")[0]).expanduser()
        if not folder.is_dir() and not HUB.fullmatch(source):
            rows(source, cfg, is_eval=False)  # raises an error with similar names
        return []
    leading_rows = list(islice(_rows(source, program_rows), LOOKED_AT))
    if not leading_rows:
        raise UserError(f"data source {source!r} has no rows")
    return leading_rows


def _rows(source: str, program_rows: Mapping[str, Iterable[Row]]) -> Iterable[Row]:
    if source in program_rows:
        return program_rows[source]
    return _lines(source)


def _prompts(
    source: str,
    cfg: Config,
    program_rows: Mapping[str, Iterable[Row]],
) -> Iterator[Prompt]:
    """The prompts of a function's rows, or of a file, which is read lazily; else none."""
    for index, row in enumerate(_rows(source, program_rows)):
        yield as_prompt(index, row, cfg)


def _lines(source: str) -> Iterator[Row]:
    """The rows of a local file; none of other sources."""
    if Path(source).suffix not in FILES:
        return
    path = check_file(source)
    try:
        if path.suffix == ".parquet":
            from pyarrow.parquet import ParquetFile

            for batch in ParquetFile(path).iter_batches(batch_size=64):
                yield from batch.to_pylist()
        elif path.suffix == ".jsonl" or path.read_text(encoding="utf-8").lstrip()[:1] != "[":
            with path.open("rb") as file:
                for number, line in enumerate(filter(bytes.strip, file)):  # without empty lines
                    yield parse_line(line, number)
        else:
            yield from json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # pyarrow's errors are among them
        raise UserError(f"data file {source!r} cannot be read: {error}") from error

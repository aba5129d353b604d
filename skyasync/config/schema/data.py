"""Where prompts come from, and what is evaluated: ``data.val_data``, and named sets,
``data.val_sets``.

Invariant: what ``eval_sets`` reads without complaint has been found right by ``check_data``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyasync.config.frozen import SettingsGroup
from skyasync.config.keys import When, key
from skyasync.config.schema.environment import check_domains, proportions_of
from skyasync.config.schema.judges import is_reference, pattern_problems
from skyasync.config.schema.sampling import evaluation
from skyasync.errors import unknown

if TYPE_CHECKING:
    from skyasync.config.schema import Config


#: What names a procedural task among ``data.train_data`` and ``data.val_data``.
TASK_SOURCE = "reasoning_gym:"

_WHERE = "data.val_sets"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_TAKEN = ("score",)  # eval/score/<domain>
_ENTRIES = ("data", "n_samples")


@dataclass
class DataConfig(SettingsGroup):
    train_data: list[str] = key([], open_ended=True)
    """Training prompts: .parquet, .jsonl or .json files, folders, Hugging Face names
    (owner/name#config:split), reasoning_gym:task, or module:function."""
    val_data: list[str] = key([], open_ended=True)
    """Held-out prompts, in the same forms."""
    val_sets: dict[str, Any] = key({})
    """Held-out prompts by name, evaluated as eval/<name>/...: a source, a list of them, or {data:
    ..., n_samples: responses per prompt}."""
    streaming: bool = key(False)
    """Read training prompts in blocks instead of all at once: for data larger than memory, or
    endless data. trainer.max_training_steps ends the run; the data repeats if necessary."""
    shuffle_buffer: int = key(4096, low=1, when="data.streaming")
    """Number of rows in a block; a stream is shuffled within its blocks."""
    sampler: str = key("uniform", registry="skyasync.data.samplers:SAMPLERS", open_ended=True)
    """Which prompts are trained. uniform: each once per pass. pass_rate: more of those that the
    policy solves about half of the time. Or a PromptSampler of your own (file.py:Class)."""
    sampler_passing: float = key(1.0, when=When("not data.sampler=uniform", "data.replay_groups"))
    """Minimum reward of a correct sample, for pass rates."""
    sampler_pool_key: str = key("", open_ended=True, when="not data.sampler=uniform")
    """Column that groups prompts of similar difficulty. The pass rate of its group stands in for a
    prompt that has not been sampled."""
    replay_groups: int = key(0, low=0, when="not data.streaming")
    """Number of earlier groups that each step trains once more, in addition to its prompts: the
    most difficult of those that at most half of the samples have solved. They need an off-policy
    correction."""
    prompt_key: str = key("prompt", open_ended=True)
    """Column with the prompt: a conversation, or a string."""
    label_key: str = key("label", open_ended=True)
    """Column with the right answer, the environment's label; a.b is field b of column a."""
    domain_key: str = key("domain", open_ended=True)
    """Column with the row's domain."""
    apply_chat_template: bool = key(True)
    """Format prompts with the chat template; false uses text prompts unchanged."""
    chat_template: str = key("", open_ended=True, when="data.apply_chat_template")
    """Jinja template that replaces the model's own: a file or its text. Used for prompts,
    observations and the endpoint."""
    chat_template_kwargs: dict[str, Any] = key({}, when="data.apply_chat_template")
    """Further variables of the template, such as {enable_thinking: false}."""
    chat_history: str = key(
        "template", choices=("template", "sampled"), when="data.apply_chat_template"
    )
    """What the model reads of its earlier turns. template: as the template formats them; if that
    differs from the sampled tokens (some drop thinking), each turn is a row of its own. sampled:
    its sampled tokens, one row per episode."""
    system_prompt: str = key("", open_ended=True)
    """System message that is added to conversations without one."""
    reasoning_gym: dict[str, Any] = key({})
    """Options of each reasoning_gym task: size, seed, val_size, val_seed, and the task's own."""


@dataclass(frozen=True)
class EvalSet:
    """Held-out prompts with a name; ``n_samples``: responses to each, 0 being the run's number."""

    data: tuple[str, ...]
    n_samples: int = 0


def eval_sets(data: DataConfig) -> dict[str, EvalSet]:
    """The evaluation sets by name; ``data.val_data`` is ""."""
    sets = {"": EvalSet(tuple(data.val_data))} if data.val_data else {}
    for name, entry in data.val_sets.items():
        if isinstance(entry, Mapping):
            fields = entry
        else:
            fields = {"data": entry}
        if isinstance(fields["data"], str):
            sources = [fields["data"]]
        else:
            sources = fields["data"]
        sets[str(name)] = EvalSet(tuple(sources), fields.get("n_samples", 0))
    return sets


def eval_sources(data: DataConfig) -> list[str]:
    """The data sources of all evaluation sets."""
    return [source for eval_set in eval_sets(data).values() for source in eval_set.data]


def samples_of(cfg: Config, name: str) -> int:
    """Responses to each prompt of a set."""
    eval_set = eval_sets(cfg.data).get(name, EvalSet(()))
    return eval_set.n_samples or cfg.generator.eval_n_samples_per_prompt


def most_samples(cfg: Config) -> int:
    """The largest number of responses to a prompt in any set."""
    return max((samples_of(cfg, name) for name in eval_sets(cfg.data)), default=samples_of(cfg, ""))


def powers(samples: int) -> list[int]:
    """1, 2, 4, ... as far as the samples go."""
    return [2**n for n in range(samples.bit_length()) if 2**n <= samples]


def check_data(cfg: Config) -> Iterator[str]:
    """Problems of streamed data, of options for tasks that are no source, and of evaluation."""
    data = cfg.data
    if data.streaming and not cfg.trainer.max_training_steps:
        yield "data.streaming=true has no known end: set trainer.max_training_steps=N"
    domains = cfg.environment.domains
    if data.sampler != "uniform" and not any(check_domains(domains)):
        for name in proportions_of(domains):
            yield (
                f"environment.domains.{name}.proportion fixes a share of the prompts, and data.sampler={data.sampler} "
                f"changes shares: leave the proportion out, or set data.sampler=uniform"
            )
    for name in (
        () if not data.streaming or any(check_domains(domains)) else proportions_of(domains)
    ):
        yield (
            f"environment.domains.{name}.proportion needs the rows of each domain at hand, and data.streaming=true "
            f"holds none: leave the proportion out (several sources take turns), or set data.streaming=false"
        )
    wrong = [
        problem
        for name, entry in cfg.data.val_sets.items()
        for problem in _problems(str(name), entry)
    ]
    yield from wrong
    sources = [*data.train_data, *(() if wrong else eval_sources(data))]
    tasks = {
        source.removeprefix(TASK_SOURCE) for source in sources if source.startswith(TASK_SOURCE)
    }
    for task, options in data.reasoning_gym.items():
        if task not in tasks:
            yield f"data.reasoning_gym.{task} is for no task in data.train_data: {unknown('task', str(task), tasks)}"
        elif not isinstance(options, Mapping):
            yield f"data.reasoning_gym.{task} must be a mapping of options, found {options!r}"
    if wrong:
        return
    if evaluation(cfg.generator).temperature == 0:
        for name, eval_set in eval_sets(data).items():
            if eval_set.n_samples > 1:
                yield (
                    f"{_WHERE}.{name}.n_samples={eval_set.n_samples} draws the same response "
                    f"{eval_set.n_samples} times with generator.eval_sampling_params.temperature=0 (greedy): "
                    f"raise the temperature (null is that of "
                    f"training), or set the number to 1"
                )
    largest_count = most_samples(cfg)
    for k in cfg.trainer.eval_k:
        if k > largest_count:
            yield (
                f"trainer.eval_k has {k}, and no set has more than {largest_count} samples per prompt: set generator."
                f"eval_n_samples_per_prompt={k} (or {_WHERE}.<name>.n_samples), or leave {k} out"
            )
    answer = cfg.trainer.eval_answer
    if answer not in ("", "auto") and not is_reference(answer):
        yield from (
            f"trainer.eval_answer{problem}" for problem in pattern_problems(answer, "answer")
        )


def _problems(name: str, entry: object) -> Iterator[str]:
    where = f"{_WHERE}.{name}"
    if not _NAME.fullmatch(name):
        yield f"{where}: a set's name has letters, digits, _, - and . only"
        return
    if name in _TAKEN:
        yield f"{where}: eval/{name} is a metric's name: rename the set"
        return
    sources = entry
    key = where
    if isinstance(entry, Mapping):
        sources = entry.get("data")
        key = f"{where}.data"
        for field_name in entry:
            if field_name not in _ENTRIES:
                yield f"{where}.{field_name}: {unknown('entry', str(field_name), _ENTRIES)}"
        count = entry.get("n_samples", 1)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            yield f"{where}.n_samples: expected a whole number of at least 1, found {count!r}"
    if isinstance(sources, list | tuple):
        several = sources
    else:
        several = [sources]
    if not several or not all(isinstance(source, str) and source for source in several):
        yield f"{key}: expected a source as in data.val_data, or a list of them, found {sources!r}"

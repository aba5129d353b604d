"""Small chat models made on this machine by supervised steps: nothing is downloaded.

Invariant: on one machine the same recipe gives the same model. A model's folder in the cache is
named after a hash of the recipe and of its sources, so a changed recipe never uses an older model.

The warm start is counted in steps, not seconds: the starting point does not depend on how busy the
machine is.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from skyasync.algorithms.reductions import loss_weights
from skyasync.config.schema import AlgorithmConfig, Config
from skyasync.config.schema.models import OptimizerConfig
from skyasync.data.demonstrations import load_demonstrations
from skyasync.models.batch import UpdateBatch
from skyasync.rollout.collate import collate
from skyasync.rollout.tokenizer import load_tokenizer
from skyasync.trainer.supervised import OBJECTIVE, groups_of
from skyasync.workers.policy import PolicyWorker

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LONGEST = 1024  # tokens of a row, which is also the longest context of the models
Row = dict[str, Any]  # as ``skyasync sft`` reads it


@dataclass(frozen=True)
class SFTSteps:
    """The steps of supervised training.

    Args:
        count: the number of steps.
        batch_size: rows of each step.
        lr: learning rate.
        warmup: first steps, in which the learning rate rises.
    """

    count: int
    batch_size: int
    lr: float
    warmup: int = 20


@dataclass(frozen=True)
class WarmStartRecipe(ABC):
    """All settings of a model; a subclass defines its tokenizer and its training rows.

    The tokenizer and the rows are functions of the recipe alone.
    """

    name: ClassVar[str]
    lessons: ClassVar[str]  # the file next to the recipe that makes the demonstrations

    steps: int = 300  # of the supervised warm start
    batch_size: int = 128
    lr: float = 2e-3
    warmup_steps: int = 20
    seed: int = 0
    tied: bool = True  # the output layer shares the embedding's weights
    layers: int = 2
    hidden: int = 128
    head_dim: int = 64
    intermediate: int = 352

    @abstractmethod
    def make_tokenizer(self) -> PreTrainedTokenizerFast:
        """A tokenizer with a chat template, an end of message (``eos_token``) and padding."""

    @abstractmethod
    def rows(self) -> Iterator[Row]:
        """Endless conversations with the responses that the model learns to write."""

    @classmethod
    def build(
        cls, *, out: str | Path | None = None, progress: bool = True, **options: object
    ) -> str:
        """Make the model if it does not exist yet; returns its folder.

        The folder has weights, configuration and tokenizer.

        Args:
            out: the folder; None is a folder in the cache.
            progress: show a bar while it is made.
            options: fields of the recipe.
        """
        recipe = cls(**cast(dict[str, Any], options))
        # The name of the folder depends on the recipe and its code.
        digest = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode())
        recipe_file = Path(inspect.getfile(cls))
        for source in (Path(__file__), recipe_file, recipe_file.with_name(cls.lessons)):
            digest.update(source.read_bytes())
        folder = cache_folder() / f"{cls.name}-{digest.hexdigest()[:12]}"
        if out:
            folder = Path(out)
        return str(made_once(folder, partial(make, recipe, progress=progress)))


def make(recipe: WarmStartRecipe, folder: Path, *, progress: bool = True) -> None:
    """Write tokenizer and warm-started model into ``folder``."""
    tokenizer = recipe.make_tokenizer()
    with torch.random.fork_rng(devices=[]):  # the caller's random state stays the same
        torch.manual_seed(recipe.seed)
        model = LlamaForCausalLM(llama_config(recipe, tokenizer))
    disable_progress_bar()  # of transformers, for a file that is written at once
    steps = SFTSteps(recipe.steps, recipe.batch_size, recipe.lr, recipe.warmup_steps)
    title = f"{recipe.name} model, supervised warm start" if progress else ""
    with tempfile.TemporaryDirectory() as start:
        model.save_pretrained(start)
        tokenizer.save_pretrained(start)
        fine_tune(Path(start), folder, recipe.rows(), steps, title=title)


def byte_level_bpe(
    corpus: Iterable[str],
    *,
    vocab_size: int,
    rarest_merge: int,
    template: str,
    added: Sequence[Any] = (),
) -> PreTrainedTokenizerFast:
    """A byte-level BPE learned from ``corpus``.

    Args:
        rarest_merge: pairs of tokens that are rarer in the corpus are not merged.
        template: the chat template.
        added: texts that are one token each, as is each digit.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=rarest_merge,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens(list(added))
    return chat_tokenizer(tokenizer, template)


def chat_tokenizer(
    tokenizer: Tokenizer, template: str, **options: object
) -> PreTrainedTokenizerFast:
    """The tokenizer of transformers for ``tokenizer``, whose vocabulary has ``SPECIAL_TOKENS``."""
    end_of_text, _, end_of_message = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end_of_message,
        pad_token=end_of_text,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **options,
    )


def llama_config(recipe: WarmStartRecipe, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    heads = recipe.hidden // recipe.head_dim
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=1024,
        tie_word_embeddings=recipe.tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def fine_tune(
    start: Path, out: Path, rows: Iterator[Row], steps: SFTSteps, *, title: str = ""
) -> None:
    """Train a model by supervised steps, as ``skyasync sft``, but in this process.

    Args:
        start: the folder of the model.
        out: the folder for the trained model.
        rows: with a prompt and a completion, or with messages; at least as many as the steps need.
        title: of the progress bar; without a title there is none.
    """
    cfg = Config()
    cfg.trainer.algorithm = AlgorithmConfig(**OBJECTIVE)  # type: ignore[arg-type]
    cfg.trainer.policy.model.path = str(start)
    cfg.trainer.policy.optimizer_config = OptimizerConfig(
        lr=steps.lr, num_warmup_steps=steps.warmup
    )
    cfg.trainer.max_prompt_length = LONGEST
    tokenizer = load_tokenizer(str(start))
    bar = Progress(
        TextColumn(f"[bold]{title}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.2f}"),
        TimeRemainingColumn(),
        disable=not title,
    )
    task = bar.add_task(title, total=steps.count, loss=float("nan"))
    with bar, torch.random.fork_rng(devices=[]):
        worker = PolicyWorker(cfg, total_steps=steps.count)
        worker.setup()
        for _ in range(steps.count):
            sources = {"rows": list(islice(rows, steps.batch_size))}
            prompts = load_demonstrations(["rows"], cfg, tokenizer, loaded_rows=sources)
            batch = collate(groups_of(prompts, 0))
            weights = loss_weights(cfg.trainer.algorithm, batch.loss_mask, batch.group_ids)
            # With advantages of 1 the policy loss is the cross-entropy of the demonstrations.
            advantages = torch.ones_like(batch.rewards)
            update_batch = batch.to_stage(UpdateBatch, advantages=advantages, loss_weights=weights)
            metrics = worker.update_policy(update_batch)
            bar.update(task, advance=1, loss=metrics["loss"])
        worker.export(str(out))


def cache_folder() -> Path:
    """``$SKYASYNC_CACHE``, else ``$XDG_CACHE_HOME/skyasync``, else ``~/.cache/skyasync``."""
    explicit = os.environ.get("SKYASYNC_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skyasync"


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Fill ``folder`` by ``make(temporary folder)`` if it does not exist yet.

    Errors of ``make`` are raised. A folder with its final name is complete: it is made with a
    temporary name, and renamed at the end. If several processes make it at once, all use the result
    of the first to finish.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        make(temporary)
        temporary.chmod(0o755)  # mkdtemp makes folders that only their owner can enter
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        # Another process was faster: a rename does not replace a folder with files.
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder

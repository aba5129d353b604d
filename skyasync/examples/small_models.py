"""Small chat models made on this machine by supervised fine-tuning (``skyasync sft``): nothing is downloaded.

Invariant: on one machine the same recipe gives the same model. A model's folder in the cache is named after a hash of
the recipe and of its sources, so a changed recipe never uses an older model.

The warm start is counted in steps, not seconds: the starting point does not depend on how busy the machine is.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer as Tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from skyasync.config.schema import Config
from skyasync.data.demonstrations import load_demonstrations
from skyasync.data.sources import Row
from skyasync.examples.cache import cache_folder, made_once
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.run.engineless import NoEngines, NoGenerator, NoSync
from skyasync.trainer.supervised import OBJECTIVE, SupervisedTrainer
from skyasync.utils.task_group import run_in_own_loop
from skyasync.workers.local import LocalDispatch

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class WarmStartRecipe(ABC):
    """Everything that decides what a model is; a subclass defines its tokenizer and its training rows.

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
        """With a chat template, an end of message (``eos_token``) and padding."""

    @abstractmethod
    def rows(self) -> Iterator[Row]:
        """Endless demonstrations, as ``data.train_data`` has them."""

    @classmethod
    def build(cls, *, out: str | Path | None = None, progress: bool = True, **options: object) -> str:
        """The folder of the model (weights, configuration, tokenizer), made if it does not exist yet.

        Args:
            out: the folder; None is its place in the cache.
            progress: show a bar while it is made.
            options: fields of the recipe.
        """
        recipe = cls(**cast(dict[str, Any], options))
        digest = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode())
        own = Path(inspect.getfile(cls))
        for source in (Path(__file__), own, own.with_name(cls.lessons)):
            digest.update(source.read_bytes())
        folder = Path(out) if out else cache_folder() / f"{cls.name}-{digest.hexdigest()[:12]}"
        return str(made_once(folder, lambda temporary: make(recipe, temporary, progress=progress)))


def make(recipe: WarmStartRecipe, folder: Path, *, progress: bool = True) -> None:
    """Write tokenizer and warm-started model into ``folder``. The caller's random state stays the same."""
    tokenizer = recipe.make_tokenizer()
    disable_progress_bar()  # transformers' own, for a file written in no time
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as temporary:
        torch.manual_seed(recipe.seed)
        untrained = temporary if recipe.steps else str(folder)
        LlamaForCausalLM(llama_config(recipe, tokenizer)).save_pretrained(untrained)
        tokenizer.save_pretrained(untrained)
        if recipe.steps:
            warm_start(recipe, untrained, tokenizer, folder, progress=progress)


def byte_level_bpe(
    corpus: Iterable[str], *, vocab_size: int, rarest_merge: int, template: str, added: Sequence[Any] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level BPE learnt from ``corpus``; each digit is one token, and so is each text in ``added``."""
    tokenizer = Tokenizers(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
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


def chat_tokenizer(tokenizer: Tokenizers, template: str, **options: object) -> PreTrainedTokenizerFast:
    """``tokenizer``, whose vocabulary holds ``SPECIAL_TOKENS``, as transformers' with a chat template."""
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


def warm_start(
    recipe: WarmStartRecipe, untrained: str, tokenizer: PreTrainedTokenizerFast, folder: Path, *, progress: bool = True
) -> None:
    """``recipe.steps`` supervised steps on the recipe's rows, by the workers of a run in this process."""
    cfg = Config()
    trainer, optimizer, source = cfg.trainer, cfg.trainer.policy.optimizer_config, recipe.name
    trainer.policy.model.path, trainer.export_path = untrained, str(folder)
    optimizer.lr, optimizer.num_warmup_steps = recipe.lr, recipe.warmup_steps
    trainer.train_batch_size, trainer.max_training_steps, trainer.seed = recipe.batch_size, recipe.steps, recipe.seed
    vars(trainer.algorithm).update(OBJECTIVE)
    rows = islice(recipe.rows(), recipe.steps * recipe.batch_size)
    dataset = load_demonstrations([source], cfg, cast(Tokenizer, tokenizer), known={source: rows})
    bar = Progress(
        TextColumn(f"[bold]{recipe.name} model, supervised warm start"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.2f}"),
        TimeRemainingColumn(),
        disable=not progress,
    )
    plan = SupervisedTrainer(
        cfg, _Bar(bar, recipe.steps), cast(Tokenizer, tokenizer), dataset, NoEngines(), NoGenerator()
    )

    async def run() -> None:
        dispatch = LocalDispatch(cfg, total_steps=recipe.steps)
        plan.attach(dispatch, NoSync())
        try:
            await plan.train()
        finally:
            await dispatch.shutdown()

    with bar:
        run_in_own_loop(run())


class _Bar:
    """A tracker that moves a progress bar."""

    def __init__(self, bar: Progress, steps: int) -> None:
        self._bar, self._task = bar, bar.add_task("warm start", total=steps, loss=float("nan"))

    def log(self, metrics: Mapping[str, float | None], step: int) -> None:
        self._bar.update(self._task, completed=step, loss=metrics.get("sft/loss") or float("nan"))

    def close(self) -> None: ...

"""A chat model of 0.45 million parameters, made on this machine in about a minute: nothing is downloaded.

Invariant: on one machine the same recipe gives the same model. A model's folder in the cache is named after a hash of
the recipe and of the sources that carry it out, so a changed recipe never meets an older model.

    python -m examples.tiny.model --out DIR --steps 300     # a model in a folder of your own

The supervised warm start is counted in steps, not seconds: the starting point does not depend on how busy the
machine is. It stops early on purpose: sampled at temperature 1, about 4 in 10 answers to sorting are right, so that
reinforcement learning has both something to build on and something to do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from examples.cache import cache_folder, made_once
from examples.tiny.tasks import Question, questions

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
IGNORED = -100  # the label that cross-entropy leaves out


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the model is."""

    steps: int = 300  # of the supervised warm start
    batch_size: int = 128
    tasks: tuple[str, ...] = ("sort",) * 2 + ("add",) * 3 + ("maximum",) * 3 + ("backwards",) * 3  # drawn evenly
    lr: float = 2e-3
    warmup_steps: int = 20
    seed: int = 0
    tied: bool = True  # the output layer shares the embedding's weights
    vocab_size: int = 400  # at most; the rarest merge ends it earlier
    rarest_merge: int = 200  # in the corpus: the instructions' words become tokens, made-up words stay letters
    corpus_size: int = 4096  # conversations the tokenizer learns from
    layers: int = 2
    hidden: int = 128
    head_dim: int = 64
    intermediate: int = 352

    def folder_name(self) -> str:
        """Changes with the recipe and with any source that carries it out."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for source in (Path(__file__), Path(__file__).with_name("tasks.py")):
            digest.update(source.read_bytes())
        return f"tiny-{digest.hexdigest()[:12]}"


def build(*, out: str | Path | None = None, progress: bool = True, **options: Any) -> str:
    """The folder of the model (weights, configuration, tokenizer), made if it is not there yet.

    Args:
        out: where it shall be; None is its place in the cache.
        progress: show a bar while it is made.
        options: fields of ``Recipe``.
    """
    recipe = Recipe(**options)
    folder = Path(out) if out else cache_folder() / recipe.folder_name()
    return str(made_once(folder, lambda temporary: make(recipe, temporary, progress=progress)))


def make(recipe: Recipe, folder: Path, *, progress: bool = True) -> None:
    """Write tokenizer and warm-started model into ``folder``. The caller's randomness is left alone."""
    tokenizer = make_tokenizer(recipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = LlamaForCausalLM(llama_config(recipe, tokenizer))
    warm_start(model, tokenizer, recipe, progress=progress)
    disable_progress_bar()  # transformers' own, for a file written in no time
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """A byte-level BPE learnt from the tasks' own conversations; each digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        min_frequency=recipe.rarest_merge,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = (f"user\n{q.text}\nassistant\n{q.answer}\nsystem\n" for q in questions("train", recipe.seed))
    tokenizer.train_from_iterator(islice(corpus, recipe.corpus_size), trainer)
    end_of_text, _, end_of_message = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end_of_message,
        pad_token=end_of_text,
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def llama_config(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
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
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, *, progress: bool = True
) -> None:
    """Supervised steps on fresh training questions of all tasks; the loss sees the answers only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / recipe.warmup_steps))
    stream = questions("train", recipe.seed, recipe.tasks)
    model.train()
    with _progress_bar(recipe.steps, shown=progress) as bar:
        for _ in range(recipe.steps):
            loss = model(**supervised_batch(list(islice(stream, recipe.batch_size)), tokenizer)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            bar.update(bar.task_ids[0], advance=1, loss=loss.item())


def supervised_batch(batch: list[Question], tokenizer: PreTrainedTokenizerFast) -> dict[str, Tensor]:
    """``input_ids``, ``attention_mask`` and ``labels``, each int64 ``[batch, length]``, padded on the right.

    Labels are the answer's tokens and the end of the message, ``IGNORED`` elsewhere.
    """
    rows = [_asked_and_answered(question, tokenizer) for question in batch]
    length = max(len(asked) + len(answered) for asked, answered in rows)
    tokens = torch.full((len(rows), length), cast(int, tokenizer.pad_token_id))
    labels = torch.full_like(tokens, IGNORED)
    mask = torch.zeros_like(tokens)
    for row, (asked, answered) in enumerate(rows):
        start, end = len(asked), len(asked) + len(answered)
        tokens[row, :end] = torch.tensor(asked + answered)
        labels[row, start:end] = tokens[row, start:end]
        mask[row, :end] = 1
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def _asked_and_answered(question: Question, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    prompt = tokenizer.apply_chat_template(question.row()["prompt"], add_generation_prompt=True, tokenize=False)
    answer = f"{question.answer}{tokenizer.eos_token}"
    asked, answered = tokenizer([cast(str, prompt), answer], add_special_tokens=False)["input_ids"]
    return asked, answered


def _progress_bar(steps: int, *, shown: bool) -> Progress:
    columns = (
        TextColumn("[bold]tiny chat model, supervised warm start"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.2f}"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, disable=not shown)
    bar.add_task("warm start", total=steps, loss=float("nan"))
    return bar


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.tiny.model", description="Make the tiny chat model.")
    parser.add_argument("--out", help="folder to make it in; without it, its place in the cache")
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="supervised steps (default %(default)s)")
    parser.add_argument("--seed", type=int, default=Recipe.seed, help="seed of weights and data (default %(default)s)")
    parser.add_argument("--untied", action="store_true", help="give the output layer weights of its own")
    args = parser.parse_args()
    print(build(out=args.out, steps=args.steps, seed=args.seed, tied=not args.untied))


if __name__ == "__main__":
    main()

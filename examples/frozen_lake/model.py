"""A chat model that plays FrozenLake like a careless beginner, made on this machine in a minute or two.

Invariant: on one machine the same recipe gives the same model; its folder in the cache is named after the recipe and
the sources that carry it out. Every line that the game or the player says is one token.

    python -m examples.frozen_lake.model        # its folder; made if it is not there yet
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from examples.cache import cache_folder, made_once
from examples.frozen_lake.lakes import MOVES, SIZE, lesson, seeds
from examples.tiny.model import CHATML, IGNORED, SPECIAL_TOKENS
from skyasync.envs.gymnasium import FIELDS

PLACES = [f"row {row} column {column}" for row in range(SIZE) for column in range(SIZE)]
SIDES = [f"{move} {field}" for move in MOVES for field in ("edge", *FIELDS.values())]
WORDS = (*SPECIAL_TOKENS, "<unk>", "user", "assistant", "system", *PLACES, *SIDES, *MOVES, "\n")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the model is."""

    steps: int = 220  # of the supervised warm start
    batch_size: int = 48  # games
    careful: float = 0.7  # how often the teacher makes a best move on purpose
    lr: float = 3e-3
    warmup_steps: int = 20
    seed: int = 0
    layers: int = 2
    hidden: int = 64
    heads: int = 2

    def folder_name(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for source in (Path(__file__), Path(__file__).with_name("lakes.py")):
            digest.update(source.read_bytes())
        return f"frozen-lake-{digest.hexdigest()[:12]}"


def build(*, out: str | Path | None = None, **options: Any) -> str:
    """The folder of the model, made if it is not there yet; ``options`` are fields of ``Recipe``."""
    recipe = Recipe(**options)
    folder = Path(out) if out else cache_folder() / recipe.folder_name()
    return str(made_once(folder, lambda temporary: make(recipe, temporary)))


def make(recipe: Recipe, folder: Path) -> None:
    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = LlamaForCausalLM(_config(recipe, tokenizer))
    warm_start(model, tokenizer, recipe)
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\w ]+|\n"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    end_of_text, _, end_of_message = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end_of_message,
        pad_token=end_of_text,
        unk_token="<unk>",
        additional_special_tokens=[SPECIAL_TOKENS[1]],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def _config(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=3 * recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def warm_start(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
    """Supervised steps on games of a careless teacher on training lakes; the loss sees the answers only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / recipe.warmup_steps))
    games = lessons(recipe)
    model.train()
    for _ in range(recipe.steps):
        loss = model(**supervised_batch(list(islice(games, recipe.batch_size)), tokenizer)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def lessons(recipe: Recipe) -> Iterator[list[dict[str, str]]]:
    rng = random.Random(recipe.seed)
    return (lesson(seed, rng, recipe.careful) for seed in seeds("train"))


def supervised_batch(games: list[list[dict[str, str]]], tokenizer: PreTrainedTokenizerFast) -> dict[str, Tensor]:
    """``input_ids``, ``attention_mask`` and ``labels``, each int64 ``[batch, length]``, padded on the right.

    Labels are the answers' tokens and the ends of their messages, ``IGNORED`` elsewhere.
    """
    rows = [_row(game, tokenizer) for game in games]
    length = max(len(tokens) for tokens, _ in rows)

    def padded(values: list[int], filler: int) -> list[int]:
        return values + [filler] * (length - len(values))

    return {
        "input_ids": torch.tensor([padded(tokens, 0) for tokens, _ in rows]),
        "attention_mask": torch.tensor([padded([1] * len(tokens), 0) for tokens, _ in rows]),
        "labels": torch.tensor([padded(labels, IGNORED) for _, labels in rows]),
    }


def _row(game: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Tokens and labels. An answer is an action and the end of its message"""
    text = str(tokenizer.apply_chat_template(game, tokenize=False))
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    start, player, line = tokenizer.convert_tokens_to_ids([SPECIAL_TOKENS[1], "assistant", "\n"])
    answers = [t for t in range(3, len(tokens)) if tokens[t - 3 : t] == [start, player, line]]
    labels = [IGNORED] * len(tokens)
    for t in answers:
        labels[t : t + 2] = tokens[t : t + 2]
    return tokens, labels


if __name__ == "__main__":
    print(build())

"""A chat model that plays FrozenLake like a careless beginner, made here in a minute or two.

Invariant: that of ``skyasync.examples.tiny_models``, which makes it. Every line of the game or the
player is one token.

    python -m examples.frozen_lake.model        # its folder; made if it does not exist yet
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.frozen_lake.lakes import MOVES, SIZE, lesson, seeds
from skyasync.envs.adapters.gymnasium import FIELDS
from skyasync.examples.tiny_models import (
    CHATML,
    SPECIAL_TOKENS,
    Row,
    WarmStartRecipe,
    chat_tokenizer,
)

POSITIONS = [f"row {row} column {column}" for row in range(SIZE) for column in range(SIZE)]
SIDES = [f"{move} {field}" for move in MOVES for field in ("edge", *FIELDS.values())]
WORDS = (*SPECIAL_TOKENS, "<unk>", "user", "assistant", "system", *POSITIONS, *SIDES, *MOVES, "\n")


@dataclass(frozen=True)
class Recipe(WarmStartRecipe):
    """Games of a careless teacher on training lakes; the loss sees the answers only."""

    name = "frozen-lake"
    lessons = "lakes.py"

    steps: int = 220
    batch_size: int = 48  # games
    lr: float = 3e-3
    hidden: int = 64
    head_dim: int = 32
    intermediate: int = 192
    size: int = SIZE  # of the lakes, at most that
    careful: float = 0.7  # how often the teacher makes a best move on purpose

    def make_tokenizer(self) -> PreTrainedTokenizerFast:
        vocabulary = {word: number for number, word in enumerate(WORDS)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        # Lines (words with spaces) and line ends.
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\w ]+|\n"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        start_of_message = SPECIAL_TOKENS[1]
        return chat_tokenizer(
            tokenizer, CHATML, unk_token="<unk>", additional_special_tokens=[start_of_message]
        )

    def rows(self) -> Iterator[Row]:
        rng = random.Random(self.seed)
        for seed in seeds("train", size=self.size):
            yield {"messages": lesson(seed, rng, self.careful, self.size)}


build = Recipe.build


if __name__ == "__main__":
    print(build())

"""A chat model that plays FrozenLake like a careless beginner, made on this machine in a minute or two.

Invariant: that of ``skyasync.examples.warm_start``, which makes it. Every line that the game or
the player says is one token.

    python -m examples.frozen_lake.model        # its folder; made if it is not there yet
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.frozen_lake.lakes import MOVES, SIZE, lesson, seeds
from skyasync.envs.adapters.gymnasium import FIELDS
from skyasync.examples.warm_start import CHATML, IGNORED, SPECIAL_TOKENS, Row, WarmStartRecipe, chat_tokenizer

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
        tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\w ]+|\n"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        start_of_message = SPECIAL_TOKENS[1]
        return chat_tokenizer(tokenizer, CHATML, unk_token="<unk>", additional_special_tokens=[start_of_message])

    def rows(self, tokenizer: PreTrainedTokenizerFast) -> Iterator[Row]:
        rng = random.Random(self.seed)
        return (row(lesson(seed, rng, self.careful, self.size), tokenizer) for seed in seeds("train", size=self.size))


build = Recipe.build


def row(game: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast) -> Row:
    """Labels are the answers: an action and the end of its message."""
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

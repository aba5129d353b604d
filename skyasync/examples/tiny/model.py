"""The command that makes the tiny chat model of 0.45 million parameters.

The package contains a model that it made.

Invariant: that of ``skyasync.examples.tiny_models``.

    python -m skyasync.examples.tiny.model --out DIR --steps 300     # takes 100 seconds of a core

The supervised warm start stops early on purpose: sampled at temperature 1, about 4 in 10 answers to
sorting are right. So reinforcement learning begins with some rewards, and has much to improve.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from skyasync.examples.tiny import chat_model
from skyasync.examples.tiny.tasks import WARM_START, questions
from skyasync.examples.tiny_models import CHATML, Row, WarmStartRecipe, byte_level_bpe


@dataclass(frozen=True)
class Recipe(WarmStartRecipe):
    """A tokenizer and a warm start from four tasks; the loss sees the answers only."""

    name = "tiny"
    lessons = "tasks.py"

    tasks: tuple[str, ...] = WARM_START
    vocab_size: int = 400  # at most; ``rarest_merge`` ends it earlier
    # In the corpus: words of the instructions become tokens, made-up words stay letters.
    rarest_merge: int = 200
    corpus_size: int = 4096  # conversations that the tokenizer learns from

    def make_tokenizer(self) -> PreTrainedTokenizerFast:
        corpus = []
        for question in islice(questions("train", self.seed), self.corpus_size):
            corpus.append(f"user\n{question.text}\nassistant\n{question.answer}\nsystem\n")
        return byte_level_bpe(
            corpus,
            vocab_size=self.vocab_size,
            rarest_merge=self.rarest_merge,
            template=CHATML,
        )

    def rows(self) -> Iterator[Row]:
        return (question.demonstration() for question in questions("train", self.seed, self.tasks))

    @classmethod
    def build(
        cls, *, out: str | Path | None = None, progress: bool = True, **options: object
    ) -> str:
        """As ``WarmStartRecipe.build``; without arguments the model in the package."""
        if out is None and not options:
            return chat_model()
        return super().build(out=out, progress=progress, **options)


build = Recipe.build


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m skyasync.examples.tiny.model", description="Make the tiny chat model."
    )
    parser.add_argument("--out", required=True, help="folder to make it in")
    parser.add_argument(
        "--steps", type=int, default=Recipe.steps, help="supervised steps (default %(default)s)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=Recipe.seed,
        help="seed of weights and data (default %(default)s)",
    )
    parser.add_argument(
        "--untied", action="store_true", help="give the output layer weights of its own"
    )
    args = parser.parse_args()
    print(build(out=args.out, steps=args.steps, seed=args.seed, tied=not args.untied))


if __name__ == "__main__":
    main()

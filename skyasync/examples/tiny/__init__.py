"""A tiny chat model and its procedural instructions: RL on a laptop, without downloads.

This module imports no library, so that the configuration of a run finds the model at once.
"""

from __future__ import annotations

from pathlib import Path


def chat_model() -> str:
    """The folder of the chat model in the package: float32 weights, configuration, tokenizer.

    ``python -m skyasync.examples.tiny.model`` made it, with seed 0. The same command makes a model
    of other weights on another processor, because rounding differs; all measurements with the tiny
    model are of this one.
    """
    return str(Path(__file__).parent / "model_files")

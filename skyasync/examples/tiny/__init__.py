"""A tiny chat model and its procedural instructions: reinforcement learning on a laptop, nothing
downloaded.

This module imports no library, so that the configuration of a run finds the model at once.
"""

from __future__ import annotations

from pathlib import Path


def chat_model() -> str:
    """The folder of the chat model that the package contains: weights in float32, configuration,
    tokenizer.

    ``python -m skyasync.examples.tiny.model`` made it, with seed 0. The same command makes a model
    of other weights on another processor, because rounding differs; all measurements with the tiny
    model are of this one.
    """
    return str(Path(__file__).parent / "model_files")

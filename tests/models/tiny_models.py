"""Folders of models with random weights, by the tests' own configurations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig


def save_models(configs: Mapping[str, PreTrainedConfig], folder: Path) -> dict[str, str]:
    """The folder of each model, by its name."""
    for name, config in configs.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return {name: str(folder / name) for name in configs}

"""Settings of a simulation, in addition to those of a real run."""

# ruff: noqa: RUF009  (key() returns a dataclasses.field, with a factory for mutable defaults)

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from skyasync.config.keys import key
from skyasync.config.schema import Config, GeneratorConfig, PlacementConfig, TrainerConfig

# Samples of the length distribution; trajectories choose among them by their identity.
LENGTHS_DRAWN = 1 << 16


@dataclass
class SimulateConfig:
    """The engines, the lengths and the costs of a simulation."""

    plans: list[str] = key(
        ["sync", "streamed", "one_step_off", "fully_async"],
        registry="skyasync.trainer.plans:PLANS",
        open_ended=True,
    )
    """Plans to compare; also of your own."""
    slots: int = key(32, low=1)
    """Sequences that an engine decodes at once."""
    token_s: float = key(0.02, above=0.0)
    """Seconds per decode step of an engine."""
    token_s_per_sequence: float = key(0.0, low=0.0)
    """Seconds that each running sequence adds to a decode step."""
    prefill: float = key(0.01, low=0.0)
    """Decode steps that the prefill of one token costs."""
    prompt_length: int = key(0, low=0)
    """Tokens per prompt."""
    lengths: str = key("lognormal", choices=("constant", "lognormal", "bimodal"))
    """Distribution of the response lengths."""
    length_mean: float = key(1000.0, above=0.0)
    """Mean response length in tokens."""
    length_max: int = key(8000, low=0)
    """Longest response in tokens, where a run cuts it; 0 is no limit."""
    length_sigma: float = key(1.0, low=0.0)
    """Sigma of the log-normal lengths."""
    train_s_per_token: float = key(0.0, low=0.0)
    """Device-seconds of training per response token; 0 balances training with generation."""
    sync_s: float = key(0.0, low=0.0)
    """Seconds of a weight sync."""
    switch_s: float = key(0.0, low=0.0)
    """Seconds in which devices change from training to generation, or back, in plans that share
    them."""
    from_run: str = key("", open_ended=True)
    """Folder of a finished run of the sync plan to take batch, devices, lengths and costs from."""
    advise: bool = key(True)
    """Recommend a split of the devices and a max_staleness."""


@dataclass
class SimulationConfig(Config):
    """A run's configuration with the settings of a simulation, and with defaults for it."""

    simulate: SimulateConfig = field(default_factory=SimulateConfig)
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(
            placement=PlacementConfig(),
            max_training_steps=100,
            train_batch_size=128,
            max_staleness=4,
        )
    )
    generator: GeneratorConfig = field(
        default_factory=lambda: GeneratorConfig(num_inference_engines=8, n_samples_per_prompt=8)
    )


def draw_lengths(cfg: SimulateConfig, seed: int) -> np.ndarray:
    """Sample response lengths, with the configured mean before they are cut at ``length_max``.

    Returns:
        ``[LENGTHS_DRAWN]`` in int64.
    """
    rng = np.random.default_rng(seed)
    if cfg.lengths == "constant":
        lengths = np.full(LENGTHS_DRAWN, cfg.length_mean)
    elif cfg.lengths == "lognormal":
        # The mean of a log-normal is exp(mu + sigma^2 / 2).
        mu = np.log(cfg.length_mean) - cfg.length_sigma**2 / 2
        lengths = rng.lognormal(mu, cfg.length_sigma, LENGTHS_DRAWN)
    else:  # nine of ten are short, the tenth takes as many tokens as all of them
        is_long = rng.random(LENGTHS_DRAWN) < 0.1
        lengths = np.where(is_long, 5.0, 5.0 / 9.0) * cfg.length_mean
    return np.clip(np.rint(lengths), 1, cfg.length_max or None).astype(np.int64)

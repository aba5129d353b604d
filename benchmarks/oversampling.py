"""Time saved by oversampling, and its effect on the lengths of trained responses.

    uv run -m benchmarks.oversampling [--samples 8] [--prompts 32] [--batches 2000]

Response lengths are drawn (log-normal, sigma 1; or one in ten nine times as long; cut at 16 means),
all samples of a batch run at the same time, one token per step: the bound for engines with slots
for all. A group is complete with its first ``samples`` samples
(``skyasync/rollout/group_sampling.py``), a batch with its last group. Columns:

- steps: decode steps until the batch is complete, relative to those without oversampling;
- trained: mean length of trained responses, relative to the mean of all responses;
- dropped: mean full length of dropped responses, relative to the same;
- wasted: tokens of dropped samples, over all tokens computed.
"""

from __future__ import annotations

import argparse

import numpy as np

CUT = 16.0


def draw(shape: tuple[int, ...], kind: str, random: np.random.Generator) -> np.ndarray:
    if kind == "lognormal":
        lengths = random.lognormal(0.0, 1.0, shape)
    else:
        lengths = np.where(random.random(shape) < 0.1, 9.0, 1.0) * random.uniform(0.8, 1.2, shape)
    return np.minimum(lengths, CUT * lengths.mean())


def measure(kind: str, samples: int, spares: int, prompts: int, batches: int) -> dict[str, float]:
    lengths = np.sort(draw((batches, prompts, samples + spares), kind, np.random.default_rng(0)))
    taken = lengths[..., :samples]
    dropped = lengths[..., samples:]
    ends = taken[..., -1:]
    whole = draw((batches, prompts, samples), kind, np.random.default_rng(1)).max(-1).max(-1).mean()
    computed = np.minimum(dropped, ends).sum()
    return {
        "steps": ends[..., 0].max(-1).mean() / whole,
        "trained": taken.mean() / lengths.mean(),
        "dropped": dropped.mean() / lengths.mean() if spares else float("nan"),
        "wasted": computed / (computed + taken.sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--batches", type=int, default=2000)
    options = parser.parse_args()
    print("| lengths | spares | steps | trained | dropped | wasted |\n|---|---|---|---|---|---|")
    for kind in ("lognormal", "bimodal"):
        for spares in (0, 1, 2, 4):
            row = measure(kind, options.samples, spares, options.prompts, options.batches)
            print(
                f"| {kind} | {spares} | "
                + " | ".join(f"{value:.2f}" for value in row.values())
                + " |"
            )


if __name__ == "__main__":
    main()

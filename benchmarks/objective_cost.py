"""What each objective costs: forward and backward on a [64, 4096] batch, relative to plain clipped
PPO.

    python benchmarks/objective_cost.py [--rows 64] [--length 4096] [--repeats 30] [--threads 1]

Invariant: every objective is timed turn by turn with the yardstick, and the best time of each
counts, so that a machine that is busy with other work slows neither. The yardstick is the five
lines of ``plain_ppo`` below: no
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor

from skyasync.algorithms import CORRECTIONS, POLICY_LOSSES
from skyasync.algorithms.objective import Objective, loss_weights
from skyasync.config.schema.algorithm import AlgorithmConfig

LIMIT = 1.5


def make_batch(rows: int, length: int) -> SimpleNamespace:
    """Log-probabilities of three policies that differ a little, lengths between half and all."""
    torch.manual_seed(0)
    behaviour = -torch.rand(rows, length) * 3
    proximal = behaviour + 0.1 * torch.randn(rows, length)
    lengths = torch.randint(length // 2, length + 1, (rows, 1))
    return SimpleNamespace(
        behaviour_logprobs=behaviour,
        proximal_logprobs=proximal,
        reference_logprobs=behaviour + 0.1 * torch.randn(rows, length),
        current=proximal + 0.1 * torch.randn(rows, length),
        advantages=torch.randn(rows, 1).expand(rows, length).contiguous(),
        loss_mask=torch.arange(length) < lengths,
        entropy=torch.rand(rows, length),
        group_ids=torch.arange(rows) // 8,
    )


def plain_ppo(batch: SimpleNamespace, weights: Tensor) -> Callable[[Tensor], Tensor]:
    """PPO's clipped surrogate and nothing else."""

    def loss(current: Tensor) -> Tensor:
        ratio = (current - batch.proximal_logprobs).exp()
        clipped = ratio.clamp(0.8, 1.2)
        surrogate = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
        return -(weights * surrogate).sum()

    return loss


def objective_loss(
    cfg: AlgorithmConfig, batch: SimpleNamespace, weights: Tensor
) -> Callable[[Tensor], Tensor]:
    """The configured objective as the worker computes it, statistics included."""
    objective = Objective(cfg)
    prepared = objective.prepare(batch)

    def loss(current: Tensor) -> Tensor:
        token_loss, _ = objective.token_loss(
            current=current,
            proximal=batch.proximal_logprobs,
            behaviour=batch.behaviour_logprobs,
            reference=batch.reference_logprobs if "reference" in objective.needs else None,
            advantages=batch.advantages,
            mask=batch.loss_mask,
            entropy=batch.entropy if "entropy" in objective.needs else None,
            **prepared,
        )
        return (weights * token_loss).sum()

    return loss


def objectives() -> Iterator[tuple[str, AlgorithmConfig]]:
    """Every loss without a correction, then PPO with every correction, then with every term."""
    base = AlgorithmConfig()
    for name in POLICY_LOSSES.names():
        yield name, replace(base, policy_loss_type=name, off_policy_correction="none")
    for name in CORRECTIONS.names():
        if name not in ("auto", "none"):
            yield f"ppo + {name}", replace(base, off_policy_correction=name)
    yield "ppo + kl loss", replace(base, off_policy_correction="none", use_kl_loss=True)
    yield "ppo + entropy", replace(base, off_policy_correction="none", use_entropy_loss=True)


def seconds(loss: Callable[[Tensor], Tensor], current: Tensor) -> float:
    """CPU time of one forward and backward (with one thread: the time of an idle machine)."""
    leaf = current.clone().requires_grad_()
    start = time.process_time()
    loss(leaf).backward()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="objectives whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    batch = make_batch(options.rows, options.length)
    weights = loss_weights(AlgorithmConfig(), batch.loss_mask, batch.group_ids)
    yardstick = plain_ppo(batch, weights)
    print(
        f"[{options.rows}, {options.length}] float32, torch {torch.__version__}, {options.threads} thread(s)"
    )
    print(f"{'objective':34}{'ms':>8}{'of plain PPO':>14}")
    above = []
    for name, cfg in objectives():
        if options.only not in name:
            continue
        loss = objective_loss(cfg, batch, weights)
        pairs = [
            (seconds(loss, batch.current), seconds(yardstick, batch.current))
            for _ in range(options.repeats + 2)
        ][2:]
        mine, plain = (min(times) for times in zip(*pairs, strict=True))
        ratio = mine / plain
        print(f"{name:34}{1e3 * mine:8.2f}{ratio:13.2f}x", flush=True)
        above += [name] if ratio > LIMIT else []
    print(f"above {LIMIT}x: {', '.join(above) or 'none'}")


if __name__ == "__main__":
    main()

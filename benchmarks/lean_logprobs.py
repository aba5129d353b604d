"""Memory of log-probabilities over a large vocabulary: the library's pass compared with the plain
one, on a CPU.

    python -m benchmarks.lean_logprobs     # 4,096 tokens, 150,000 words: the plain pass takes about 10 GB

Every figure is of a new process: its peak of resident memory (VmHWM), minus its memory before the
pass. The states that the head reads exist already, so only the head's work is counted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

GIB = 1 << 30
PASSES = (
    "log-probabilities",
    "with their gradient",
    "with entropy and gradient",
    "with 16 others and gradient",
)


def peak_of(way: str, what: str, tokens: int, vocabulary: int) -> int:
    """Bytes, in this process."""
    import torch
    from torch import Tensor
    from transformers import LlamaConfig, LlamaForCausalLM

    from skyasync.models.backend import ENTROPY, LOGPROBS, OutputRequest
    from skyasync.models.packing import plain_layout
    from skyasync.models.token_model import TokenModel

    hidden_size = 64
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    model = LlamaForCausalLM(config)
    states = torch.randn(tokens, hidden_size, requires_grad=what != PASSES[0])
    targets = torch.randint(0, vocabulary, (tokens,))
    if what == PASSES[3]:
        others = torch.randint(0, vocabulary, (1, tokens, 16))
    else:
        others = None
    rows = targets.view(1, -1)
    mask = torch.ones(1, tokens, dtype=torch.bool)

    def plain() -> tuple[Tensor, ...]:
        logprobs = model.lm_head(states[:-1]).log_softmax(-1)
        chosen = logprobs.gather(1, targets[1:, None]).squeeze(1)
        if others is not None:
            return chosen, logprobs.gather(1, others[0, 1:])
        if what == PASSES[2]:
            return (chosen, -(logprobs.exp() * logprobs).sum(-1))
        return (chosen,)

    class Given(TokenModel):
        def hidden(self, layout: object) -> Tensor:
            return states[:-1]

    def lean() -> tuple[Tensor, ...]:
        names = {LOGPROBS} | ({ENTROPY} if what == PASSES[2] else set())
        request = OutputRequest.of(*names, token_ids=others)
        return tuple(Given(model)(plain_layout(rows, mask, mask.clone()), request).values())

    return _peak({"plain": plain, "lean": lean}[way], gradient=what != PASSES[0])


def _peak(work: Callable[[], tuple], *, gradient: bool) -> int:
    import torch

    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    with torch.set_grad_enabled(gradient):
        found = sum(score.sum() for score in work())
        if gradient:
            found.backward()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size = [arguments.tokens, arguments.vocabulary]
    if arguments.one:
        print(peak_of(*arguments.one, *size))
        return
    for what in PASSES:
        found = {}
        for way in ("plain", "lean"):
            command = [sys.executable, "-m", "benchmarks.lean_logprobs", "--one", way, what]
            command += [f"--tokens={size[0]}", f"--vocabulary={size[1]}"]
            found[way] = int(
                subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[
                    -1
                ]
            )
        share = found["lean"] / found["plain"]
        print(
            f"{what:28} plain {found['plain'] / GIB:6.2f} GiB   here {found['lean'] / GIB:6.2f} GiB   {share:5.2f}"
        )


if __name__ == "__main__":
    main()

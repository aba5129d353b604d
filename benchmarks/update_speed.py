"""Seconds per policy update of a tiny model on one core, and the effect of each optimization.

    python -m benchmarks.update_speed            # 1,024 sequences of about 40 + 15 tokens, 0.45 M parameters
    python -m benchmarks.update_speed --ragged   # log-normal lengths, the longest 8 times the mean
    python -m benchmarks.update_speed --trees    # agents' episodes of 8 turns x 4 branches
    python -m benchmarks.update_speed --profile  # where the time goes

All variants run in turn, several rounds, in one process. The table shows the medians of their CPU
seconds (of one core) and of the ratios to the library's defaults in the same round, token by token,
which are stable on a noisy machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from skyasync.config.schema import Config
from skyasync.models.batch import UpdateBatch
from skyasync.models.fsdp import backend as fsdp
from skyasync.models.fsdp.backend import FSDPBackend
from skyasync.workers.policy import PolicyWorker

OWN = "update, 4k tokens per micro-batch"
PADDED = "padded batches of 64 rows"


def tiny_llama(folder: str) -> str:
    """2 layers, hidden 128: about 0.45 M parameters."""
    config = LlamaConfig(
        vocab_size=400, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def grouped_batch(
    prompts: int, samples: int, prompt_length: int = 40, response_length: int = 15
) -> UpdateBatch:
    """Groups that share a prompt; lengths vary by a quarter around the given means."""
    generator = torch.Generator().manual_seed(0)

    def lengths(mean: int, count: int) -> torch.Tensor:
        return torch.randint(mean * 3 // 4, mean * 5 // 4 + 1, (count,), generator=generator)

    prompt = lengths(prompt_length, prompts).repeat_interleave(samples)
    total = prompt + lengths(response_length, prompts * samples)
    columns = torch.arange(int(total.max()))
    texts = torch.randint(0, 400, (prompts, len(columns)), generator=generator).repeat_interleave(
        samples, 0
    )
    answers = torch.randint(0, 400, (prompts * samples, len(columns)), generator=generator)
    attention = columns < total[:, None]
    loss_mask = attention & (columns >= prompt[:, None])
    return UpdateBatch(
        tokens=torch.where(loss_mask, answers, texts) * attention,
        attention_mask=attention,
        loss_mask=loss_mask,
        group_ids=torch.arange(prompts).repeat_interleave(samples),
        behaviour_logprobs=torch.full(loss_mask.shape, -6.0) * loss_mask,
        versions=torch.where(loss_mask, 0, -1),
        truncated=torch.zeros(len(total), dtype=torch.bool),
        rewards=torch.zeros(loss_mask.shape),
        advantages=torch.randn(len(total), 1, generator=generator) * loss_mask,
        loss_weights=loss_mask / loss_mask.sum(),
    )


def ragged_batch(rows: int = 128, mean: int = 128, longest: int = 8) -> UpdateBatch:
    """Rows of log-normal lengths, the longest ``longest`` times the mean; each has a prompt of its
    own."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(rows, generator=generator, dtype=torch.float64)
    # of the logarithm's standard deviation, which determines how far the longest is from the mean
    low = 0.0
    high = 4.0
    for _ in range(50):
        middle = (low + high) / 2
        drawn = (middle * normal).exp()
        low, high = (middle, high) if drawn.max() < longest * drawn.mean() else (low, middle)
    total = (drawn * (mean * longest / drawn.max())).long().clamp(min=4)
    columns = torch.arange(int(total.max()))
    attention = columns < total[:, None]
    loss_mask = attention & (
        columns >= torch.div(total, 4, rounding_mode="floor").clamp(max=16)[:, None]
    )
    return UpdateBatch(
        tokens=torch.randint(0, 400, attention.shape, generator=generator) * attention,
        attention_mask=attention,
        loss_mask=loss_mask,
        group_ids=torch.arange(rows),
        behaviour_logprobs=torch.full(loss_mask.shape, -6.0) * loss_mask,
        versions=torch.where(loss_mask, 0, -1),
        truncated=torch.zeros(rows, dtype=torch.bool),
        rewards=torch.zeros(loss_mask.shape),
        advantages=torch.randn(rows, 1, generator=generator) * loss_mask,
        loss_weights=loss_mask / loss_mask.sum(),
    )


def tree_batch(
    episodes: int = 4,
    turns: int = 8,
    branches: int = 4,
    prompt: int = 64,
    observation: int = 48,
    reply: int = 16,
) -> UpdateBatch:
    """Samples of one prompt. In each turn rows continue the trunk, each by a reply; one of them
    becomes the trunk.

    A reply is trained in its own row, and the trunk's replies are context of later ones.
    """
    generator = torch.Generator().manual_seed(0)
    rows: list[torch.Tensor] = []
    first = torch.randint(0, 400, (prompt,), generator=generator)
    for _ in range(episodes):
        trunk = first
        for _ in range(turns):
            trunk = torch.cat([trunk, torch.randint(0, 400, (observation,), generator=generator)])
            replies = torch.randint(0, 400, (branches, reply), generator=generator)
            rows += [torch.cat([trunk, each]) for each in replies]
            trunk = rows[-1]
    total = torch.tensor([len(row) for row in rows])
    columns = torch.arange(int(total.max()))
    attention = columns < total[:, None]
    loss_mask = attention & (columns >= total[:, None] - reply)
    return UpdateBatch(
        tokens=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        attention_mask=attention,
        loss_mask=loss_mask,
        group_ids=torch.zeros(len(rows), dtype=torch.int64),
        trajectory_ids=torch.arange(episodes).repeat_interleave(turns * branches),
        behaviour_logprobs=torch.full(loss_mask.shape, -6.0) * loss_mask,
        versions=torch.where(loss_mask, 0, -1),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        rewards=torch.zeros(loss_mask.shape),
        advantages=torch.randn(len(rows), 1, generator=generator) * loss_mask,
        loss_weights=loss_mask / loss_mask.sum(),
    )


def worker(path: str, micro_batch_tokens: int, **more: bool) -> PolicyWorker:
    cfg = Config()
    cfg.trainer.policy.model.path = path
    cfg.trainer.micro_batch_tokens = micro_batch_tokens
    cfg.trainer.policy.gradient_checkpointing = more.get("checkpointing", False)
    started = PolicyWorker(cfg, threads=1)
    with patch.object(FSDPBackend, "is_sharded", lambda self: more.get("sharded", False)):
        started.setup()
    return started


def unshared(update: Callable[[], object]) -> None:
    """Every sequence with its own copy of the prompt."""
    with patch.object(fsdp, "can_share_prefixes", lambda config: False):
        update()


def textbook(model: LlamaForCausalLM, batch: UpdateBatch, rows: int = 64) -> None:
    """The usual trainer: fixed micro-batches, a padding mask, logits at every position."""
    for piece in batch.split(rows):
        logits = model(
            piece.tokens, attention_mask=piece.attention_mask.long(), use_cache=False
        ).logits[:, :-1]
        chosen = -F.cross_entropy(
            logits.flatten(0, 1), piece.tokens[:, 1:].flatten(), reduction="none"
        )
        weights = piece.loss_weights * piece.advantages
        (-weights[:, 1:].flatten() * chosen).sum().backward()
    model.zero_grad()


class Bare:
    """A minimal loop without the library: as many tokens in rows of equal length.

    Per micro-batch of 4,096 tokens: forward, cross-entropy of every token, backward; then the
    gradient is clipped and AdamW steps. There is no packing, no ratio, no advantage, no check and
    no metric.
    """

    def __init__(self, path: str, tokens: int, width: int, at_once: int = 4096) -> None:
        self.model = LlamaForCausalLM.from_pretrained(path)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.tokens = torch.randint(0, 400, (tokens // width, width))
        self.rows = at_once // width

    def __call__(self) -> None:
        for tokens in self.tokens.split(self.rows):
            logits = self.model(tokens, use_cache=False).logits[:, :-1]
            chosen = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
            (chosen / self.tokens.numel()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def ragged_variants(path: str, batch: UpdateBatch) -> dict[str, Callable[[], object]]:
    lengths = batch.attention_mask.sum(1)
    tokens = int(lengths.sum())
    same_attention = int(lengths.square().sum() / lengths.sum())
    padded = LlamaForCausalLM.from_pretrained(path)
    return {
        OWN: partial(worker(path, 4096).update_policy, batch),
        PADDED: partial(textbook, padded, batch),
        "bare loop, rows that attend as much": Bare(path, tokens, same_attention),
        "bare loop, rows of the mean length": Bare(path, tokens, tokens // len(batch)),
        "bare loop, rows of the longest": Bare(path, tokens, batch.tokens.shape[1]),
    }


def variants(path: str, batch: UpdateBatch) -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {}
    for thousand in (2, 4, 8, 16, 64):
        found[f"update, {thousand}k tokens per micro-batch"] = partial(
            worker(path, thousand * 1024).update_policy, batch
        )
    found["update, prompts not shared, 4k"] = partial(
        unshared, partial(worker(path, 4096).update_policy, batch)
    )
    found["update, FSDP on one rank, 4k"] = partial(
        worker(path, 4096, sharded=True).update_policy, batch
    )
    found["update, gradient checkpointing, 4k"] = partial(
        worker(path, 4096, checkpointing=True).update_policy, batch
    )
    found["log-probabilities only, 4k"] = partial(worker(path, 4096).logprobs, batch)
    found["forward and backward by the textbook"] = partial(
        textbook, LlamaForCausalLM.from_pretrained(path), batch
    )
    return found


ROWS = "update, rows packed one by one, 4k"


def tree_variants(path: str, batch: UpdateBatch) -> dict[str, Callable[[], object]]:
    """Each worker is first updated once, and the differences of their results and weights are
    printed."""
    trees = worker(path, 4096)
    rows = worker(path, 4096)
    weights = {"before": all_weights(worker(path, 4096))}
    for name, policy in ((OWN, trees), (ROWS, rows)):
        with patch.object(fsdp, "can_share_prefixes", lambda config, shares=name == OWN: shares):
            print(
                f"{name:42} {policy.update_policy(batch)['computed_tokens']:,.0f} tokens computed"
            )
        weights[name] = all_weights(policy)
    change = (weights[OWN] - weights["before"]).norm()
    print(
        f"weights differ by {float((weights[OWN] - weights[ROWS]).norm() / change):.1e} of the update"
    )
    return {
        OWN: partial(trees.update_policy, batch),
        ROWS: partial(unshared, partial(rows.update_policy, batch)),
        "forward and backward by the textbook": partial(
            textbook, LlamaForCausalLM.from_pretrained(path), batch
        ),
    }


def all_weights(policy: PolicyWorker) -> torch.Tensor:
    return torch.cat([weight.flatten() for _, weight in policy.backend.weights()]).double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--ragged", action="store_true", help="log-normal lengths")
    parser.add_argument("--trees", action="store_true", help="agents' episodes with branches")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.ragged:
        batch = ragged_batch()
    else:
        batch = grouped_batch(prompts=64, samples=16)
    if arguments.trees:
        batch = tree_batch()
    tokens = int(batch.attention_mask.sum())
    trained = int(batch.loss_mask.sum())
    print(f"{len(batch)} sequences, {tokens} tokens, {trained} of them trained")
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_llama(folder)
        if arguments.profile:
            policy = worker(path, 4096)
            policy.update_policy(batch)
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU]
            ) as profile:
                policy.update_policy(batch)
            print(
                profile.key_averages().table(
                    sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=40
                )
            )
            return
        if arguments.trees:
            made = tree_variants
        elif arguments.ragged:
            made = ragged_variants
        else:
            made = variants
        functions = made(path, batch)
        took = list(rounds(functions, arguments.rounds))
    for name, function in functions.items():
        seconds = statistics.median(each[name] for each in took if name in each)
        times = statistics.median(each[name] / each[OWN] for each in took if name in each)
        if isinstance(function, Bare):
            own = function.tokens.numel()
        else:
            own = tokens
        print(
            f"{name:42} {seconds:7.3f} s  {times * tokens / own:5.2f}  {own / seconds:9,.0f} tokens/s"
        )


def rounds(functions: dict[str, Callable[[], object]], count: int) -> Iterator[dict[str, float]]:
    """Seconds of each; the padded batches, which take most of the time, are in every fifth
    round."""
    for number in range(count):
        chosen = {
            name: function
            for name, function in functions.items()
            if number % 5 == 0 or name != PADDED
        }
        yield {name: cpu_seconds(function) for name, function in chosen.items()}


def cpu_seconds(function: Callable[[], object]) -> float:
    """Of one thread: other work on the machine is not counted."""
    began = time.process_time()
    function()
    return time.process_time() - began


if __name__ == "__main__":
    main()

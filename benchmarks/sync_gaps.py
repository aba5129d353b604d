"""Trainer against engine after 20 random updates: every shape, dtype, transfer and KV policy, in
one table.

    OMP_NUM_THREADS=1 uv run -m benchmarks.sync_gaps [--backend vllm] [--shapes llama gpt2]
        [--dtypes float32] [--ties tied] [--modes full delta adapter] [--kv keep recompute] [--rope]
        [--looks 20]

Random models of two layers with random weights. Before each update requests are in flight; they
keep their cache (``keep``) or are interrupted and continued with a new one (``recompute``). Then
every weight is changed at random (of an adapter's, with ``adapter``), synced and verified. Mean
absolute differences of log-probabilities, in nats:

- floor: of the verification prompts at start-up, when both have the weights of one file; limit:
  computed from it;
- probe: of the same after an update, the largest of the 20 (or of ``looks`` updates, including the
  last);
- sampled: of tokens sampled after the updates, as the engine reported them;
- in flight: of tokens after an update that requests of before the update got. With ``keep`` older
  weights computed their cache, so the difference is the cost of that policy and not an error.

``rope``: the same with ``trainer.policy.model.config_kwargs``, another base and scaling of rotary
embeddings.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from skyasync.config.schema import Config
from skyasync.errors import headline
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import (
    ENGINES,
    EngineConfig,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
)
from skyasync.weight_sync.sync import WeightSync
from skyasync.weight_sync.verify.log_probabilities import BFLOAT16, FLOAT32
from skyasync.workers.dispatch import LocalDispatch, memory_transfer

UPDATES = 20
VOCABULARY = 96
PROBE = [[*range(1, 40)], [7, 11, 3, 5] * 8]
ROPE = {"rope_theta": 700.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
SHAPES = ("llama", "qwen2", "qwen3", "gpt2", "moe")
TIES = ("tied", "untied")
DTYPES = ("float32", "bfloat16")
MODES = ("full", "delta", "adapter")
KV = ("keep", "recompute")
COLUMNS = ("floor", "limit", "probe", "sampled", "in flight")


@dataclass(frozen=True)
class Shape:
    name: str
    tie: str
    dtype: str
    rope: bool = False

    def __str__(self) -> str:
        return " | ".join((self.name + (", rope" if self.rope else ""), self.tie, self.dtype))


def configuration(shape: Shape, head_dim: int) -> PreTrainedConfig:
    """Two layers; vLLM's kernels need a ``head_dim`` of 32 at least."""
    tied = shape.tie == "tied"
    if shape.name == "gpt2":
        return GPT2Config(
            vocab_size=VOCABULARY, n_positions=256, n_embd=2 * head_dim, n_layer=2, n_head=2, tie_word_embeddings=tied,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 2 * head_dim, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "tie_word_embeddings": tied,
        "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    if shape.name == "moe":
        experts = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
        }
        return Qwen3MoeConfig(**common | experts | {"head_dim": head_dim})
    if shape.name == "qwen3":
        return Qwen3Config(**common, head_dim=head_dim)
    return {"llama": LlamaConfig, "qwen2": Qwen2Config}[shape.name](**common)


def save(shape: Shape, folder: str, head_dim: int) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(configuration(shape, head_dim)).save_pretrained(folder)
    words = Tokenizer(
        models.WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0")
    )
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0").save_pretrained(
        folder
    )  # vLLM's adapters need one
    return folder


def settings(shape: Shape, path: str, backend: str, *, adapter: bool) -> Config:
    cfg = Config()
    policy = cfg.trainer.policy
    policy.model.path = path
    policy.model.dtype = shape.dtype
    policy.threads = 1
    policy.model.config_kwargs = dict(ROPE) if shape.rope else {}
    cfg.generator.backend = backend
    if adapter:
        policy.lora.rank = 4
        policy.lora.sync = "adapter"
    return cfg


class Both:
    """A trainer and an engine of one model, and the sync between them."""

    def __init__(self, shape: Shape, path: str, backend: str, *, adapter: bool) -> None:
        cfg = settings(shape, path, backend, adapter=adapter)
        self.dispatch = LocalDispatch(cfg)
        extra = {
            "config_kwargs": cfg.trainer.policy.model.config_kwargs,
            "adapter_rank": cfg.trainer.policy.lora.rank,
        }
        config = EngineConfig(
            path,
            dtype=shape.dtype,
            threads=1,
            max_model_len=256,
            max_num_seqs=16,
            kv_cache_gb=0.05,
            extra=extra,
        )
        self.client = InferenceClient([ENGINES[backend](config)])
        rounding = FLOAT32 if shape.dtype == "float32" else BFLOAT16
        self.sync = WeightSync(
            self.dispatch, self.client, PROBE, rounding=rounding, adapted=adapter
        )
        self.version = self._asked = 0
        self._random = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def change(self, size: float = 2e-3) -> None:
        for parameter in self.dispatch._policy.backend.model.parameters():
            if parameter.requires_grad:
                local = getattr(parameter, "_local_tensor", parameter)
                local += size * torch.randn(local.shape, generator=self._random)

    async def hand_over(self, kv: str) -> None:
        self.version += 1
        await (self.client.cut() if kv == "recompute" else self.client.pause("keep"))
        await self.sync.sync(self.version)
        await self.client.resume()

    async def sample(self, tokens: int) -> tuple[list[int], GenerationOutput]:
        self._asked += 1
        prompt = [1 + (self._asked * 7 + i) % (VOCABULARY - 2) for i in range(8)]
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1.0)
        return prompt, await self.client.generate(
            GenerationRequest(f"r{self._asked}", prompt, sampling)
        )

    async def gaps(self, samples: Sequence[tuple[list[int], GenerationOutput]]) -> list[float]:
        """Of each token of the newest version: the engine's log-probability against the
        trainer's."""
        whole = [[*prompt, *output.token_ids.tolist()] for prompt, output in samples]
        expected = await self.dispatch.score(whole)
        return [
            abs(ours - theirs)
            for (prompt, output), scores in zip(samples, expected, strict=True)
            for ours, theirs, version in zip(
                scores[len(prompt) - 1 :],
                output.logprobs.tolist(),
                output.versions.tolist(),
                strict=True,
            )
            if version == self.version
        ]


async def measure(
    shape: Shape,
    modes: Sequence[str],
    kvs: Sequence[str],
    backend: str,
    updates: int = UPDATES,
    looks: int = UPDATES,
) -> AsyncIterator[tuple[str, str, dict[str, float]]]:
    """A row for each transfer and KV policy, by one trainer and one engine; adapters need their
    own.

    Args:
        looks: updates after which trainer and engine are compared, including the last.

    Raises:
        WeightSyncError: if a sync is not verified.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = await asyncio.to_thread(save, shape, folder, 32 if backend == "vllm" else 8)
        both = Both(shape, path, backend, adapter=modes == ["adapter"])
        await both.client.start()
        try:
            await both.sync.measure_floor()
            await both.hand_over("keep")  # so that all samples have the adapter, if there is one
            for mode, kv in product(modes, kvs):
                if mode == "delta":
                    both.dispatch._cfg.generator.weight_sync_mode = "delta"
                else:
                    both.dispatch._cfg.generator.weight_sync_mode = "full"
                both.dispatch.transfer = memory_transfer(both.dispatch._cfg, both.dispatch._groups)
                yield mode, kv, await _row(both, kv, updates, updates // looks)
        finally:
            await both.client.shutdown()
            await both.dispatch.shutdown()


async def _row(both: Both, kv: str, updates: int, every: int) -> dict[str, float]:
    row = dict.fromkeys(COLUMNS, 0.0)
    sampled: list[float] = []
    lived: list[float] = []
    for number in range(1, updates + 1):
        looked_at = number % every == 0
        in_flight = [asyncio.create_task(both.sample(24)) for _ in range(2 * looked_at)]
        if looked_at:
            await both.sample(2)  # they have begun
        both.change()
        await both.hand_over(kv)
        if looked_at:
            found = await both.sync._compare("after an update")
            row["probe"] = max(row["probe"], found["sync/logprob_gap_mean"])
            row["limit"] = found["sync/logprob_gap_limit"]
            sampled += await both.gaps([await both.sample(4)])
            lived += await both.gaps(await asyncio.gather(*in_flight))
    assert both.sync._floor is not None
    means = {"sampled": fmean(sampled), "in flight": fmean(lived) if lived else math.nan}
    return row | means | {"floor": both.sync._floor}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="transformers", choices=("transformers", "vllm"))
    for name, choices in (
        ("shapes", SHAPES),
        ("ties", TIES),
        ("dtypes", DTYPES),
        ("modes", MODES),
        ("kv", KV),
    ):
        parser.add_argument(f"--{name}", nargs="+", default=choices, choices=choices)
    parser.add_argument("--rope", action="store_true")
    parser.add_argument(
        "--looks", type=int, default=UPDATES, choices=(1, 2, 4, 5, 10, 20), help="of the updates"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"| shape | head | dtype | sync | KV | {' | '.join(COLUMNS)} |\n|{'---|' * (5 + len(COLUMNS))}"
    )
    for chosen in product(options.shapes, options.ties, options.dtypes):
        shape = Shape(*chosen, rope=options.rope)
        weights = [mode for mode in options.modes if mode != "adapter"]
        for modes in (weights, ["adapter"] if "adapter" in options.modes else []):
            if modes:
                asyncio.run(_print(shape, modes, options))


async def _print(shape: Shape, modes: list[str], options: argparse.Namespace) -> None:
    try:
        async for mode, kv, row in measure(
            shape, modes, options.kv, options.backend, looks=options.looks
        ):
            print(
                f"| {shape} | {mode} | {kv} | {' | '.join(f'{row[c]:.2g}' for c in COLUMNS)} |",
                flush=True,
            )
    except Exception as error:
        print(
            f"| {shape} | {modes[0]} | | {type(error).__name__}: {headline(error)[:200]} |"
            + " |" * 4,
            flush=True,
        )


if __name__ == "__main__":
    main()

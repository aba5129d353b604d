"""The plan's measurement of large models, against torch's own tracker in a hand-written FSDP2 loop.

    python -m benchmarks.plan                # 8B on 8, 32B on 16 and on 4,096, 235B-A22B on 64 ranks
    python -m benchmarks.plan --only 8B
    python -m benchmarks.plan --whole        # the loop with all layers, instead of the line through two depths

Neither needs weights, a GPU or other processes. The loop is a minimal program: decoder layers
sharded by FSDP2 and recomputed, log-probabilities in chunks, AdamW; it has no code of the library.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

PROMPT = 1024
RESPONSE = 4096
ROWS = 3
PIECE = 1 << 27
"""Logits in memory at the same time: half a GiB of float32."""


@dataclass(frozen=True)
class Case:
    """A model's config.json on ``ranks`` ranks."""

    name: str
    model: dict[str, Any]
    ranks: int
    prompt: int = PROMPT
    response: int = RESPONSE


QWEN3 = {
    "model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "num_key_value_heads": 8,
    "tie_word_embeddings": False, "max_position_embeddings": 40960,
}  # fmt: skip
QWEN3_8B = QWEN3 | {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
}  # fmt: skip
QWEN3_32B = QWEN3 | {
    "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
}  # fmt: skip
QWEN3_235B = QWEN3 | {
    "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8,
}  # fmt: skip
CASES = (
    Case("8B", QWEN3_8B, 8),
    Case("32B", QWEN3_32B, 16),
    Case("32B, 4,096 ranks", QWEN3_32B, 4096),
    Case("235B-A22B", QWEN3_235B, 64),
)


def planned(case: Case) -> Any:
    """The plan's memory of one rank."""
    from transformers import AutoConfig

    from skyasync.planning.measure import measure
    from skyasync.workers.roles import POLICY, ROLES

    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(**case.model).save_pretrained(folder)
        return measure(_settings(case, folder), ROLES[POLICY], case.ranks, gpus=True)


def _settings(case: Case, folder: str) -> Any:
    from skyasync.config.schema import Config

    cfg = Config()
    cfg.trainer.policy.model.path = folder
    cfg.trainer.policy.model.dtype = "bfloat16"
    cfg.trainer.policy.gradient_checkpointing = True
    cfg.trainer.max_prompt_length = case.prompt
    cfg.generator.sampling_params.max_generate_length = case.response
    cfg.trainer.micro_batch_tokens = ROWS * (case.prompt + case.response)
    cfg.generator.n_samples_per_prompt = 1  # no prompt is shared
    cfg.trainer.train_batch_size = 2 * ROWS * case.ranks
    cfg.trainer.placement.policy_num_gpus_per_node = case.ranks
    return cfg


def tracked(case: Case, *, whole: bool) -> int:
    """Peak bytes of a rank in the loop; extrapolated from two depths, unless it is the
    ``whole``."""
    layers = case.model["num_hidden_layers"]
    if whole:
        return loop_peak(case, layers)
    few, more = (loop_peak(case, depth) for depth in (4, 5))
    return more + (more - few) * (layers - 5)


def loop_peak(case: Case, layers: int) -> int:
    """Peak bytes by torch's tracker: a micro-batch with gradients and optimizer state in memory,
    and its step."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import _disable_current_modes
    from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def untracked(
        self: Any, schema: Any
    ) -> Any:  # DTensor creates tensors of global shape, which are not really there
        with _disable_current_modes():
            return propagate(self, schema)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        mesh = init_device_mesh("cpu", (case.ranks,))
        with torch.device("meta"):
            config = AutoConfig.for_model(**case.model | {"num_hidden_layers": layers})
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="sdpa"
            )
        model.gradient_checkpointing_enable({"use_reentrant": False})
        loop = _loss_of(model.train())
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in (*model.model.layers, loop):
            fully_shard(
                layer, mesh=mesh, mp_policy=policy, shard_placement_fn=_placement(case.ranks)
            )
        with (
            mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", untracked),
            # Without numbers it finds rows that follow each other, and makes masks that no rank
            # has.
            mock.patch.object(
                masking_utils, "find_packed_sequence_indices", lambda positions: None
            ),
            mode,
        ):
            loop.to_empty(device="cpu")
            optimizer = torch.optim.AdamW(loop.parameters(), fused=True)
            for parameter in loop.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            ids = torch.zeros(ROWS, case.prompt + case.response, dtype=torch.int64)
            tracker = FSDPMemTracker(loop, optimizer)
            tracker.track_inputs((ids,))
            with tracker:
                loop(ids, case.prompt).backward()
                optimizer.step()
        return max(int(peak["Total"]) for peak in tracker.get_tracker_snapshot("peak").values())
    finally:
        dist.destroy_process_group()


def _placement(ranks: int) -> Any:
    """If the ranks do not divide the number of experts, a later dimension is divided."""
    from torch.distributed.tensor import Shard

    def place(parameter: Any) -> Shard | None:
        sizes = parameter.shape
        if len(sizes) > 2:
            return next((Shard(i) for i, size in enumerate(sizes) if size % ranks == 0), None)
        return None

    return place


def _loss_of(model: Any) -> Any:
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, prompt: int) -> torch.Tensor:
            hidden = (
                model.model(input_ids=ids, use_cache=False)
                .last_hidden_state[:, prompt - 1 : -1]
                .flatten(0, 1)
            )
            next_ids = ids[:, prompt:].flatten()
            count = max(1, PIECE // model.config.vocab_size)
            return sum(
                checkpoint(self.loss, *part, use_reentrant=False)
                for part in zip(hidden.split(count), next_ids.split(count), strict=True)
            )

        def loss(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(model.lm_head(hidden).float(), ids, reduction="sum")

    return Loop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose names begin like this")
    parser.add_argument("--whole", action="store_true", help="the loop with all layers")
    arguments = parser.parse_args()
    print(
        f"{'case':18} {'ranks':>6} {'plan s':>7} {'CPU s':>6} {'plan GiB':>9} {'loop GiB':>9} {'ratio':>6}",
        flush=True,
    )
    for case in (case for case in CASES if case.name.startswith(arguments.only)):
        start = time.perf_counter()
        processor = time.process_time()
        use = planned(case)
        seconds = time.perf_counter() - start
        processor = time.process_time() - processor
        size = sum(use.updating.values())
        line = f"{case.name:18} {case.ranks:6} {seconds:7.1f} {processor:6.1f} {size / 2**30:9.2f}"
        print(line, end=" ", flush=True)
        other = tracked(case, whole=arguments.whole)
        print(f"{other / 2**30:9.2f} {size / other:6.2f}", flush=True)
        for phase in ("resident", "scoring", "stepping", "publishing"):
            print(f"    {phase:12} {sum(getattr(use, phase).values()) / 2**30:9.2f} GiB")
        sent = ", ".join(f"{kind} {size / 2**30:.0f} GiB" for kind, size in use.sent.items())
        print(f"    {use.flops / 1e15:.1f} PFLOP, {sent}")


if __name__ == "__main__":
    main()

"""Models, and the backends that compute with them.

Planning shares the names and sizes here with workers, so this module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from skyasync.registry import Registry

BACKENDS = Registry("training backend", {"skyasync.models.fsdp.backend": "fsdp2"})
"""Classes that hold and train models (``ModelBackend``), by the names of ``trainer.strategy``."""

VOCABULARY = "vocabulary"
VALUE = "value"
SCORE = "score"
"""Heads of models.

A causal language model's gives logits. A value head gives one number per token, and is new if the
files lack it. A score head is the same, from the files.
"""

MICRO_BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Default of the tokens of a micro-batch, by device.

On a CPU the activations should stay in its caches: of a tiny model 4,096 tokens are computed about
1.4 times faster than 16,384 at once (benchmarks/update_speed.py).
"""

MIN_SAVED_TOKENS = 0.2
"""Share of all tokens that shared prefixes must save: attention with a mask is slower."""

MAX_LOGITS = 1 << 27
"""Most logits in memory at once: half a GiB in float32.

Beyond it they are recomputed in the backward pass, in chunks.
"""

STEPPED_AT_ONCE = 1 << 22
"""Numbers of which an optimizer with a low-precision state makes float32 copies at once."""

MAX_PADDING = 0.05
"""Share of padding up to which rows are a padded batch; with more they are packed, if possible."""


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the dimensions of a model's device mesh; their product is the number of ranks.

    Invariant: rows are divided over the data dimension alone. The ranks of one data coordinate get
    the same rows and return the same values. The pipeline dimension varies slowest (stages send
    least, so they may be on different nodes), then data, context and tensor:

        pipeline 2 x data 2 x tensor 2:   ranks 0 and 1, 4 and 5 share the first half of the rows, the others the second

    ``expert`` neighbours of the data dimension divide a mixture's experts among them.
    """

    data: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def ranks(self) -> int:
        return self.pipeline * self.data * self.non_data

    @property
    def non_data(self) -> int:
        """Ranks of a stage that have the same rows: neighbours."""
        return self.context * self.tensor

    def data_rank(self, rank: int) -> int:
        return rank // self.non_data % self.data

    @classmethod
    def of(
        cls,
        ranks: int,
        context: int = 1,
        tensor: int = 1,
        pipeline: int = 1,
        expert: int = 1,
    ) -> MeshShape:
        """The data dimension takes all of ``ranks`` that the other dimensions leave."""
        shape = cls(ranks // (context * tensor * pipeline), context, tensor, pipeline, expert)
        if shape.ranks != ranks:
            raise ValueError(
                f"{ranks} ranks are not a multiple of pipeline {pipeline} times context {context} times tensor {tensor}"
            )
        return shape

"""What a model's ranks do together besides sharding weights: split matrices, split sequences.

Invariant: nothing here is imported by runs that do neither.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from skyasync.workers.mesh import Mesh
from skyasync.workers.parallel import context, ring, tensor
from skyasync.workers.parallel.context import Context
from skyasync.workers.parallel.vocabulary import Vocabulary


def divide(
    model: PreTrainedModel, mesh: Mesh, kind: str, dtype: torch.dtype
) -> tuple[Context | None, Vocabulary | None]:
    """Prepare a model without memory for the axes of a mesh; which slice of rows and which logits this rank has.

    Args:
        kind: how split sequences attend, ``trainer.parallel.context_kind``.
        dtype: that the model computes in.
    """
    place = None
    if mesh.context_group:
        context.check(model.config, mesh.axes.context, mesh.axes.tensor, kind)
        if kind == context.RING:
            ring.check_device(model.config, dtype, mesh.shard.device_type)
        place = Context.of(mesh.context_group, kind)
        place.install(model)
    return place, tensor.split(model, mesh.tensor) if mesh.tensor else None

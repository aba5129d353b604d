"""What a model's ranks do together besides sharding weights: split matrices, split sequences.

Invariant: nothing here is imported by runs that do neither.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from skyasync.errors import UserError
from skyasync.workers.mesh import Mesh
from skyasync.workers.parallel import context, ring, tensor
from skyasync.workers.parallel.context import Context
from skyasync.workers.parallel.vocabulary import Vocabulary


def divide(model: PreTrainedModel, mesh: Mesh, kind: str = "ulysses") -> tuple[Context | None, Vocabulary | None]:
    """Prepare a model without memory for the axes of a mesh; which slice of rows and which logits this rank has.

    Args:
        kind: how split sequences attend, ``trainer.parallel.context_kind``.
    """
    place = None
    if mesh.context_group:
        if kind == "ring" and mesh.shard.device_type != "cpu":
            raise UserError(f"{ring.KEY} is for CPUs: on a {mesh.shard.device_type} device use ulysses")
        context.check(model.config, mesh.axes.context, mesh.axes.tensor, kind)
        place = Context.of(mesh.context_group)
        place.install(model, kind)
    return place, tensor.split(model, mesh.tensor) if mesh.tensor else None

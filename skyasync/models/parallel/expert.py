"""Expert parallelism: neighbours of the data dimension have some whole experts each.

Each rank sends the tokens of its own rows to the ranks that have the experts of these, and gets the
results back (all-to-all), by transformers' ``ep_dispatch_experts``:

    own tokens ──router──▶ all-to-all ──▶ own experts, on tokens of all ranks ──▶ all-to-all ──▶ own
    tokens

Invariant: the model's gradient is that of the whole model. An expert's gradient is summed over all
tokens that it was sent, and over the ranks that have the same experts, among which FSDP2 shards
them. All ranks run as many micro-batches, forward and backward, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import (
    apply_expert_parallelism,
    replace_layer_number_by_wildcard,
)

from skyasync.errors import UserError

KEY = "trainer.parallel.expert"
DISPATCHED = "ep_dispatch_experts"


def divide_experts(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Leave each rank its experts of a model that has no memory yet.

    Raises:
        UserError: for a family without a plan, or a size that does not divide its experts.
    """
    size = mesh.size()
    family = type(model).__name__
    if DISPATCHED not in model.ep_plan.values():  # such as a plan that sums experts' outputs
        raise UserError(
            f"{KEY}={size}: transformers has no plan by which experts of {family} are sent tokens: set it to 0"
        )
    for module in divided_experts(model):
        count = int(module.num_experts)  # type: ignore[arg-type]
        if count % size:
            divisors = " or ".join(str(n) for n in range(2, count + 1) if count % n == 0)
            raise UserError(
                f"{KEY}={size} does not divide the {count} experts of {family}: choose {divisors}"
            )
    apply_expert_parallelism(model, mesh, None, model.ep_plan)  # type: ignore[arg-type]  # no tensor dimension


def divided_experts(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The modules of experts, one in each layer that has some."""
    plan = model.ep_plan
    for name, module in model.named_modules():
        if plan.get(str(replace_layer_number_by_wildcard(name))) == DISPATCHED:
            yield module

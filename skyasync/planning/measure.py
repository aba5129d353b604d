"""What one rank of a role needs, by its own model, loss and settings: two small models are computed
without memory, and the rest is multiplied (``skyasync.models.fsdp.estimate``)."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedConfig

from skyasync.algorithms.objective import Objective
from skyasync.config.schema import Config
from skyasync.config.schema.models import reward_models
from skyasync.errors import UserError
from skyasync.models import MICRO_BATCH_TOKENS, VOCABULARY
from skyasync.models.backend import LOGPROBS, TOP_K, VALUES, OutputRequest, RankContext
from skyasync.models.batch import UpdateBatch
from skyasync.models.config import config_value, head_size, with_layers
from skyasync.models.fsdp.estimate import RankSample, rank_use, sample
from skyasync.models.rank_memory import WEIGHTS, RankUse
from skyasync.planning.memory import Lengths, rows_of_a_rank
from skyasync.planning.shape import ModelShape, config_of, read_shape
from skyasync.workers.roles import REWARD_ROLE, TEACHER_ROLE, Role

DIVIDED_SIZES = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "vocab_size",
)
"""Sizes of a configuration that the tensor dimension divides."""

FLOAT_COLUMNS = (
    "behaviour_logprobs",
    "rewards",
    "advantages",
    "values",
    "returns",
    "proximal_logprobs",
    "loss_weights",
)
"""Of a training batch, ``[rows, length]`` each."""

_SAMPLES: dict[tuple[object, ...], list[RankSample]] = {}
"""Each is computed once: settings of placement and batches change the multiplication alone."""


def measure(cfg: Config, role: Role, ranks: int, *, gpus: bool) -> RankUse:
    """What a rank of so many needs.

    Raises:
        UserError: where the code of the model or of the role's loss fails.
    """
    if role.name != REWARD_ROLE:
        return _measure(cfg, role, ranks, gpus=gpus)
    # Reward models lie side by side, and work one after the other.
    uses = []
    for model in reward_models(cfg.trainer.reward).values():
        single = copy.deepcopy(cfg)
        single.trainer.reward.models = {}
        single.trainer.reward.model.path = model.path
        single.trainer.reward.model.dtype = model.dtype
        uses.append(_measure(single, role, ranks, gpus=gpus))
    largest = max(uses, key=lambda use: sum(use.scoring.values()))
    weights = {WEIGHTS: sum(use.resident[WEIGHTS] for use in uses)}
    return replace(largest, resident=weights, scoring=largest.scoring | weights)


def _measure(cfg: Config, role: Role, ranks: int, *, gpus: bool) -> RankUse:
    kwargs = role.config_kwargs(cfg)
    shape = read_shape(role.model(cfg).path, f"{role.section}.model.path", role.head, kwargs)
    mesh = role.mesh_shape(cfg, ranks)
    rows = rows_of_a_rank(cfg, mesh.data)
    lengths = Lengths.of(cfg)
    tokens = cfg.trainer.micro_batch_tokens or MICRO_BATCH_TOKENS["cuda" if gpus else "cpu"]
    # Enough rows for one micro-batch, whatever they share.
    some_rows = math.ceil(tokens * mesh.context / lengths.response) + 2 * lengths.samples
    some_rows = min(rows, some_rows)
    # Placement and batch sizes do not change a micro-batch: rows are capped above.
    trainer = replace(
        cfg.trainer,
        placement=None,  # type: ignore[arg-type]
        train_batch_size=0,
        policy_mini_batch_size=0,
    )
    settings = (repr(trainer), repr(cfg.generator.sampling_params), lengths, some_rows)
    division = (ranks > 1, mesh.tensor, mesh.context)
    key = (role.name, gpus, shape, *division, *settings)
    if key not in _SAMPLES:
        _SAMPLES[key] = [
            _sample(cfg, role, ranks, shape, depth, some_rows, gpus=gpus) for depth in shape.depths
        ]
    use = rank_use(_SAMPLES[key], mesh, shape.layers, shape.largest_tensor, rows)
    offload = "none"
    if gpus and role.section:
        offload = vars(role.settings(cfg)).get("cpu_offload", "none")
    return use.offloaded(offload)


def _sample(
    cfg: Config, role: Role, ranks: int, shape: ModelShape, depth: int, rows: int, *, gpus: bool
) -> RankSample:
    """A micro-batch of the role's model with ``depth`` layers."""
    config = with_layers(config_of(shape.path, role.head, role.config_kwargs(cfg)), depth)
    _divide(config, role.mesh_shape(cfg, ranks).tensor)
    cfg = copy.deepcopy(cfg)
    batch = _longest(cfg, Lengths.of(cfg), rows)
    device = torch.device("cuda" if gpus else "cpu")
    with TemporaryDirectory() as folder:
        # The backend reads a model's configuration from a folder.
        config.save_pretrained(folder)
        role.model(cfg).path = folder
        try:
            worker = role.worker_class()(cfg, 0, ranks, "cpu", role=role.name)
            loss = worker.loss if role.trains else None
            context = RankContext(world_size=ranks, device=device)
            return sample(worker.spec(), context, depth, batch, _request(cfg, role), loss)
        except UserError:
            raise
        except Exception as error:  # of the model's or the loss's code: a run would end with it
            line = str(error).strip().partition("\n")[0]
            raise UserError(
                f"{role.section}.model.path={shape.name}: the {role.name} worker fails with a model of this "
                f"config.json, without weights: {type(error).__name__}: {line}"
            ) from error


def _divide(config: PreTrainedConfig, tensor: int) -> None:
    """Give a configuration the sizes of one rank's part of the tensor dimension."""
    if tensor == 1:
        return
    text: Any = config.get_text_config()
    text.head_dim = head_size(text)  # by default it would follow from fewer heads
    text.pad_token_id = None  # it may be another rank's
    for name in DIVIDED_SIZES:
        size = config_value(text, name)
        if isinstance(size, int):
            setattr(text, name, size // tensor)


def _request(cfg: Config, role: Role) -> OutputRequest:
    if role.name == TEACHER_ROLE and cfg.trainer.teacher.top_k:
        return OutputRequest.of(TOP_K, top_k=cfg.trainer.teacher.top_k)
    return OutputRequest.of(LOGPROBS if role.head == VOCABULARY else VALUES)


def _longest(cfg: Config, lengths: Lengths, rows: int) -> UpdateBatch:
    """Rows whose prompts and responses are as long as they may be; samples of a prompt share
    nothing else."""
    shape = (rows, lengths.total)
    teacher = cfg.trainer.teacher
    numbers = torch.zeros(shape)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    loss_mask[:, lengths.prompt :] = True
    # [rows, length]: prompts are equal, and responses differ from their first token on.
    tokens = torch.where(loss_mask, torch.arange(rows)[:, None] % lengths.samples, 0)
    teacher_top_k = None
    if teacher.top_k and teacher.model.path:
        teacher_top_k = torch.zeros(*shape, 2 * teacher.top_k)
    columns: dict[str, Any] = dict.fromkeys(FLOAT_COLUMNS, numbers)
    return UpdateBatch(
        tokens=tokens,
        attention_mask=torch.ones_like(loss_mask),
        loss_mask=loss_mask,
        group_ids=torch.arange(rows) // lengths.samples,
        versions=numbers.int(),
        truncated=torch.zeros(rows, dtype=torch.bool),
        **columns,
        reference_logprobs=numbers if cfg.trainer.algorithm.use_kl_loss else None,
        teacher_logprobs=numbers if teacher.model.path else None,
        teacher_top_k=teacher_top_k,
        selection=loss_mask if Objective(cfg.trainer.algorithm).prepares else None,
    )

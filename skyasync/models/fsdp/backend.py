"""The backend of ``trainer.strategy=fsdp2``: a model of transformers, sharded by FSDP2, one process per rank.

Invariant: all ranks run the same collectives in the same order. What depends on a rank's own rows (how many
micro-batches it has) is agreed on first. Between calls every parameter is the one that the optimizer knows, sharded if
the model is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from skyasync.errors import NonFiniteError
from skyasync.heap import keep_freed
from skyasync.models import MICRO_BATCH_TOKENS, VALUE
from skyasync.models.backend import (
    MODEL,
    TOKEN_LOGPROBS,
    TOP_K,
    VALUE_HEAD,
    LossFn,
    ModelBackend,
    ModelSpec,
    OutputRequest,
    RankContext,
    SaveResult,
)
from skyasync.models.batch import B, TokenBatch, UpdateBatch
from skyasync.models.fsdp import checkpoint
from skyasync.models.fsdp.layers import checkpointing_options, compile_layers, decoder_layers
from skyasync.models.fsdp.loading import load_sharded
from skyasync.models.fsdp.optimizers import (
    TrainedPart,
    check_replicated_gradients,
    is_low_precision,
    make_optimizer,
    master_dtype,
)
from skyasync.models.fsdp.quantized_base import quantize_base
from skyasync.models.fsdp.sharding import (
    HOST,
    LOOPBACK,
    OPTIMIZER,
    PARAMETERS,
    Mesh,
    local,
    loopback_interface,
    move_buffers,
    move_moments,
    move_weights,
    offload_policy,
    place,
    process_group_backend,
    shard_placement,
)
from skyasync.models.heads import HEADS, copy_own_part, new_head
from skyasync.models.packing import MicroBatch, MicroBatches, empty_micro_batch, put_rows
from skyasync.models.router_replay import Routers
from skyasync.models.token_model import SCORE_LAYER, TokenModel, can_share_prefixes
from skyasync.weight_sync.full_tensors import FileLayout, FullTensors, gathered, specs_in

if TYPE_CHECKING:
    from skyasync.models.lora import Adapters


class FSDPBackend(ModelBackend):
    """One rank of a model of transformers.

    Attributes:
        model: the sharded model.
        trained: the parts that have an optimizer, ``MODEL`` first.
        adapters: of a model whose own weights are frozen.
        mesh: of the ranks; None if one rank holds the whole model.
    """

    mesh: Mesh | None = None
    adapters: Adapters | None = None

    def load(self, spec: ModelSpec, ranks: RankContext) -> None:
        self.spec, self.ranks, self.device = spec, ranks, ranks.device
        self.dtype = spec.torch_dtype(ranks.device)
        self.trained: dict[str, TrainedPart] = {}
        self._passes = 0  # of forward_backward since the last optimizer step
        self._alike = False  # the ranks of the tensor axis have been seen to agree
        self._examined: str | None = None  # what is wrong with the current gradient
        self._metrics: dict[str, dict[str, float]] = {}  # of the current gradient
        self._checkpoint_group: dist.ProcessGroup | None = None
        if ranks.world_size > 1 and not dist.is_initialized():
            if ranks.host == LOOPBACK:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
            self._form_group(ranks.store or dist.TCPStore(ranks.host, ranks.port, ranks.world_size, is_master=False))
        torch.manual_seed(spec.trainer.seed)
        disable_progress_bar()
        self.model = self._build()
        self.hidden_size = int(self.model.model.config.hidden_size)
        if self.device.type == "cpu":
            keep_freed()  # after loading, whose own memory goes back

    # ---------------------------------------------------------------- building

    @property
    def trains(self) -> bool:
        return bool(self.spec.optimizers)

    def master_dtype(self) -> torch.dtype:
        """Of the weights between steps: small steps vanish in bfloat16, unless rounding is stochastic."""
        if not self.trains:
            return self.dtype
        return master_dtype(self.spec.optimizers[MODEL], self.dtype, self.spec.section)

    def is_sharded(self) -> bool:
        """One float32 rank gains nothing from FSDP, whose hooks cost a tiny model more than a few percent."""
        codes = bool(self.spec.lora.rank and self.spec.lora.base_dtype)  # FSDP turns codes into numbers
        several = self.ranks.world_size > 1
        return several or self.dtype != self.master_dtype() or codes or self.spec.cpu_offload == PARAMETERS

    def recomputes(self) -> bool | str:
        """Whether the backward pass recomputes activations; a CPU has memory enough and no time to spare."""
        setting = self.spec.gradient_checkpointing
        return self.device.type != "cpu" if setting == "auto" else setting

    def _build(self) -> TokenModel:
        """Load, wrap, place and shard. Frozen weights with adapters need no master weights."""
        spec = self.spec
        head = HEADS[spec.head].with_config(spec.config_kwargs)
        dtype = self.dtype if spec.lora.rank else self.master_dtype()
        home = HOST if spec.cpu_offload == PARAMETERS else self.device
        value_head: nn.Linear | None = None

        def wrap(model: PreTrainedModel) -> TokenModel:
            nonlocal value_head
            context, vocabulary = self._divide(model)
            if spec.lora.rank:
                from skyasync.models.lora import Adapters

                self.adapters = Adapters(model, spec.lora, spec.path)
                if self.mesh and self.mesh.tensor:
                    self.adapters.split(self.mesh.tensor)
            wrapper = TokenModel(model, spec.distribution).eval()
            wrapper.context, wrapper.vocabulary = context, vocabulary
            wrapper.routers = Routers(model) if spec.router_replay != "none" else None
            if VALUE_HEAD in spec.optimizers:
                value_head = nn.Linear(model.config.hidden_size, 1, bias=False, dtype=torch.float32)
                wrapper.value_head = value_head
            return wrapper

        def shard(model: PreTrainedModel) -> TokenModel:
            wrapper = self._shard(wrap(model))
            if self.adapters:
                self.adapters.detach_adapters()
            wrapper.value_head = None  # the files know of no such head
            return wrapper

        if self.is_sharded():
            if not dist.is_initialized():
                self._form_group(dist.HashStore())
            self.mesh = Mesh.make(self.device.type, spec.axes, spec.fsdp_size)
            wrapper = load_sharded(spec.path, head, dtype, home, shard)
        else:
            wrapper = wrap(head.load(spec.path, dtype))
        if self.adapters:
            self.adapters.attach_adapters()
            self.adapters.begin(spec.trainer.seed, home)
        if spec.lora.rank and spec.lora.base_dtype:
            quantize_base(wrapper.model, spec.lora.base_dtype)
        if value_head is not None:
            value_head.to_empty(device=self.device)
            copy_own_part(value_head.weight, new_head("weight", value_head.weight))
            wrapper.value_head = value_head
        place(wrapper, spec.cpu_offload, self.device)
        if self.trains:
            self._prepare_training(wrapper)
        return wrapper

    def _form_group(self, store: dist.Store) -> None:
        trainer = self.spec.trainer
        kinds = process_group_backend(self.device.type, self.spec.cpu_offload, colocated=trainer.placement.colocate_all)
        timeout = timedelta(seconds=trainer.step_timeout_s)
        dist.init_process_group(
            kinds, store=store, rank=self.ranks.rank, world_size=self.ranks.world_size, timeout=timeout
        )

    def _divide(self, model: PreTrainedModel) -> tuple[Any, Any]:
        """Split the model's matrices and sequences, if the mesh has such axes: this rank's slice and its vocabulary."""
        if self.mesh is None or self.spec.axes.sharing == 1:
            return None, None
        from skyasync.models.parallel.context import split_sequences
        from skyasync.models.parallel.tensor import split

        kind = self.spec.trainer.parallel.context_kind
        context = split_sequences(model, self.mesh, kind, self.dtype) if self.mesh.context_group else None
        return context, split(model, self.mesh.tensor) if self.mesh.tensor else None

    def _shard(self, wrapper: TokenModel) -> TokenModel:
        """FSDP2 on each decoder layer and on the rest (embeddings and head together, so tied ones stay tied)."""
        assert self.mesh is not None
        mesh, kept = self.mesh.shard, self.master_dtype()
        computing = None if self.dtype == kept else self.dtype
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(computing, reduce_dtype=torch.promote_types(kept, torch.float32)),
            "offload_policy": offload_policy(self.spec.cpu_offload, self.device),
        }
        by_rows = self.trains and is_low_precision(self.spec.optimizers[MODEL])  # counts a rank's rows from its first
        if self.mesh.tensor is None and not by_rows:
            options["shard_placement_fn"] = shard_placement(mesh.size(-1))
        for module in decoder_layers(wrapper):
            fully_shard(module, **options)
        fully_shard(wrapper, **options)
        for module in wrapper.modules():
            if isinstance(module, FSDPModule):
                # The loss weights hold the whole batch's denominators: gradients of ranks are summed, not averaged.
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
        return wrapper

    def _prepare_training(self, wrapper: TokenModel) -> None:
        spec, model = self.spec, wrapper.model
        if spec.torch_compile:
            wrapper.packs = False  # rows end to end differ in how many blocks they have: each would be compiled
            compile_layers(decoder_layers(wrapper), self.device)
        if how := self.recomputes():
            if how == "selective":
                wrapper.keeps_blocks = True  # torch compiles nothing while it chooses what to keep
            model.gradient_checkpointing_enable(checkpointing_options(selective=how == "selective"))
            wrapper.train()  # the model has no dropout, so this only switches gradient checkpointing on
            if self.adapters:
                self.adapters.set_dropout(False)
        # Without adapters a weight that is frozen for the moment is still the optimizer's.
        learnt = [p for p in model.parameters() if p.requires_grad or self.adapters is None]
        self.optimizer = make_optimizer(wrapper, learnt, spec.optimizers[MODEL], spec.trainer.seed)
        self.trained[MODEL] = TrainedPart(model, self.optimizer, spec.optimizers[MODEL].max_grad_norm)
        if wrapper.value_head is not None:
            settings = spec.optimizers[VALUE_HEAD]
            optimizer = make_optimizer(wrapper, wrapper.value_head.parameters(), settings)
            self.trained[VALUE_HEAD] = TrainedPart(wrapper.value_head, optimizer, settings.max_grad_norm)

    # ---------------------------------------------------------------- forward and backward

    def forward(self, batch: TokenBatch, request: OutputRequest) -> dict[str, Tensor]:
        whole = {name: torch.zeros(batch.tokens.shape) for name in request.names - {TOP_K, TOKEN_LOGPROBS}}
        frozen = nullcontext() if request.adapters or self.adapters is None else self.adapters.aside()
        with frozen, torch.no_grad(), sharded_afterwards(self.model):
            for micro in self._micro_batches(batch, self.spec.trainer.micro_forward_batch_size_per_gpu):
                outputs = self.model(micro.layout.to(self.device), request)
                put_rows(whole, request.names, micro, outputs, batch)
        return whole

    def forward_backward(self, batch: UpdateBatch, loss: LossFn, returns: Collection[str] = ()) -> dict[str, Tensor]:
        whole = {name: torch.zeros(batch.tokens.shape) for name in returns}
        with sharded_afterwards(self.model), self._dropping():
            micros = self._micro_batches(batch, self.spec.trainer.micro_train_batch_size_per_gpu)
            following = next(micros, None)
            while following is not None:
                micro, following = following, next(micros, None)
                if self.spec.reduce_gradients == "update" and isinstance(self.model, FSDPModule):
                    self.model.set_requires_gradient_sync(following is None)  # over ranks: after the last micro-batch
                own = micro.batch.each(lambda tensor: tensor.to(self.device))
                outputs = self.model(micro.layout.to(self.device), loss.request(own))
                terms = loss(outputs, own)
                for part, term in terms.items():
                    self.trained[part].totals.add(term)
                sum(term.loss for term in terms.values()).backward()  # type: ignore[union-attr]
                put_rows(whole, returns, micro, outputs, batch)
        return whole

    def _dropping(self) -> AbstractContextManager[None]:
        """While a gradient is computed the adapters' dropout acts, by draws that a resumed run repeats."""
        if self.adapters is None:
            return nullcontext()
        self._passes += 1
        return self.adapters.dropping(hash((self.spec.trainer.seed, self.step, self._passes, self.ranks.rank)))

    def _micro_batches(self, batch: B, max_rows: int) -> Iterator[MicroBatch[B]]:
        """This rank's micro-batches, followed by empty ones until it has as many as every other rank."""
        trainer, context = self.spec.trainer, self.spec.axes.context
        tokens = trainer.micro_batch_tokens or MICRO_BATCH_TOKENS[self.device.type]
        masks = context == 1 or trainer.parallel.context_kind != "ring"  # which knows none
        pieces = MicroBatches(
            batch,
            max_tokens=tokens * context,
            max_rows=max_rows,
            share_prefixes=can_share_prefixes(self.model.model.config) and masks,
            hidden_size=self.hidden_size,
            end_to_end=self.model.packs and context == 1,
        )
        missing = self._most_over_ranks(len(pieces)) - len(pieces)
        yield from pieces
        for _ in range(missing):
            yield empty_micro_batch(batch)

    def _most_over_ranks(self, count: int) -> int:
        if self.ranks.world_size == 1:
            return count
        most = torch.tensor(count, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        """Elementwise sum over the ranks that have rows of their own, on every rank."""
        if self.mesh and self.mesh.data_group:
            values = values.to(self.device)
            dist.all_reduce(values, group=self.mesh.data_group)
        return values.cpu()

    # ---------------------------------------------------------------- the optimizer

    def examine(self, scale: float = 1.0) -> str:
        if self._examined is None:
            found = [self._examine(name, part, scale) for name, part in self._learning()]
            self._examined = "; ".join(filter(None, found))
        return self._examined

    def _learning(self) -> list[tuple[str, TrainedPart]]:
        """The parts that the current gradient is of."""
        return [(name, part) for name, part in self.trained.items() if part.totals]

    def _examine(self, name: str, part: TrainedPart, scale: float) -> str:
        metrics = part.totals.reduce(self._sum_over_ranks)
        metrics["loss"] *= scale
        self._metrics[name] = metrics
        whose = "critic's " if name == VALUE_HEAD else ""
        if not math.isfinite(metrics["loss"]):
            return f"the {whose}loss of optimizer step {self.step} is not finite: {metrics}"
        if name == MODEL:
            self._alike = self._alike or check_replicated_gradients(self.model, self.mesh)
        metrics["grad_norm"] = float(part.measure(scale, self.mesh))
        if math.isfinite(metrics["grad_norm"]):
            return ""
        return f"the {whose}gradient of optimizer step {self.step} is not finite in: {self._not_finite()}"

    def _not_finite(self) -> str:
        """A few parameters by name whose gradient is not finite, of this rank's shard."""
        bad = [
            name
            for name, p in self.model.named_parameters()
            if p.grad is not None and not local(p.grad).isfinite().all()
        ]
        if not bad:
            return "another rank's shard"
        return ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")

    def optimizer_step(self, lr: Mapping[str, float], scale: float = 1.0) -> dict[str, dict[str, float]]:
        try:
            if problem := self.examine(scale):
                raise NonFiniteError(problem)
            metrics = self._metrics
            self._clip()
            for name, part in self._learning():
                if name == MODEL and self.spec.cpu_offload == OPTIMIZER:
                    move_moments(self.optimizer, self.device)
                part.step(lr[name])
                if name == MODEL:
                    self._keep_moments()
                    self.step += 1
            return metrics
        finally:
            self.drop_gradient()

    def _clip(self) -> None:
        for _, part in self._learning():
            part.clip()

    def _keep_moments(self) -> None:
        """Between steps the optimizer state is in host memory, if so configured."""
        if self.spec.cpu_offload == OPTIMIZER:
            move_moments(self.optimizer, HOST)

    def drop_gradient(self) -> None:
        for part in self.trained.values():
            part.drop_gradient()  # gradients are as large as the weights: none is kept until the next update
        self._passes, self._examined, self._metrics = 0, None, {}
        if self.spec.trainer.placement.colocate_all and self.device.type == "cuda":
            torch.cuda.empty_cache()  # for the engine that wakes on this GPU

    # ---------------------------------------------------------------- host memory

    def offload(self) -> None:
        self._move(HOST)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # else the memory stays this process's

    def onload(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        for part in self.trained.values():
            part.drop_gradient()  # the next update begins without gradients in any case
        if self.spec.cpu_offload == PARAMETERS:
            move_buffers(self.model, device)
        else:
            move_weights(self.model, device)
        for name, part in self.trained.items():
            if name == VALUE_HEAD or self.spec.cpu_offload == "none":
                move_moments(part.optimizer, device)

    # ---------------------------------------------------------------- weights and files

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return gathered(self.sharded_weights())

    def sharded_weights(self) -> Mapping[str, Any]:
        """As ``weights``, each as this rank's shard, or with a ``full_tensor`` that adds its adapter."""
        return self.adapters.merged() if self.adapters else checkpoint.own_tensors(self.model.model)

    def save(self, folder: Path) -> SaveResult:
        return checkpoint.save(self.model.model, self.optimizer, self.step, folder, self._extra_part())

    def begin_save(self, folder: Path) -> None:
        if self._checkpoint_group is None and dist.is_initialized():
            # Of its own: in the group that trains, its messages would get between the others' in no fixed order.
            self._checkpoint_group = dist.new_group(backend="gloo")
        self._saving = checkpoint.begin(
            self.model.model, self.optimizer, self.step, folder, self._checkpoint_group, self._extra_part()
        )

    def saved(self) -> SaveResult | None:
        return self._saving.saved()

    def restore(self, folder: Path) -> None:
        role, key = self.spec.role, f"{self.spec.section}.model.path"
        self.step = checkpoint.load(self.model.model, self.optimizer, folder, role, key, self._extra_part())
        self._keep_moments()

    def _extra_part(self) -> checkpoint.ExtraPart | None:
        """What is trained on the model's layers, and saved with the model."""
        if (head := self.trained.get(VALUE_HEAD)) is None:
            return None
        return checkpoint.ExtraPart("critic", head.module, head.optimizer, "trainer.critic.backbone=shared")

    def export(self, folder: Path, part: str = MODEL) -> None:
        if part == VALUE_HEAD:
            self._export_critic(folder)
        elif self.adapters and self.spec.lora.export == "adapter":
            own = self.adapters.own()
            if self.ranks.rank == 0:
                self.adapters.export(own, folder)
                checkpoint.export_tokenizer(self.spec.path, folder)
        else:
            self._export(self.model.model, self.sharded_weights(), folder, self.adapters)

    def _export(
        self, model: PreTrainedModel, weights: Mapping[str, Any], folder: Path, adapters: Adapters | None = None
    ) -> None:
        tensors = FullTensors(weights, self.dtype, FileLayout(model, specs_in(weights, self.dtype), adapters))
        if self.ranks.rank != 0:
            tensors.only_gather()
            return
        with adapters.aside() if adapters else nullcontext():
            checkpoint.export(model, tensors, self.spec.path, folder)

    def _export_critic(self, folder: Path) -> None:
        """As a critic of its own: the policy's layers under the head."""
        critic = HEADS[VALUE].with_config(self.spec.value_head_kwargs)
        with torch.device("meta"):
            empty = critic.empty(self.spec.path, self.dtype)
        names = {name for name, _ in (*empty.named_parameters(), *empty.named_buffers())}
        chosen = {name: value for name, value in self.sharded_weights().items() if name in names}
        assert self.model.value_head is not None
        chosen[f"{SCORE_LAYER}.weight"] = self.model.value_head.weight.detach()
        self._export(empty, chosen, folder)


@contextmanager
def sharded_afterwards(model: nn.Module) -> Iterator[None]:
    """Leave all parameters sharded: after a forward FSDP2 keeps the root's whole, for a backward that may not come."""
    try:
        yield
    finally:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

"""The backend of ``trainer.strategy=fsdp2``: a model of transformers, sharded by FSDP2.

There is one process per rank.

Invariant: all ranks run the same collectives in the same order. What depends on a rank's own rows
(how many micro-batches it has) is agreed on first. Between calls every parameter is the one that
the optimizer knows, sharded if the model is.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from skyasync.errors import NonFiniteError, UserError
from skyasync.heap import keep_freed, use_expandable_segments, use_fixed_segments
from skyasync.models import BACKENDS, MICRO_BATCH_TOKENS, VALUE
from skyasync.models.attention import WITHOUT_MEMORY, allow_recompilations
from skyasync.models.backend import (
    COMPUTED_TOKENS,
    MODEL,
    ROW_TOKENS,
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
from skyasync.models.float32_head import use_float32_head
from skyasync.models.freezing import freeze
from skyasync.models.fsdp import checkpoint
from skyasync.models.fsdp.loading import (
    WrapAndShard,
    check_attention_compiler,
    checkpointing_options,
    compile_layers,
    decoder_layers,
    load_sharded,
)
from skyasync.models.fsdp.optimizers import (
    TrainedPart,
    check_replicated_gradients,
    is_low_precision,
    make_optimizer,
)
from skyasync.models.fsdp.quantized_base import quantize_base
from skyasync.models.fsdp.sharding import (
    HOST,
    OPTIMIZER,
    PARAMETERS,
    Mesh,
    OffloadBuffers,
    local,
    process_group_backend,
    shard_placement,
)
from skyasync.models.heads import HEADS, Head, copy_own_part, new_head
from skyasync.models.packing import MicroBatch, MicroBatches, empty_micro_batch, put_rows
from skyasync.models.router_replay import Routers
from skyasync.models.token_model import SCORE_LAYER, STATES, TokenModel, can_share_prefixes
from skyasync.utils.machine import interface_towards
from skyasync.weight_sync.adapters import Adapter
from skyasync.weight_sync.full_tensors import FileLayout, FullTensors, specs_in

if TYPE_CHECKING:
    from skyasync.models.lora import Adapters
    from skyasync.models.parallel.pipeline import Stage


@BACKENDS.register("fsdp2")
class FSDPBackend(ModelBackend):
    """One rank of a model of transformers.

    Attributes:
        model: the sharded model.
        trained: the parts that have an optimizer, ``MODEL`` first.
        adapters: of a model whose own weights are frozen.
        mesh: of the ranks; None if one rank holds the whole model.
        stage: this rank's layers, if the model is a pipeline.
    """

    mesh: Mesh | None = None
    stage: Stage | None = None
    adapters: Adapters | None = None
    _file_layout: FileLayout | None = None

    def load(self, spec: ModelSpec, ranks: RankContext) -> None:
        self.spec = spec
        self.ranks = ranks
        self.device = ranks.device
        if self.on_gpu and spec.trainer.placement.colocate_all:
            use_fixed_segments()
        elif self.on_gpu:
            use_expandable_segments()
        self.dtype = self._computing_dtype()
        self.trained: dict[str, TrainedPart] = {}
        self._offloaded = OffloadBuffers()
        self.passes = 0  # of forward_backward since the last optimizer step
        self._checked_replicas = False  # the ranks of the tensor dimension had equal gradients
        self._problem: str | None = None  # of the current gradient; None: not examined
        self._metrics: dict[str, dict[str, float]] = {}  # of the current gradient
        self._extra: checkpoint.ExtraPart | None = None  # what is saved with the model
        self._checkpoint_group: dist.ProcessGroup | None = None
        if ranks.world_size > 1 and not dist.is_initialized():
            interface = interface_towards(ranks.host)
            if interface:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            store = ranks.store
            if store is None:
                store = dist.TCPStore(ranks.host, ranks.port, ranks.world_size, is_master=False)
            self._form_group(store)
        torch.manual_seed(spec.trainer.seed)  # before building: a new head is drawn from it
        disable_progress_bar()
        if self.on_gpu:
            allow_recompilations()
        self.model = self._build()
        if self.model.packs:
            check_attention_compiler(self.device)
        self.hidden_size = int(self.model.model.config.get_text_config().hidden_size)
        if self.on_cpu:
            keep_freed()  # after loading, whose own memory goes back

    # ---------------------------------------------------------------- building

    def _computing_dtype(self) -> torch.dtype:
        if self.spec.dtype != "auto":
            dtype: torch.dtype = attrgetter(self.spec.dtype)(torch)
            return dtype
        # A CPU computes bfloat16 more slowly than float32.
        return torch.float32 if self.on_cpu else torch.bfloat16

    def master_dtype(self) -> torch.dtype:
        """The dtype of the weights between steps.

        Small steps vanish in bfloat16, unless rounding is stochastic.

        Raises:
            UserError: if weights shall be rounded to a dtype that is not the model's.
        """
        if not self.spec.optimizers:
            return self.dtype
        if not self.spec.optimizers[MODEL].bf16_stochastic_round:
            return torch.float32
        if self.dtype != torch.bfloat16:
            raise UserError(
                f"{self.spec.section}.optimizer_config.bf16_stochastic_round=true is for weights in bfloat16, and here "
                f"they are {str(self.dtype).removeprefix('torch.')}: set {self.spec.section}.model.dtype=bfloat16, or "
                f"remove it"
            )
        return torch.bfloat16

    def is_sharded(self) -> bool:
        """Whether FSDP shards the model.

        One rank gains nothing from it in float32, or on a CPU: its hooks and copies cost a tenth
        of an update.
        """
        has_master_weights = self.dtype != self.master_dtype()
        if self.ranks.world_size > 1 or self.spec.cpu_offload == PARAMETERS:
            return True
        if self.spec.lora.rank and self.spec.lora.base_dtype:
            return True  # FSDP dequantizes
        uses_copies = self.on_cpu and not self.spec.lora.rank  # ``computing_in``
        return has_master_weights and not uses_copies

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def recomputes(self) -> bool | str:
        """Whether the backward pass recomputes activations, or how.

        By default not on a CPU, which has memory enough and no time to spare.
        """
        setting = self.spec.gradient_checkpointing
        if setting == "auto":
            return not self.on_cpu
        return setting

    def _build(self) -> TokenModel:
        """Load, wrap, place and shard the model."""
        spec = self.spec
        head = HEADS[spec.head].with_config(spec.config_kwargs)
        # Frozen weights with adapters need no master weights.
        dtype = self.dtype if spec.lora.rank else self.master_dtype()
        weights_device = HOST if spec.cpu_offload == PARAMETERS else self.device
        value_head: nn.Linear | None = None

        def prepare(model: PreTrainedModel) -> TokenModel:
            nonlocal value_head
            wrapper = self._wrap(model)
            value_head = wrapper.value_head
            if self.mesh is None:
                return wrapper
            wrapper = self._shard(wrapper)
            if self.adapters:
                self.adapters.detach_adapters()
            wrapper.value_head = None  # the files have no such head
            return wrapper

        if self.is_sharded():
            if not dist.is_initialized():
                self._form_group(dist.HashStore())
            self.mesh = self._make_mesh()
        wrapper = self._read(head, dtype, weights_device, prepare)
        if self.adapters:
            self.adapters.attach_adapters()
            self.adapters.begin(spec.trainer.seed, weights_device)
        if spec.lora.rank and spec.lora.base_dtype:
            quantize_base(wrapper.model, spec.lora.base_dtype)
        if value_head is not None:
            value_head.to_empty(device=self.device)
            copy_own_part(value_head.weight, new_head("weight", value_head.weight))
            wrapper.value_head = value_head
        if spec.cpu_offload == PARAMETERS:  # FSDP2 brings the weights from the host
            wrapper.to(HOST)
            self._offloaded.move_model_buffers(wrapper, self.device)
        else:
            wrapper.to(self.device)
        if spec.optimizers:
            self._prepare_training(wrapper)
        return wrapper

    def _wrap(self, model: PreTrainedModel) -> TokenModel:
        """Divide a model over the mesh, and add adapters, frozen parts and a value head."""
        spec = self.spec
        mesh = self.mesh
        context = None
        vocabulary = None
        if mesh and mesh.context_group:
            from skyasync.models.parallel.context import split_sequences

            context = split_sequences(model, mesh, spec.trainer.parallel.context_kind, self.dtype)
        if mesh and mesh.tensor:
            from skyasync.models.parallel.tensor import split

            vocabulary = split(model, mesh.tensor)
        if mesh and mesh.expert:
            from skyasync.models.parallel.expert import divide_experts

            divide_experts(model, mesh.expert)
        if spec.lora.rank:
            from skyasync.models.lora import Adapters

            self.adapters = Adapters(model, spec.lora, spec.path)
            if mesh and mesh.tensor:
                self.adapters.split(mesh.tensor)
        if spec.optimizers:
            freeze(model, spec.freeze)
        if spec.float32_head:
            use_float32_head(model)
        wrapper = TokenModel(model, spec.distribution).eval()
        wrapper.attends_in_float32 = self.on_cpu
        wrapper.context = context
        wrapper.vocabulary = vocabulary
        if spec.router_replay != "none":
            wrapper.routers = Routers(model)
        if mesh and mesh.pipeline:
            from skyasync.models.parallel.pipeline import Stage

            self.stage = Stage(model, mesh.pipeline, self.dtype)
            wrapper.stage = self.stage
        if VALUE_HEAD in spec.optimizers:
            hidden_size = model.config.get_text_config().hidden_size
            wrapper.value_head = nn.Linear(hidden_size, 1, bias=False, dtype=torch.float32)
        return wrapper

    def _form_group(self, store: dist.Store) -> None:
        """Join the default process group."""
        trainer = self.spec.trainer
        backend = process_group_backend(
            self.device.type, self.spec.cpu_offload, colocated=trainer.placement.colocate_all
        )
        dist.init_process_group(
            backend,
            store=store,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            timeout=timedelta(seconds=trainer.step_timeout_s),
        )

    def _make_mesh(self) -> Mesh:
        """Make the mesh; the planner's measurements replace it by one without other ranks."""
        return Mesh.make(self.device.type, self.spec.mesh_shape, self.spec.fsdp_size)

    def _read(
        self,
        head: Head,
        dtype: torch.dtype,
        device: torch.device,
        prepare: WrapAndShard,
    ) -> TokenModel:
        """Read the model of the files, after ``prepare``.

        That gets a model without memory if there is a mesh.
        """
        if self.mesh is None:
            return prepare(head.load(self.spec.path, dtype))
        stages = self.mesh.shape.pipeline
        min_chunks = 1
        if self.mesh.tensor or self.mesh.expert:  # two dimensions divide rows evenly
            min_chunks = self.ranks.world_size // stages
        return load_sharded(
            self.spec.path,
            head,
            dtype,
            device,
            prepare,
            self._placement(),
            min_chunks,
            stages=stages,
        )

    def _placement(self) -> Callable[[nn.Parameter], Shard | None]:
        """How FSDP2 cuts a parameter; None: by rows."""
        assert self.mesh
        optimizers = self.spec.optimizers
        by_rows = self.mesh.tensor is not None or self.mesh.expert is not None
        if optimizers and is_low_precision(optimizers[MODEL]):
            by_rows = True  # it counts a rank's rows from its first
        return shard_placement(1 if by_rows else self.mesh.shard.size(-1))

    def _shard(self, wrapper: TokenModel) -> TokenModel:
        """Apply FSDP2 to each decoder layer and to the rest.

        The rest is embeddings and head together, so tied ones stay tied.
        """
        assert self.mesh
        master = self.master_dtype()
        precision = MixedPrecisionPolicy(
            param_dtype=None if self.dtype == master else self.dtype,
            reduce_dtype=torch.promote_types(master, torch.float32),
        )
        offload = OffloadPolicy()
        if self.spec.cpu_offload == PARAMETERS:
            offload = CPUOffloadPolicy(pin_memory=self.on_gpu)
        options: dict[str, Any] = {
            "shard_placement_fn": self._placement(),
            "mp_policy": precision,
            "offload_policy": offload,
        }
        # Inner modules first: FSDP2 leaves to the outer ones what the inner ones have not taken.
        if self.mesh.expert:
            from skyasync.models.parallel.expert import divided_experts

            for module in divided_experts(wrapper.model):
                fully_shard(module, mesh=self.mesh.expert_shard, **options)
        for module in decoder_layers(wrapper):
            fully_shard(module, mesh=self.mesh.shard, **options)
        fully_shard(wrapper, mesh=self.mesh.shard, **options)
        for module in wrapper.modules():
            if isinstance(module, FSDPModule):
                # The loss weights hold the whole batch's denominators: gradients of ranks are
                # summed, not averaged.
                module.set_force_sum_reduction_for_comms(True)
                # Alone, FSDP2 would divide by 1, in a copy as large as the gradients.
                if self.ranks.world_size > 1:
                    module.set_gradient_divide_factor(1.0)
        return wrapper

    def _prepare_training(self, wrapper: TokenModel) -> None:
        """Set up compilation, recomputation and optimizers."""
        spec = self.spec
        model = wrapper.model
        if spec.torch_compile:
            compile_layers(decoder_layers(wrapper), self.device)
        self._recompute_layers(model)
        parameters = [p for p in model.parameters() if p.requires_grad]
        copy = None
        if self.stage:
            self.stage.check_trained(parameters)
            if not self.stage.is_first:
                copy = self.stage.embeddings()  # the first stage counts them in the norm
        settings = spec.optimizers[MODEL]
        self.optimizer = make_optimizer(wrapper, parameters, settings, spec.trainer.seed)
        self.trained[MODEL] = TrainedPart(
            model, self.optimizer, settings.max_grad_norm, settings.max_grad_cosine, copy
        )
        if wrapper.value_head is not None:
            settings = spec.optimizers[VALUE_HEAD]
            optimizer = make_optimizer(wrapper, wrapper.value_head.parameters(), settings)
            self.trained[VALUE_HEAD] = TrainedPart(
                wrapper.value_head, optimizer, settings.max_grad_norm, settings.max_grad_cosine
            )
            self._extra = checkpoint.ExtraPart(
                "critic", wrapper.value_head, optimizer, "trainer.critic.backbone=shared"
            )

    def _recompute_layers(self, model: PreTrainedModel) -> None:
        recomputes = self.recomputes()
        if not recomputes:
            return
        selective = recomputes == "selective"
        model.gradient_checkpointing_enable(checkpointing_options(selective=selective))
        for module in model.modules():
            # transformers recomputes layers in training mode alone. Their parts stay in
            # evaluation mode: routers may add noise in training mode.
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True

    def load_without_memory(self, spec: ModelSpec, ranks: RankContext) -> TokenModel:
        """The model of one rank on torch's meta device: shapes and gradients without numbers.

        It is neither sharded nor has it an optimizer. No file but ``config.json`` is read and no
        process group is formed, so ``ranks.device`` may be of a kind that this machine lacks.
        """
        self.spec = spec
        self.ranks = ranks
        self.device = ranks.device
        self.dtype = self._computing_dtype()
        with torch.device("meta"):
            model = HEADS[spec.head].with_config(spec.config_kwargs).empty(spec.path, self.dtype)
            model.tie_weights()
            wrapper = self._wrap(model)
        (model.get_decoder() or model).set_attn_implementation(WITHOUT_MEMORY)
        if self.adapters:
            self.adapters.begin(spec.trainer.seed, torch.device("meta"))
            if self.is_sharded():
                nn.Module.to(model, self.dtype)  # as FSDP2 casts the adapters' float32
        if spec.optimizers:
            self._recompute_layers(model)
        self.model = wrapper
        return wrapper

    # ---------------------------------------------------------------- forward and backward

    def forward(self, batch: TokenBatch, request: OutputRequest) -> dict[str, Tensor]:
        # The others have a further dimension, which their first micro-batch knows.
        results = {}
        for name in request.names - {TOP_K, TOKEN_LOGPROBS}:
            results[name] = torch.zeros(batch.tokens.shape)
        adapter_context: AbstractContextManager[None] = nullcontext()
        if self.adapters and not request.adapters:
            adapter_context = self.adapters.detached()
        max_rows = self.spec.trainer.micro_forward_batch_size_per_gpu
        with adapter_context, torch.no_grad(), self._gathered():
            for micro in self._micro_batches(batch, max_rows):
                outputs = self.model(micro.layout.to(self.device), request)
                if self.stage and not self.stage.is_last:
                    self.stage.send_states(outputs[STATES])
                else:
                    put_rows(results, request.names, micro, outputs, batch)
        if self.stage:
            return self.stage.from_last(results)
        return results

    def forward_backward(
        self,
        batch: UpdateBatch,
        loss: LossFn,
        returns: Collection[str] = (),
    ) -> dict[str, Tensor]:
        results = {name: torch.zeros(batch.tokens.shape) for name in returns}
        dropout: AbstractContextManager[None] = nullcontext()
        self.passes += 1
        if self.adapters:
            # Their dropout draws what a resumed run draws again, and ranks that split matrices
            # drop the same inputs.
            group = self.ranks.rank // self.spec.mesh_shape.tensor
            seed = hash((self.spec.trainer.seed, self.step, self.passes, group))
            dropout = self.adapters.dropping(seed)
        with self._gathered(), dropout:
            micros = self._micro_batches(batch, self.spec.trainer.micro_train_batch_size_per_gpu)
            next_micro = next(micros, None)
            # 1F1B: without a pipeline every backward pass follows its forward pass at once.
            warmup = self.stage.warmup if self.stage else 0
            backward_queue = deque[tuple[Tensor, Tensor | None]]()
            while next_micro is not None or backward_queue:
                if next_micro is not None:
                    micro = next_micro
                    next_micro = next(micros, None)
                    outputs, result = self._compute(micro, loss)
                    if STATES not in outputs:
                        put_rows(results, returns, micro, outputs, batch)
                    received_states = self.stage.received if self.stage else None
                    backward_queue.append((result, received_states))
                    if next_micro is not None and len(backward_queue) <= warmup:
                        continue
                result, received_states = backward_queue.popleft()
                if self.spec.reduce_gradients == "update" and isinstance(self.model, FSDPModule):
                    # Gradients are summed over ranks once, after the last micro-batch.
                    is_last = next_micro is None and not backward_queue
                    self.model.set_requires_gradient_sync(is_last)
                if self.stage:
                    self.stage.backward(result, received_states)
                else:
                    result.backward()
        if self.stage:
            return self.stage.from_last(results)
        return results

    def _gathered(self) -> AbstractContextManager[None]:
        """A pass's context: afterwards every parameter is the one that the optimizer knows."""
        if self.mesh or self.dtype == self.master_dtype() or self.spec.lora.rank:
            return sharded_afterwards(self.model)
        return computing_in(self.dtype, self.model.model)

    def _compute(
        self,
        micro: MicroBatch[UpdateBatch],
        loss: LossFn,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Compute the outputs of a micro-batch, and its loss.

        A stage before the last computes states, and sends them to the next.
        """
        rows = micro.batch.each(lambda tensor: tensor.to(self.device))
        outputs = self.model(micro.layout.to(self.device), loss.request(rows))
        if self.stage and not self.stage.is_last:
            self.stage.send_states(outputs[STATES])
            return outputs, outputs[STATES]
        terms = loss(outputs, rows)
        for part, term in terms.items():
            self.trained[part].totals.add(term)
        if MODEL in terms:
            has_rows = len(micro.rows) > 0  # else it is for the collectives alone
            computed_tokens = micro.layout.tokens.numel() * has_rows
            counts = {
                ROW_TOKENS: rows.attention_mask.sum() * has_rows,
                COMPUTED_TOKENS: torch.tensor(computed_tokens, device=self.device),
            }
            self.trained[MODEL].totals.add_sums(counts)
        return outputs, sum(term.loss for term in terms.values())  # type: ignore[return-value]

    @property
    def shares_prefixes(self) -> bool:
        parallel = self.spec.trainer.parallel
        if self.spec.mesh_shape.context > 1 and parallel.context_kind == "ring":
            return False  # it takes no masks
        return can_share_prefixes(self.model.model.config)

    def _micro_batches(self, batch: B, max_rows: int) -> Iterator[MicroBatch[B]]:
        """Cut a batch into this rank's micro-batches.

        Empty ones follow until it has as many as every other rank.
        """
        trainer = self.spec.trainer
        context = self.spec.mesh_shape.context
        tokens = trainer.micro_batch_tokens or MICRO_BATCH_TOKENS[self.device.type]
        vision = self.model.vision
        packed_batch = batch
        if vision:
            packed_batch = vision.with_image_ids(batch, self.model.model)
        micro_batches = MicroBatches(
            packed_batch,
            max_tokens=tokens * context,  # each rank computes a slice of a row
            max_rows=max_rows,
            share_prefixes=self.shares_prefixes,
            hidden_size=self.hidden_size,
            packs=self.model.packs and context == 1,
        )
        count = torch.tensor(len(micro_batches), device=self.device)
        if self.ranks.world_size > 1:
            dist.all_reduce(count, dist.ReduceOp.MAX)
        for micro in micro_batches:
            if vision:  # losses get the batch's own tokens and mask, not those with ids of images
                micro.batch = batch.select(micro.rows).trim()
            yield micro
        for _ in range(int(count) - len(micro_batches)):
            yield empty_micro_batch(batch)

    # ---------------------------------------------------------------- the optimizer

    def examine(self, scale: float = 1.0) -> str:
        if self._problem is None:
            problems: list[str] = []
            if self.stage and self.passes:
                self.stage.add_embedding_gradients()
            for name, part in self.trained.items():
                # Of a pipeline the last stage alone has totals, and all stages have a gradient.
                if part.totals.sums or (self.stage and self.passes):
                    problems += self._examine(name, part, scale)
            self._problem = "; ".join(problems)
        return self._problem

    def _examine(self, name: str, part: TrainedPart, scale: float) -> list[str]:
        """Scale the gradient of a part, note its metrics, and describe what is not finite."""
        metrics: dict[str, float] = {}
        if part.totals.sums:
            group = self.mesh.data_group if self.mesh else None
            metrics = part.totals.reduce(group, self.device)
        if self.stage:
            metrics = self.stage.from_last(metrics)
        self._metrics[name] = metrics
        metrics["loss"] *= scale
        owner = "critic's " if name == VALUE_HEAD else ""
        if not math.isfinite(metrics["loss"]):
            return [f"the {owner}loss of optimizer step {self.step} is not finite: {metrics}"]
        if name == MODEL and not self._checked_replicas:
            check_replicated_gradients(self.model, self.mesh)
            self._checked_replicas = True
        metrics["grad_norm"] = float(part.measure(scale, self.mesh))
        if math.isfinite(metrics["grad_norm"]):
            return []
        bad_names = []
        for parameter_name, parameter in self.model.named_parameters():
            if parameter.grad is not None and not local(parameter.grad).isfinite().all():
                bad_names.append(parameter_name)
        names_text = ", ".join(bad_names[:5] or ["another rank's shard"])
        if len(bad_names) > 5:
            names_text += f" and {len(bad_names) - 5} more"
        return [f"the {owner}gradient of optimizer step {self.step} is not finite in: {names_text}"]

    def optimizer_step(
        self,
        lr: Mapping[str, float],
        scale: float = 1.0,
        beta1: float | None = None,
    ) -> dict[str, dict[str, float]]:
        try:
            problem = self.examine(scale)
            if problem:
                raise NonFiniteError(problem)
            metrics = self._metrics
            has_offloaded_state = MODEL in metrics and self.spec.cpu_offload == OPTIMIZER
            if has_offloaded_state:
                self._offloaded.move_optimizer_state(self.optimizer, self.device)
            for name, of_part in metrics.items():
                of_part |= self.trained[name].limit_cosine(self.mesh)
            self._clip()
            for name in metrics:
                optimizer = self.trained[name].optimizer
                part_beta1 = self.spec.optimizers[name].adam_betas[0]
                if beta1 is not None and name == MODEL:
                    part_beta1 = beta1
                for group in optimizer.param_groups:
                    group["lr"] = lr[name]
                    group["betas"] = (part_beta1, group["betas"][1])
                optimizer.step()
                if name == MODEL:
                    self.step += 1
            if has_offloaded_state:
                self._offloaded.move_optimizer_state(self.optimizer, HOST)
                self._synchronize()
            return metrics
        finally:
            self.drop_gradient()

    def _clip(self) -> None:
        for name in self._metrics:
            self.trained[name].clip()

    def drop_gradient(self) -> None:
        # Gradients are as large as the weights: none stays until the next update.
        for part in self.trained.values():
            part.drop_gradient()
        self.passes = 0
        self._problem = None
        self._metrics = {}
        if self.spec.trainer.placement.colocate_all and self.on_gpu:
            torch.cuda.empty_cache()  # for the engine that wakes on this GPU

    # ---------------------------------------------------------------- host memory

    def offload(self) -> None:
        self._move(HOST)
        if self.on_gpu:
            torch.cuda.empty_cache()  # else the memory stays this process's

    def _synchronize(self) -> None:
        """Wait until copies from and to host memory have ended."""
        if self.on_gpu:
            torch.cuda.current_stream().synchronize()

    def onload(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        for part in self.trained.values():
            part.drop_gradient()  # the next update begins without gradients in any case
        if self.spec.cpu_offload == PARAMETERS:
            self._offloaded.move_model_buffers(self.model, device)
        else:
            self._offloaded.move_weights(self.model, device)
        for name, part in self.trained.items():
            if name == VALUE_HEAD or self.spec.cpu_offload == "none":
                self._offloaded.move_optimizer_state(part.optimizer, device)
        self._synchronize()

    # ---------------------------------------------------------------- weights and files

    def sharded_weights(self) -> Mapping[str, Any]:
        """This rank's weights; of layers with adapters ``full_tensor`` adds these."""
        if self.adapters:
            return self.adapters.merged()
        shards = checkpoint.own_tensors(self.model.model)
        if self.stage:
            return self.stage.weights(shards)
        return shards

    def file_layout(self) -> FileLayout | None:
        if self._file_layout is None and FileLayout.differs(self.model.model):
            specs = specs_in(self.sharded_weights(), self.dtype)
            self._file_layout = FileLayout(self._whole_model(), specs, self.adapters)
        return self._file_layout

    def _whole_model(self) -> PreTrainedModel:
        """The model with the layers of all stages, which have no memory then."""
        if self.stage is None:
            return self.model.model
        head = HEADS[self.spec.head].with_config(self.spec.config_kwargs)
        return head.empty(self.spec.path, self.dtype)

    def adapter(self) -> Adapter:
        assert self.adapters, "the policy has no adapters"
        return self.adapters.alone()

    def save(self, folder: Path) -> SaveResult:
        return checkpoint.save(self.model.model, self.optimizer, self.step, folder, self._extra)

    def begin_save(self, folder: Path) -> None:
        if self._checkpoint_group is None and dist.is_initialized():
            # Of its own: in the group that trains, its messages would get between the others' in no
            # fixed order.
            self._checkpoint_group = dist.new_group(backend="gloo")
        self._saving = checkpoint.begin(
            self.model.model, self.optimizer, self.step, folder, self._checkpoint_group, self._extra
        )

    def saved(self) -> SaveResult | None:
        return self._saving()

    def restore(self, folder: Path) -> None:
        role = self.spec.role
        key = f"{self.spec.section}.model.path"
        all_names = self.stage.union if self.stage else None
        self.step = checkpoint.load(
            self.model.model, self.optimizer, folder, role, key, self._extra, all_names
        )
        if self.spec.cpu_offload == OPTIMIZER:
            self._offloaded.move_optimizer_state(self.optimizer, HOST)

    def export(self, folder: Path, part: str = MODEL) -> None:
        path = self.spec.path
        adapters = self.adapters
        if adapters and self.spec.lora.export == "adapter" and part == MODEL:
            tensors = adapters.adapter_weights()
            if self.ranks.rank == 0:
                adapters.export(tensors, folder)
                checkpoint.export_tokenizer(path, folder)
            return
        model = self.model.model
        weights = self.sharded_weights()
        full_model = self._whole_model()
        if part == VALUE_HEAD:
            critic = HEADS[VALUE].with_config(self.spec.value_head_kwargs)
            adapters = None
            model = critic.empty(path, self.dtype)
            full_model = model
            names = dict(model.named_parameters()).keys() | dict(model.named_buffers()).keys()
            # Without the policy's own head.
            weights = {name: value for name, value in weights.items() if name in names}
            assert self.model.value_head is not None
            weights[f"{SCORE_LAYER}.weight"] = self.model.value_head.weight.detach()
        layout = FileLayout(full_model, specs_in(weights, self.dtype), adapters)
        full = FullTensors(weights, self.dtype, layout)
        if self.ranks.rank != 0:
            full.only_gather()
            return
        with adapters.detached() if adapters else nullcontext():
            checkpoint.export(model, full, path, folder)


@contextmanager
def sharded_afterwards(model: nn.Module) -> Iterator[None]:
    """Leave all parameters sharded.

    After a forward pass FSDP2 keeps the root's whole for a backward pass that may not follow.
    """
    try:
        yield
    finally:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@contextmanager
def computing_in(dtype: torch.dtype, model: nn.Module) -> Iterator[None]:
    """Give modules copies of their parameters in ``dtype``, as FSDP2's mixed precision does.

    The gradients of the copies are added to those of the parameters, in the parameters' dtype.
    """
    slots = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            slots.append((module, name, parameter))
    copies: dict[nn.Parameter, nn.Parameter] = {}  # one of what layers share

    def add_gradient(parameter: nn.Parameter, copy: Tensor) -> None:
        assert copy.grad is not None
        gradient = copy.grad.to(parameter.dtype)
        copy.grad = None  # so that autograd does not add the next one to it, in the copy's dtype
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad = parameter.grad.add_(gradient)

    try:
        for module, name, parameter in slots:
            if parameter is None or parameter.dtype == dtype:
                continue
            if parameter not in copies:
                copy = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                copies[parameter] = copy
                if copy.requires_grad:
                    copy.register_post_accumulate_grad_hook(partial(add_gradient, parameter))
            module._parameters[name] = copies[parameter]
        yield
    finally:
        for module, name, parameter in slots:
            module._parameters[name] = parameter

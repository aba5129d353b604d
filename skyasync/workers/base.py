"""One rank that holds a model: process group, sharding, log-probabilities.

Invariant: all ranks run the same collectives in the same order. Whatever depends on a rank's own rows (how
many micro-batches it has) is agreed on first. Between calls every parameter is the one that the optimizer knows,
sharded if the model is.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from skyasync.config.schema import LoraConfig, ModelConfig
from skyasync.heap import keep_freed
from skyasync.workers.batch import B, TokenBatch
from skyasync.workers.groups import loopback_interface, process_group_backend
from skyasync.workers.heads import HEADS
from skyasync.workers.limits import MICRO_BATCH_TOKENS
from skyasync.workers.loading import load_sharded
from skyasync.workers.mesh import Mesh
from skyasync.workers.model import Wrapped, can_share_prefixes
from skyasync.workers.offload import HOST, PARAMETERS, move_buffers, move_weights, offload_policy, place
from skyasync.workers.packing import MicroBatch, MicroBatches
from skyasync.workers.replicas import shard_placement
from skyasync.workers.worker import LOOPBACK, Worker

if TYPE_CHECKING:
    from skyasync.routing import Routers
    from skyasync.workers.lora import Adapters
    from skyasync.workers.parallel.context import Context
    from skyasync.workers.parallel.vocabulary import Vocabulary
    from skyasync.workers.shared_critic import SharedCritic


class ModelWorker(Worker):
    """Holds one rank of a model, that of its role's section.

    Use: construct on every rank, ``open_rendezvous`` on rank 0, ``setup`` on all ranks at once.

    Args:
        args, kwargs: those of :class:`Worker`.
    """

    _store: Any = None
    mesh: Mesh | None = None
    adapters: Adapters | None = None
    critic: SharedCritic | None = None

    def model_config(self) -> ModelConfig:
        """Which model this worker holds."""
        return self.role.model(self.cfg)

    def open_rendezvous(self, host: str) -> int:
        """Rank 0 listens on a free port of ``host``, which is returned; bound here, so nobody else can take it."""
        listener = socket.create_server((host, 0))  # left to itself the store would listen on every interface
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            host, port, self.world_size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return port

    def hidden_size(self) -> int:
        return int(self.model.model.config.hidden_size)

    def lora_config(self) -> LoraConfig | None:
        """How adapters are trained beside this worker's model; None where its own weights are."""
        lora: LoraConfig | None = getattr(self.settings, "lora", None)
        return lora if lora and lora.rank else None

    def setup(self, host: str = LOOPBACK, port: int = 0) -> None:
        """Join the other ranks, if there are any, then load and shard the model."""
        self.axes = self.role.axes(self.cfg, self.world_size)
        if self.world_size > 1:
            self._join(host, port)
        torch.manual_seed(self.cfg.trainer.seed)
        disable_progress_bar()
        self.path = self.model_config().path
        self.dtype = _dtype(self.model_config().dtype, self.device)
        self.model = self.build()
        if self.device.type == "cpu":
            keep_freed()  # after loading, whose own memory goes back

    def master_dtype(self) -> torch.dtype:
        """Dtype in which the weights are kept; computation is in ``self.dtype``."""
        return self.dtype

    def may_cut_experts(self) -> bool:
        """Whether a stacked expert may lie in parts on several ranks."""
        return True

    def build(self) -> Wrapped:
        """Load, wrap, place and shard. Frozen weights that adapters are trained beside need no masters."""
        head, lora = HEADS[self.role.head].told(self.role.config_kwargs(self.cfg)), self.lora_config()
        dtype = self.dtype if lora else self.master_dtype()
        home = HOST if self.offloads == PARAMETERS else self.device

        def wrap(model: PreTrainedModel) -> Wrapped:
            divided = self._divide(model)
            if lora:
                from skyasync.workers.lora import Adapters

                self.adapters = Adapters(model, lora, self.path)
                if self.mesh and self.mesh.tensor:
                    self.adapters.split(self.mesh.tensor)
            wrapper = head.wrap(model, self.cfg).eval()
            wrapper.context, wrapper.vocabulary = divided
            wrapper.routers = self.replayed(model)
            self.add_beside(wrapper)
            return wrapper

        def shard(model: PreTrainedModel) -> Wrapped:
            wrapper = self._shard(wrap(model))
            if self.adapters:
                self.adapters.step_aside()
            if self.critic:
                self.critic.step_aside()
            return wrapper

        if self._sharded():
            self._form_group()
            self.mesh = Mesh.make(self.device.type, self.axes, getattr(self.settings, "fsdp_size", 0))
            wrapper = load_sharded(self.path, head, dtype, home, shard)
        else:
            wrapper = wrap(head.load(self.path, dtype))
        if self.adapters:
            self.adapters.step_back()
            self.adapters.begin(self.cfg.trainer.seed, home)
        if lora and lora.base_dtype:
            from skyasync.workers.quantised import quantise

            quantise(wrapper.model, lora.base_dtype)
        if self.critic:
            self.critic.begin(self.device)
        place(wrapper, self.offloads, self.device)
        return wrapper

    def _join(self, host: str, port: int) -> None:
        if host == LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
        store = self._store or dist.TCPStore(host, port, self.world_size, is_master=False)
        dist.init_process_group(
            self._backend(),
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self.cfg.trainer.step_timeout_s),
        )

    def _backend(self) -> str:
        turns = self.cfg.trainer.placement.colocate_all
        return process_group_backend(self.device.type, self.offloads, takes_turns=turns)

    def _sharded(self) -> bool:
        """One float32 rank gains nothing from FSDP, whose hooks cost a tiny model more than a few percent."""
        lora = self.lora_config()
        codes = bool(lora and lora.base_dtype)  # which FSDP turns into numbers
        return self.world_size > 1 or self.dtype != self.master_dtype() or codes or self.offloads == PARAMETERS

    def _form_group(self) -> None:
        """Of this rank alone, where it has joined no others."""
        if not dist.is_initialized():
            dist.init_process_group(self._backend(), store=dist.HashStore(), rank=0, world_size=1)

    def add_beside(self, wrapper: Wrapped) -> None:
        """Put on a model, which has no memory yet, what else is trained on its layers."""

    def replayed(self, model: PreTrainedModel) -> Routers | None:
        """Those of its routers that choose what a batch says; None: they choose themselves."""
        return None

    def _divide(self, model: PreTrainedModel) -> tuple[Context | None, Vocabulary | None]:
        """Split the model's matrices and let it attend in slices, where the mesh has such axes."""
        if self.mesh is None or self.axes.sharing == 1:
            return None, None
        from skyasync.workers.parallel import divide

        return divide(model, self.mesh, self.cfg.trainer.parallel.context_kind, self.dtype)

    def _shard(self, wrapper: Wrapped) -> Wrapped:
        """FSDP2 on each decoder layer and on the rest (embeddings and head together, so tied ones stay tied)."""
        assert self.mesh is not None
        mesh = self.mesh.shard
        held = self.master_dtype()
        computing = None if self.dtype == held else self.dtype
        precision = MixedPrecisionPolicy(computing, reduce_dtype=torch.promote_types(held, torch.float32))
        layers = set(wrapper.model._no_split_modules or ())
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": precision}
        options["offload_policy"] = offload_policy(self.offloads, self.device)
        if self.mesh.tensor is None and self.may_cut_experts():
            options["shard_placement_fn"] = shard_placement(mesh.size(-1))
        for module in [m for m in wrapper.modules() if type(m).__name__ in layers]:
            fully_shard(module, **options)
        fully_shard(wrapper, **options)
        for module in wrapper.modules():
            if isinstance(module, FSDPModule):
                # The loss weights hold the whole batch's denominators: gradients of ranks are summed, not averaged.
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
        return wrapper

    def logprobs(self, batch: TokenBatch, plain: bool = False) -> Tensor:
        """Log-probability of each loss token, ``[batch, length]`` on the CPU, zero elsewhere; no gradient.

        ``plain``: of the model's own distribution, whatever was sampled from.
        """
        result = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        with torch.no_grad(), sharded_afterwards(self.model):
            for micro in self._micro_batches(batch, self.cfg.trainer.micro_forward_batch_size_per_gpu):
                put_rows(result, micro, self.model(micro.layout.to(self.device), plain=plain).logprobs)
        return result

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of each token after the first of each sequence, at temperature 1."""
        batch = sequences_as_batch(sequences)
        values = self.logprobs(batch, plain=True).tolist()
        return [row[1 : len(sequence)] for row, sequence in zip(values, sequences, strict=True)]

    def offload(self) -> None:
        """Move the model to host memory, for others that need the device. All ranks call it."""
        self._move(torch.device("cpu"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # else the memory stays this process's

    def onload(self) -> None:
        """Undo ``offload``."""
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        if self.offloads == PARAMETERS:
            move_buffers(self.model, device)
        else:
            move_weights(self.model, device)

    def _micro_batches(self, batch: B, max_rows: int) -> Iterator[MicroBatch[B]]:
        """This rank's micro-batches, followed by empty ones until it has as many as every other rank."""
        tokens = self.cfg.trainer.micro_batch_tokens or MICRO_BATCH_TOKENS[self.device.type]
        pieces = MicroBatches(
            batch,
            max_tokens=tokens * self.axes.context,
            max_rows=max_rows,
            share_prefixes=can_share_prefixes(self.model.model.config) and not self._rings,
            hidden_size=self.model.model.config.hidden_size,
            end_to_end=self.model.packs and self.axes.context == 1,
        )
        missing = self.agree_on_most(len(pieces)) - len(pieces)
        yield from pieces
        for _ in range(missing):
            yield empty_micro_batch(batch)

    @property
    def _rings(self) -> bool:
        """Rows are attended to in pieces that know no mask."""
        return self.axes.context > 1 and self.cfg.trainer.parallel.context_kind == "ring"

    def agree_on_most(self, count: int) -> int:
        """The largest ``count`` of all ranks."""
        if self.world_size == 1:
            return count
        most = torch.tensor(count, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Elementwise sum over the ranks that have rows of their own, on every rank."""
        if self.mesh and self.mesh.data_group:
            values = values.to(self.device)
            dist.all_reduce(values, group=self.mesh.data_group)
        return values.cpu()


@contextmanager
def sharded_afterwards(model: nn.Module) -> Iterator[None]:
    """Leave all parameters sharded: after a forward FSDP2 keeps the root's whole, for a backward that may not come."""
    try:
        yield
    finally:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def put_rows(result: Tensor, micro: MicroBatch[Any], logprobs: Tensor) -> None:
    """Write a micro-batch's log-probabilities into their rows of the batch's, ``[batch, length]`` on the CPU."""
    kept = logprobs[: len(micro.rows), : result.shape[1]].float().cpu()
    result[micro.rows, : kept.shape[1]] = kept


def sequences_as_batch(sequences: Sequence[Sequence[int]]) -> TokenBatch:
    """Every token but the first of each sequence is a loss token; no groups."""
    lengths = torch.tensor([len(s) for s in sequences])
    mask = torch.arange(int(lengths.max()) if len(lengths) else 0) < lengths[:, None]
    tokens = torch.zeros(mask.shape, dtype=torch.int64)
    tokens[mask] = torch.tensor([t for s in sequences for t in s], dtype=torch.int64)
    loss_mask = mask.clone()
    loss_mask[:, :1] = False
    return TokenBatch(tokens, mask, loss_mask, group_ids=torch.arange(len(sequences)))


def empty_micro_batch(like: B) -> MicroBatch[B]:
    """One row without a loss token: it takes part in every collective and adds nothing."""

    row = like.each(lambda t: torch.zeros((1, 2, *t.shape[2:]) if t.dim() >= 2 else (1,), dtype=t.dtype))
    row.attention_mask[:] = True
    (piece,) = MicroBatches(row, max_tokens=2, share_prefixes=False, hidden_size=1)
    return MicroBatch(torch.zeros(0, dtype=torch.int64), piece.batch, piece.layout)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)

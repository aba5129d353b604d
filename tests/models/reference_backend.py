"""A second backend: one process, the unchanged model of transformers, a row at a time. Slow, and easy to check."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from skyasync.errors import NonFiniteError
from skyasync.models import VALUE
from skyasync.models.backend import (
    ENTROPY,
    LOGPROBS,
    MODEL,
    TOKEN_LOGPROBS,
    TOP_K,
    VALUE_HEAD,
    VALUES,
    LossFn,
    ModelBackend,
    ModelSpec,
    OutputRequest,
    RankContext,
    SaveResult,
    Totals,
)
from skyasync.models.batch import TokenBatch, UpdateBatch
from skyasync.models.heads import HEADS, new_head


class ReferenceBackend(ModelBackend):
    def load(self, spec: ModelSpec, ranks: RankContext) -> None:
        assert ranks.world_size == 1
        torch.manual_seed(spec.trainer.seed)
        self.spec, self.dtype = spec, torch.float32
        self.model = HEADS[spec.head].with_config(spec.config_kwargs).load(spec.path, torch.float32)
        self.hidden_size = int(self.model.config.hidden_size)
        self.value_head: nn.Module = self.model.score if spec.head == VALUE else nn.Identity()
        parts: dict[str, nn.Module] = {MODEL: self.model}
        if VALUE_HEAD in spec.optimizers:
            head = nn.Linear(self.hidden_size, 1, bias=False)
            head.weight.data = new_head("weight", head.weight)
            self.value_head = parts[VALUE_HEAD] = head
        self.optimizers = {
            part: torch.optim.AdamW(
                parts[part].parameters(),
                options.lr,
                tuple(options.adam_betas),
                options.eps,
                options.weight_decay,
            )
            for part, options in spec.optimizers.items()
        }
        self._parts, self._totals = parts, dict[str, Totals]()

    def _outputs(self, row: TokenBatch, request: OutputRequest) -> dict[str, Tensor]:
        """Outputs of one row, ``[1, length, ...]``: entry t is computed from the state before token t."""
        mask = row.loss_mask & row.attention_mask
        layers = torch.set_grad_enabled(
            torch.is_grad_enabled() and bool(request.names - {VALUES} or request.value_gradient)
        )
        with layers:
            states = self.model.base_model(
                row.tokens, attention_mask=row.attention_mask.long()
            ).last_hidden_state
        before = torch.roll(states, 1, 1)
        found: dict[str, Tensor] = {}
        if request.names - {VALUES}:
            distribution = self.spec.distribution
            logits = self.model.lm_head(before) / (
                1.0 if request.plain else distribution.temperature
            )
            logprobs = logits.log_softmax(-1)
            found[LOGPROBS] = logprobs.gather(-1, row.tokens[..., None])[..., 0]
            found[ENTROPY] = -(logprobs.exp() * logprobs).sum(-1)
            if not request.entropy_gradient:
                found[ENTROPY] = found[ENTROPY].detach()
            if request.top_k:
                most, tokens = logprobs.topk(request.top_k)
                found[TOP_K] = torch.cat([tokens.float(), most], -1)
            if request.token_ids is not None:
                found[TOKEN_LOGPROBS] = logprobs.gather(-1, request.token_ids)
        if VALUES in request.names:
            share = request.value_gradient
            shared = (
                before.detach() + share * (before - before.detach()) if share else before.detach()
            )
            found[VALUES] = self.value_head(shared)[..., 0]
        return {
            name: value.where(mask if value.dim() == 2 else mask[..., None], 0.0)
            for name, value in found.items()
            if name in request.names
        }

    def forward(self, batch: TokenBatch, request: OutputRequest) -> dict[str, Tensor]:
        with torch.no_grad():
            rows = [self._outputs(row, request) for row in batch.split(1)]
        if not rows:
            return {name: torch.zeros(batch.tokens.shape) for name in request.names}
        return {name: torch.cat([row[name] for row in rows]) for name in request.names}

    def forward_backward(
        self, batch: UpdateBatch, loss: LossFn, returns: Collection[str] = ()
    ) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {name: [] for name in returns}
        for row in batch.split(1):
            outputs = self._outputs(row, loss.request(row))
            terms = loss(outputs, row)
            torch.stack([term.loss for term in terms.values()]).sum().backward()
            for part, term in terms.items():
                self._totals.setdefault(part, Totals()).add(term)
            for name in returns:
                found[name].append(outputs[name].detach())
        return {name: torch.cat(rows) for name, rows in found.items()}

    def examine(self, scale: float = 1.0) -> str:
        self._metrics = {part: totals.reduce() for part, totals in self._totals.items()}
        for part, metrics in self._metrics.items():
            metrics["loss"] *= scale
            gradients = [
                p.grad.mul_(scale) for p in self._parts[part].parameters() if p.grad is not None
            ]
            metrics["grad_norm"] = float(torch.cat([g.flatten() for g in gradients]).norm())
            if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
                return f"the loss of step {self.step} is not finite: {metrics}"
        return ""

    def optimizer_step(
        self, lr: Mapping[str, float], scale: float = 1.0, beta1: float | None = None
    ) -> dict[str, dict[str, float]]:
        try:
            if problem := self.examine(scale):
                raise NonFiniteError(problem)
            for part, metrics in self._metrics.items():
                optimizer, limit = self.optimizers[part], self.spec.optimizers[part].max_grad_norm
                if limit and metrics["grad_norm"] > limit:
                    for parameter in self._parts[part].parameters():
                        if parameter.grad is not None:
                            parameter.grad *= limit / metrics["grad_norm"]
                for group in optimizer.param_groups:
                    group["lr"] = lr[part]
                    first = (
                        self.spec.optimizers[part].adam_betas[0]
                        if beta1 is None or part != MODEL
                        else beta1
                    )
                    group["betas"] = (first, group["betas"][1])
                optimizer.step()
                self.step += part == MODEL
            return self._metrics
        finally:
            self.drop_gradient()

    def drop_gradient(self) -> None:
        self._totals = {}
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    def sharded_weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def offload(self) -> None:
        self.drop_gradient()

    def onload(self) -> None: ...

    def save(self, folder: Path) -> SaveResult:
        tensors = {"step": torch.tensor(self.step)}
        for part, module in self._parts.items():
            for name, parameter in module.named_parameters():
                tensors[f"{part}.{name}"] = parameter.detach()
                for kind, value in self.optimizers[part].state[parameter].items():
                    tensors[f"{part}.{name}.{kind}"] = value
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: tensor.clone() for name, tensor in tensors.items()}, folder / "all.safetensors"
        )
        return SaveResult()

    def restore(self, folder: Path) -> None:
        tensors = load_file(folder / "all.safetensors")
        self.step = int(tensors["step"])
        for part, module in self._parts.items():
            state = self.optimizers[part].state
            state.clear()
            for name, parameter in module.named_parameters():
                parameter.data.copy_(tensors[f"{part}.{name}"])
                kinds = {
                    kind: tensors.get(f"{part}.{name}.{kind}")
                    for kind in ("step", "exp_avg", "exp_avg_sq")
                }
                if kinds["step"] is not None:
                    state[parameter] = kinds

    def export(self, folder: Path, part: str = MODEL) -> None:
        if part != MODEL:
            raise self._not_supported("export critics")
        self.model.save_pretrained(folder)

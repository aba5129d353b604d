"""A transformers model as the embedded engine uses it: prefill, decode one token, score, swap
weights.

Invariant: weights are changed only after every name and shape has been checked, so a rejected
update does not change the model. They are copied into the parameters, or adopted: the parameters
then are the tensors that were sent. Tied weights stay tied because they are one parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from itertools import chain
from math import inf
from pathlib import Path
from types import MethodType
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    DynamicCache,
    PreTrainedTokenizerBase,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils.generic import TransformersKwargs

from skyasync.arrays import Experts
from skyasync.errors import UserError, unknown
from skyasync.inference.backends.transformers.kv_cache import SlotCache
from skyasync.inference.interface import EngineConfig
from skyasync.models.config import ONE_AT_A_TIME, config_value, load_config
from skyasync.models.images import Images, ImageTokens
from skyasync.models.router_replay import Routers
from skyasync.models.vision import Vision, is_vision
from skyasync.utils.weight_files import check_model_files
from skyasync.weight_sync.adapters import Adapter, frozen_weights_id, with_added
from skyasync.weight_sync.delta import DeltaDecoder, ReceivedWeights, put_changes
from skyasync.weight_sync.tensors import digest, digests_of, holds, refuse
from skyasync.weight_sync.update import WeightSyncError

FORWARD_TOKENS = (
    2048  # padded tokens per forward pass over prompts: activations stay in the processor's cache
)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **others: Unpack[TransformersKwargs],
) -> tuple[Tensor, None]:
    """SDPA, but a decoded token's query heads that share a key head are its query *positions*.

    The library repeats keys and values for every query head instead, which for 9 heads over 3 takes
    3 times as long.
    """
    n, heads, length, dim = query.shape
    if length > 1 or heads == key.shape[1] or attention_mask is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    query = query.view(n, key.shape[1], -1, dim)
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attention_mask, scale=scaling
    )
    return out.reshape(n, 1, heads, -1), None


AttentionInterface.register("skyasync_grouped", grouped_attention)
AttentionMaskInterface.register("skyasync_grouped", sdpa_mask)


#: A CPU's library adds a product's terms in another order if a matrix has few rows, and attention if its columns do
#: not fill the processor's vectors. With torch 2.13 on AVX-512 in float32, products of fewer than 12 rows that are no
#: multiple of 4, and keys that are no multiple of 16, differ from those of larger sizes in the last bit. A few more
#: rows and columns are computed, which are not read: an answer then does not depend, bitwise, on the requests that are
#: computed with it. On a GPU, in bfloat16, and with more than two threads, this has not been tested.
ENOUGH_ROWS = 12
ROWS = 4
COLUMNS = 16


def even_rows(rows: int) -> int:
    """How many rows are computed in place of so many."""
    if rows >= ENOUGH_ROWS:
        return rows
    return -(-rows // ROWS) * ROWS


def even_columns(columns: int) -> int:
    """How many positions are attended to in place of so many."""
    return -(-columns // COLUMNS) * COLUMNS


def multiply_by_onednn(model: nn.Module) -> None:
    """Linear layers in float32 on a CPU use oneDNN instead of MKL. A layer reads its weight when it
    is called.

    SmolLM2-135M on two cores of an AMD EPYC (torch 2.13): 32 rows take 0.73 of the time with two
    threads, 0.95 with one, and fewer sizes are odd (``even_rows``). The operator is the one that
    torch's own compiler emits.
    """

    def linear(layer: nn.Linear, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, layer.weight, layer.bias, "none", [], ""
        )
        return product

    if not (
        torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return
    for module in model.modules():
        if type(module) is nn.Linear and (module.weight.dtype, module.weight.device.type) == (
            torch.float32,
            "cpu",
        ):
            module.forward = MethodType(linear, module)  # type: ignore[method-assign]


class EmbeddedModel:
    """Not thread-safe: one thread loads and uses it."""

    def __init__(self, config: EngineConfig) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cuda":
            auto = torch.bfloat16
        else:
            auto = torch.float32
        if config.dtype != "auto" and config.dtype not in _DTYPES:
            raise UserError(unknown("dtype", config.dtype, ["auto", *_DTYPES]))
        check_model_files(Path(config.model_path))
        with ONE_AT_A_TIME:
            settings = load_config(config.model_path, config.extra.get("config_kwargs", {}))
            factory = AutoModelForImageTextToText if is_vision(settings) else AutoModelForCausalLM
            model: Any = factory.from_pretrained(
                config.model_path,
                config=settings,
                dtype=_DTYPES.get(config.dtype, auto),
                use_safetensors=True,
                attn_implementation="skyasync_grouped",
            )
        self._model = model.to(self.device).eval().requires_grad_(False)
        multiply_by_onednn(self._model)
        self._vision = Vision(self._model.config) if is_vision(self._model.config) else None
        self._routers: Routers | None = None
        if config.extra.get("routed_experts"):
            self._routers = Routers(self._model)
            self._routers.record()
        self._adopted = False  # weights are in memory that is not the model's own
        text: Any = self._model.config.get_text_config()
        layers = set(config_value(text, "layer_types") or ["full_attention"])
        window = config_value(text, "sliding_window") or config.max_model_len
        if layers - {"full_attention", "sliding_attention"} or window < config.max_model_len:
            raise UserError(
                f"the transformers engine computes full attention only; this model has {sorted(layers)} with a window "
                f"of {window} tokens and max_model_len is {config.max_model_len}: use generator.backend=vllm"
            )
        self.tokenizer: PreTrainedTokenizerBase | None = (
            None  # only stop strings and bad words need it
        )
        with contextlib.suppress(OSError, ValueError):
            self.tokenizer = AutoTokenizer.from_pretrained(config.model_path)
        self.dtype: torch.dtype = self._model.dtype
        self._positions: float = config_value(text, "max_position_embeddings") or inf
        self.eos_ids: set[int] = set()  # all that a file of the model names: chat models disagree
        for ids in (
            config_value(self._model.config, "eos_token_id"),
            self._model.generation_config.eos_token_id,
            self.tokenizer.eos_token_id if self.tokenizer else None,
        ):
            self.eos_ids.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
        self.vocabulary: int = self._model.get_input_embeddings().num_embeddings

    def check_images(self, prompt: Sequence[int], images: Images) -> None:
        """Raises ``UserError`` for images that the model cannot read, or that are not those of the
        prompt's tokens."""
        if self._vision is not None:
            self._vision.processor.collapse(prompt, images)
        elif images:
            raise UserError("it has images, but the model reads only text")

    def prefill(
        self, prompts: Sequence[Sequence[int]], images: Sequence[Images] = ()
    ) -> tuple[Tensor, DynamicCache, Tensor]:
        """Logits after each prompt ``[prompts, vocabulary]``, the prompts' cache, columns 0 to
        length - 1, and each prompt's shift: a token's position minus its column ``[prompts]``,
        which images change."""
        tokens = self._right_padded(prompts)
        last = torch.tensor([len(p) - 1 for p in prompts], device=self.device)
        columns, which = last.unique(return_inverse=True)
        while len(prompts) * len(columns) < even_rows(len(prompts) * len(columns)):
            columns = torch.cat([columns, columns[-1:]])
        cache = DynamicCache()
        if self._vision:
            inputs = self._vision.prompt_inputs(tokens, images)
        else:
            inputs = {}
        logits = self._model(
            input_ids=tokens,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=columns,
            **inputs,
        ).logits
        shifts = torch.zeros(len(prompts), dtype=torch.int64, device=self.device)
        if "mm_token_type_ids" in inputs:
            shifts += self._model.base_model.rope_deltas.flatten()
        return (
            self._allowed(logits[torch.arange(len(prompts), device=self.device), which]),
            cache,
            shifts,
        )

    def _allowed(self, logits: Tensor) -> Tensor:
        if self._vision is None:
            return logits
        return self._vision.without_placeholders(logits)

    def decode(
        self,
        tokens: Tensor,
        lengths: Tensor,
        width: int,
        cache: SlotCache,
        shifts: Tensor | None = None,
    ) -> Tensor:
        """Logits ``[rows, vocabulary]`` after one more token per running slot.

        Args:
            tokens: ``[rows]``, the newest token of each slot.
            lengths: ``[rows]``, how many tokens of each slot are in the cache: the newest one's
                position.
            width: the largest of ``lengths``, plus 1.
            shifts: ``[rows]``, of each slot's positions, if any are shifted.
        """
        rows = len(tokens)
        unused = (0, min(even_rows(rows), cache.slots) - rows)  # slots and columns of no request
        tokens = nn.functional.pad(tokens, unused)
        lengths = nn.functional.pad(lengths, unused)
        width = min(even_columns(width), cache.columns)
        hidden = torch.arange(width, device=self.device) > lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._model.dtype, device=self.device)
        if shifts is None:
            positions = lengths
        else:
            positions = lengths + nn.functional.pad(shifts, unused)
        logits = self._model(
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=mask.masked_fill_(hidden, -torch.inf)[:, None, None],
            past_key_values=cache.at(lengths, width),
            use_cache=True,
        ).logits[:rows, -1]
        return self._allowed(logits)

    def chosen(self) -> Experts | None:
        """The experts of every token of the last forward pass, padding included; None if they are
        not recorded."""
        if self._routers is None:
            return None
        return self._routers.chosen()

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of each token after the first, temperature 1, in float32; one list per
        sequence. Those of images have 0."""
        scores: list[list[float]] = [[] for _ in sequences]
        order = sorted(
            (i for i in range(len(sequences)) if len(sequences[i]) > 1),
            key=lambda i: len(sequences[i]),
        )
        while order:
            count = max(1, FORWARD_TOKENS // len(sequences[order[-1]]))
            batch = order[-count:]
            order = order[:-count]
            tokens = self._right_padded([sequences[i] for i in batch])
            images = [ImageTokens.images_of(sequences[i]) for i in batch]
            if self._vision:
                inputs = self._vision.prompt_inputs(tokens, images)
            else:
                inputs = {}
            logits = self._allowed(
                self._model(input_ids=tokens, use_cache=False, **inputs).logits[:, :-1]
            ).float()
            chosen = logits.gather(2, tokens[:, 1:, None])[..., 0] - logits.logsumexp(dim=2)
            if any(images) and self._vision:
                chosen = chosen.masked_fill(
                    tokens[:, 1:] == self._vision.processor.placeholder, 0.0
                )
            for i, row in zip(batch, chosen.cpu(), strict=True):
                scores[i] = row[: len(sequences[i]) - 1].tolist()
        return scores

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor], *, adopt: bool = False) -> None:
        """Copy ``weights`` into the model. Of tied names any one suffices.

        Args:
            adopt: compute on them where they are: nothing is copied that has the model's dtype and
                is on its device.

        Raises:
            UserError: names that are missing, unexpected, or of another shape; nothing has been
                changed then.
        """
        state = self._model.state_dict(keep_vars=True)
        aliases: dict[int, list[str]] = {}
        for name, tensor in state.items():
            aliases.setdefault(tensor.data_ptr(), []).append(name)
        missing = [names[0] for names in aliases.values() if not any(n in weights for n in names)]
        unexpected = [name for name in weights if name not in state]
        if missing or unexpected:
            raise UserError(f"weight update rejected: missing {missing}, unexpected {unexpected}")
        shapes = [
            f"{n} is {list(w.shape)}, not {list(state[n].shape)}"
            for n, w in weights.items()
            if w.shape != state[n].shape
        ]
        if shapes:
            raise UserError(f"weight update rejected: {'; '.join(shapes)}")
        for names in aliases.values():
            current = state[names[0]]
            new = next(weights[name] for name in names if name in weights)
            if adopt and (current.dtype, current.device) == (new.dtype, new.device):
                for name in names:
                    state[name].data = new
            else:
                if self._adopted:  # which cannot be written to
                    own = torch.empty_like(current)
                    for name in names:
                        state[name].data = own
                current.copy_(new)
        self._adopted = adopt

    def tensors(self) -> dict[str, Tensor]:
        """The parameters and saved buffers themselves, a tied one under each of its names."""
        return dict(self._model.state_dict())

    def own_names(self) -> list[str]:
        """Names of parameters and saved buffers, a tied one once."""
        named = chain(self._model.named_parameters(), self._model.named_buffers())
        return [name for name, _ in named if name in self._model.state_dict()]

    def _right_padded(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """``[sequences, longest]``. With causal attention the padding at the end does not
        matter."""
        longest = max(map(len, sequences))
        length = max(longest, int(min(even_columns(longest), self._positions)))
        return torch.tensor([[*s, *[0] * (length - len(s))] for s in sequences], device=self.device)


class WeightUpdater:
    """Applies weight updates to the model, in the engine's thread.

    After ``apply`` the model is bitwise identical to one that has loaded all weights from one file,
    and digests prove it if they were sent. A delta is written over the model's own weights if they
    have the dtype that was sent. Else the weights are kept in that dtype too: the delta goes there,
    and all of them are loaded. Adapters are added to copies of the frozen weights.
    """

    def __init__(self, model: EmbeddedModel) -> None:
        self._model = model
        self._decoder: DeltaDecoder | None = None  # for deltas, if the model has another dtype
        self.adapters = AdapterMerger(model)

    def apply(self, received: ReceivedWeights) -> None:
        """Raises WeightSyncError if the model does not have what was sent afterwards."""
        about = received.about
        weights = received.weights
        if about.adapter:
            self.adapters.apply(Adapter.decode(received))
            return
        if about.keep:
            own = self._model.tensors()
            alike = all(
                tensor.dtype == own[name].dtype for name, tensor in weights.items() if name in own
            )
            self._decoder = None if alike else DeltaDecoder()
        if self._decoder is not None and (about.base or about.keep):
            weights = self._decoder.decode(weights, received.digests, about)
        elif about.base:
            own = self._model.tensors()
            put_changes(weights, own)
            wrong = [name for name, sent in received.digests.items() if digest(own[name]) != sent]
            refuse(wrong, "the transformers engine holds")
            return
        self._model.load_weights(weights, adopt=received.stays)
        own = self._model.tensors()
        wrong = []
        for name, sent in received.digests.items():
            if not received.in_place(name, own[name]) and not holds(own[name], weights[name], sent):
                wrong.append(name)
        refuse(wrong, "the transformers engine holds")


class AdapterMerger:
    """Adds the newest adapter to the frozen weights under it; every other weight is what the files
    had."""

    def __init__(self, model: EmbeddedModel) -> None:
        self._model = model
        self._frozen: dict[str, Tensor] = {}  # of layers under adapters, before anything was added
        self._digests: dict[str, str] = {}  # of all weights, before

    def apply(self, adapter: Adapter) -> None:
        own = self._model.tensors()
        if not self._digests:
            digests = digests_of(own)
            mark = frozen_weights_id(
                self._model.dtype, {name: digests[name] for name in self._model.own_names()}
            )
            if adapter.base.partition(" ")[0] == str(self._model.dtype) and adapter.base != mark:
                raise WeightSyncError(
                    "the frozen weights of the transformers engine are not those of the trainer, whose adapters it was "
                    "sent (trainer.policy.lora.sync=adapter)"
                )
            self._digests = digests
            self._frozen = {
                f"{layer}.weight": own[f"{layer}.weight"].clone() for layer in adapter.layers()
            }
        expected = dict(self._digests)
        with torch.no_grad():
            for layer, halves in adapter.layers().items():
                name = f"{layer}.weight"
                frozen = self._frozen[f"{layer}.weight"]
                here = (halves[0].to(frozen.device), halves[1].to(frozen.device))
                merged = with_added(
                    frozen, here, adapter.scale, transposed=layer in adapter.transposed
                )
                expected[name] = digest(merged)
                own[name].copy_(merged)
        refuse(
            [name for name in expected if digest(own[name]) != expected[name]],
            "the transformers engine holds",
        )
        changed = [
            name for name, frozen in self._frozen.items() if digest(frozen) != self._digests[name]
        ]
        refuse(changed, "the transformers engine keeps")

"""A transformers model for the embedded engine: prefill, decode one token, score, load weights.

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
from skyasync.models.float32_head import use_float32_head
from skyasync.models.images import Images, ImageTokens
from skyasync.models.router_replay import Routers
from skyasync.models.vision import Vision, is_vision
from skyasync.utils.weight_files import check_model_files
from skyasync.weight_sync.adapters import Adapter, frozen_weights_id, with_added
from skyasync.weight_sync.delta import DeltaDecoder, ReceivedWeights, put_changes
from skyasync.weight_sync.tensors import digest, digests_of, holds, refuse
from skyasync.weight_sync.update import WeightSyncError

# Padded tokens per forward pass over prompts: activations stay in the processor's cache.
FORWARD_TOKENS = 2048
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **library_options: Unpack[TransformersKwargs],
) -> tuple[Tensor, None]:
    """SDPA in which the query heads that share a key head are query *positions* of it.

    For decoded tokens alone. The library repeats keys and values for every query head instead,
    which for 9 heads over 3 takes 3 times as long.

    Args:
        query: ``[rows, heads, length, head_dim]``.
        key: ``[rows, KV heads, columns, head_dim]``, as ``value``.

    Returns:
        ``[rows, length, heads, head_dim]``, and no attention weights.
    """
    n, heads, length, dim = query.shape
    if length > 1 or heads == key.shape[1] or attention_mask is None:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            **library_options,
        )
    query = query.view(n, key.shape[1], -1, dim)  # [rows, KV heads, heads of a KV head, head_dim]
    out = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attention_mask,
        scale=scaling,
    )
    return out.reshape(n, 1, heads, -1), None


AttentionInterface.register("skyasync_grouped", grouped_attention)
AttentionMaskInterface.register("skyasync_grouped", sdpa_mask)


# A CPU's library adds a product's terms in another order if a matrix has few rows, and attention if
# its columns do not fill the processor's vectors. With torch 2.13 on AVX-512 in float32, products
# of fewer than 12 rows that are no multiple of 4, and keys that are no multiple of 16, differ from
# larger sizes in the last bit. A few more rows and columns are computed, which are not read: an
# answer then does not depend, bitwise, on the requests that are computed with it. On a GPU, in
# bfloat16, and with more than two threads, this has not been tested.
ENOUGH_ROWS = 12
ROWS = 4
COLUMNS = 16


def even_rows(rows: int) -> int:
    """The number of rows to compute for ``rows`` requests."""
    if rows >= ENOUGH_ROWS:
        return rows
    return -(-rows // ROWS) * ROWS


def even_columns(columns: int) -> int:
    """The number of positions to attend to for ``columns`` tokens."""
    return -(-columns // COLUMNS) * COLUMNS


def multiply_by_onednn(model: nn.Module) -> None:
    """Make linear layers in float32 on a CPU use oneDNN instead of MKL.

    A layer reads its weight when it is called, so weights can be replaced. SmolLM2-135M on two
    cores of an AMD EPYC (torch 2.13): 32 rows take 0.73 of the time with two threads, 0.95 with
    one, and the last bit depends on fewer sizes (``even_rows``). The operator is the one that
    torch's own compiler emits.
    """

    def linear(layer: nn.Linear, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows,
            layer.weight,
            layer.bias,
            "none",
            [],
            "",
        )
        return product

    if not torch.backends.mkldnn.is_available():
        return
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # it is private, and may be renamed
        return
    for module in model.modules():
        if type(module) is not nn.Linear:  # a subclass may compute something else
            continue
        if module.weight.dtype == torch.float32 and module.weight.device.type == "cpu":
            module.forward = MethodType(linear, module)  # type: ignore[method-assign]


class EmbeddedModel:
    """Not thread-safe: one thread loads and uses it."""

    def __init__(self, config: EngineConfig) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        auto = torch.bfloat16 if self.device.type == "cuda" else torch.float32
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
        if config.extra.get("float32_head") and self._model.dtype != torch.float32:
            use_float32_head(self._model)
        multiply_by_onednn(self._model)
        self._vision: Vision | None = None
        if is_vision(self._model.config):
            self._vision = Vision(self._model.config)
        self._routers: Routers | None = None
        if config.extra.get("routed_experts"):
            self._routers = Routers(self._model)
            self._routers.record()
        self._has_mapped_weights = False  # weights are in mapped memory, which cannot be written to
        text: Any = self._model.config.get_text_config()
        layers = set(config_value(text, "layer_types") or ["full_attention"])
        window = config_value(text, "sliding_window") or config.max_model_len
        # Within the window sliding attention is full attention.
        if layers - {"full_attention", "sliding_attention"} or window < config.max_model_len:
            raise UserError(
                f"the transformers engine computes full attention only; this model has {sorted(layers)} with a window "
                f"of {window} tokens and max_model_len is {config.max_model_len}: use generator.backend=vllm"
            )
        self.tokenizer: PreTrainedTokenizerBase | None = None
        # Only stop strings and bad words need it: a folder without a tokenizer is no error.
        with contextlib.suppress(OSError, ValueError):
            self.tokenizer = AutoTokenizer.from_pretrained(config.model_path)
        self.dtype: torch.dtype = self._model.dtype
        self._positions: float = config_value(text, "max_position_embeddings") or inf
        # All that a file of the model names: the files of chat models disagree.
        self.eos_ids: set[int] = set()
        named_ids = [
            config_value(self._model.config, "eos_token_id"),
            self._model.generation_config.eos_token_id,
        ]
        if self.tokenizer:
            named_ids.append(self.tokenizer.eos_token_id)
        for ids in named_ids:
            if isinstance(ids, list):
                self.eos_ids.update(ids)
            elif ids is not None:
                self.eos_ids.add(ids)
        self.vocabulary: int = self._model.get_input_embeddings().num_embeddings

    def check_images(self, prompt: Sequence[int], images: Images) -> None:
        """Check the images of a prompt.

        Raises:
            UserError: if the model reads no images, or the prompt's tokens are of other images.
        """
        if self._vision is not None:
            self._vision.processor.collapse(prompt, images)
        elif images:
            raise UserError("it has images, but the model reads only text")

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Images] = (),
    ) -> tuple[Tensor, DynamicCache, Tensor]:
        """Compute prompts.

        Returns:
            The logits after each prompt, ``[prompts, vocabulary]``. The prompts' cache, in columns
            0 to length - 1. Each prompt's shift ``[prompts]``: a token's position minus its column,
            which is not 0 after images.
        """
        tokens = self._right_padded(prompts)  # [prompts, padded length]
        count = len(prompts)
        end_columns = [len(prompt) - 1 for prompt in prompts]
        last_columns = torch.tensor(end_columns, device=self.device)
        # The head is computed at the columns in which some prompt ends.
        columns, column_of_prompt = last_columns.unique(return_inverse=True)
        while count * len(columns) < even_rows(count * len(columns)):
            columns = torch.cat([columns, columns[-1:]])
        cache = DynamicCache()
        inputs = self._vision.prompt_inputs(tokens, images) if self._vision else {}
        # [prompts, columns, vocabulary]
        logits = self._model(
            input_ids=tokens,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=columns,
            **inputs,
        ).logits
        shifts = torch.zeros(count, dtype=torch.int64, device=self.device)
        if "mm_token_type_ids" in inputs:
            shifts += self._model.base_model.rope_deltas.flatten()
        prompt_numbers = torch.arange(count, device=self.device)
        return self._allowed(logits[prompt_numbers, column_of_prompt]), cache, shifts

    def _allowed(self, logits: Tensor) -> Tensor:
        """The logits with -inf for placeholders of images, which no response may contain."""
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
        padding = (0, min(even_rows(rows), cache.slots) - rows)  # slots of no request
        tokens = nn.functional.pad(tokens, padding)  # [computed rows], as the next ones
        lengths = nn.functional.pad(lengths, padding)
        positions = lengths
        if shifts is not None:
            positions = lengths + nn.functional.pad(shifts, padding)
        width = min(even_columns(width), cache.columns)
        unread = torch.arange(width, device=self.device) > lengths[:, None]
        mask = torch.zeros(unread.shape, dtype=self._model.dtype, device=self.device)
        mask.masked_fill_(unread, -torch.inf)  # [computed rows, width]
        logits = self._model(
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=mask[:, None, None],
            past_key_values=cache.at(lengths, width),
            use_cache=True,
        ).logits[:rows, -1]
        return self._allowed(logits)

    def chosen(self) -> Experts | None:
        """The experts of the last forward pass; None if they are not recorded.

        ``[tokens, layers, experts per token]``, padding included.
        """
        if self._routers is None:
            return None
        return self._routers.chosen()

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of each token after the first, temperature 1, in float32.

        Returns one list per sequence. Tokens that stand for images have 0.
        """
        lengths = [len(sequence) for sequence in sequences]
        scores: list[list[float]] = [[] for _ in sequences]
        order = [i for i, length in enumerate(lengths) if length > 1]
        order.sort(key=lengths.__getitem__)  # so that sequences of one batch need little padding
        while order:
            count = max(1, FORWARD_TOKENS // lengths[order[-1]])
            batch = order[-count:]
            order = order[:-count]
            tokens = self._right_padded([sequences[i] for i in batch])  # [batch, padded length]
            images = [ImageTokens.images_of(sequences[i]) for i in batch]
            inputs = self._vision.prompt_inputs(tokens, images) if self._vision else {}
            output = self._model(input_ids=tokens, use_cache=False, **inputs)
            logits = self._allowed(output.logits[:, :-1]).float()  # [batch, length - 1, vocabulary]
            targets = tokens[:, 1:]  # [batch, length - 1], as ``logprobs``
            logprobs = logits.gather(2, targets[:, :, None])[..., 0] - logits.logsumexp(dim=2)
            if any(images) and self._vision:
                placeholders = targets == self._vision.processor.placeholder
                logprobs = logprobs.masked_fill(placeholders, 0.0)
            for i, row in zip(batch, logprobs.cpu(), strict=True):
                scores[i] = row[: lengths[i] - 1].tolist()
        return scores

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor], *, adopt: bool = False) -> None:
        """Copy ``weights`` into the model. Of tied names any one suffices.

        Args:
            adopt: compute on the weights where they are: tensors of the model's dtype and on its
                device are not copied.

        Raises:
            UserError: if names are missing or unexpected, or shapes differ; the model is not
                changed then.
        """
        state = self._model.state_dict(keep_vars=True)
        aliases: dict[int, list[str]] = {}  # address -> the names of a tied weight
        for name, tensor in state.items():
            aliases.setdefault(tensor.data_ptr(), []).append(name)
        missing_names = []
        for names in aliases.values():
            if weights.keys().isdisjoint(names):
                missing_names.append(names[0])
        unexpected_names = [name for name in weights if name not in state]
        if missing_names or unexpected_names:
            raise UserError(
                f"weight update rejected: missing {missing_names}, unexpected {unexpected_names}"
            )
        problems = []
        for name, tensor in weights.items():
            shape = state[name].shape
            if tensor.shape != shape:
                tensor_shape = list(tensor.shape)
                problems.append(f"{name} is {tensor_shape}, not {list(shape)}")
        if problems:
            raise UserError(f"weight update rejected: {'; '.join(problems)}")
        for names in aliases.values():
            current = state[names[0]]
            new_tensor = next(weights[name] for name in names if name in weights)
            if adopt and (current.dtype, current.device) == (new_tensor.dtype, new_tensor.device):
                for name in names:
                    state[name].data = new_tensor
            else:
                if self._has_mapped_weights:
                    writable = torch.empty_like(current)
                    for name in names:
                        state[name].data = writable
                current.copy_(new_tensor)
        self._has_mapped_weights = adopt

    def tensors(self) -> dict[str, Tensor]:
        """The parameters and saved buffers themselves, a tied one under each of its names."""
        return dict(self._model.state_dict())

    def own_names(self) -> list[str]:
        """Names of parameters and saved buffers, a tied one once."""
        named_tensors = chain(self._model.named_parameters(), self._model.named_buffers())
        return [name for name, _ in named_tensors if name in self._model.state_dict()]

    def _right_padded(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """``[sequences, padded length]``. With causal attention padding at the end is not read."""
        longest = max(map(len, sequences))
        length = max(longest, int(min(even_columns(longest), self._positions)))
        rows = []
        for sequence in sequences:
            padding = [0] * (length - len(sequence))
            rows.append([*sequence, *padding])
        return torch.tensor(rows, device=self.device)


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
        metadata = received.header
        weights = received.weights
        if metadata.adapter:
            self.adapters.apply(Adapter.decode(received))
            return
        wrong_names = []
        if metadata.keep:  # deltas will follow
            parameters = self._model.tensors()
            self._decoder = None
            for name, tensor in weights.items():
                if name in parameters and tensor.dtype != parameters[name].dtype:
                    self._decoder = DeltaDecoder()
                    break
        if self._decoder is not None and (metadata.base or metadata.keep):
            weights = self._decoder.decode(weights, received.digests, metadata)
        elif metadata.base:
            parameters = self._model.tensors()
            put_changes(weights, parameters)
            for name, sent_digest in received.digests.items():
                if digest(parameters[name]) != sent_digest:
                    wrong_names.append(name)
            refuse(wrong_names, "the transformers engine holds")
            return
        self._model.load_weights(weights, adopt=received.stays)
        parameters = self._model.tensors()
        for name, sent_digest in received.digests.items():
            if received.in_place(name, parameters[name]):  # the sender's memory itself
                continue
            if not holds(parameters[name], weights[name], sent_digest):
                wrong_names.append(name)
        refuse(wrong_names, "the transformers engine holds")


class AdapterMerger:
    """Adds the newest adapter to the frozen weights under it; the other weights do not change."""

    def __init__(self, model: EmbeddedModel) -> None:
        self._model = model
        # Of layers under adapters, before the first adapter.
        self._frozen: dict[str, Tensor] = {}
        self._digests: dict[str, str] = {}  # of all weights, before the first adapter

    def apply(self, adapter: Adapter) -> None:
        """Raises ``WeightSyncError`` if the frozen weights or the result are not the trainer's."""
        parameters = self._model.tensors()
        if not self._digests:
            digests = digests_of(parameters)
            # A tied weight counts once, as at the trainer.
            named_digests = {name: digests[name] for name in self._model.own_names()}
            frozen_id = frozen_weights_id(self._model.dtype, named_digests)
            dtype = adapter.base.partition(" ")[0]
            if dtype == str(self._model.dtype) and adapter.base != frozen_id:
                raise WeightSyncError(
                    "the frozen weights of the transformers engine are not those of the trainer, whose adapters it was "
                    "sent (trainer.policy.lora.sync=adapter)"
                )
            self._digests = digests
            for layer in adapter.layers():
                name = f"{layer}.weight"
                self._frozen[name] = parameters[name].clone()
        expected_digests = dict(self._digests)
        with torch.no_grad():
            for layer, (a, b) in adapter.layers().items():
                name = f"{layer}.weight"
                frozen = self._frozen[name]
                factors = (a.to(frozen.device), b.to(frozen.device))
                is_transposed = layer in adapter.transposed
                weight = with_added(frozen, factors, adapter.scale, transposed=is_transposed)
                expected_digests[name] = digest(weight)
                parameters[name].copy_(weight)
        wrong_names = []
        for name, expected_digest in expected_digests.items():
            if digest(parameters[name]) != expected_digest:
                wrong_names.append(name)
        refuse(wrong_names, "the transformers engine holds")
        # The copies too: an error in them would be in every later adapter.
        changed_names = []
        for name, frozen in self._frozen.items():
            if digest(frozen) != self._digests[name]:
                changed_names.append(name)
        refuse(changed_names, "the transformers engine keeps")

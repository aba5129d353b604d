"""A tiny chat model that knows the form of a tool call, but rarely makes one: it would rather guess.

Invariant: on one machine the same recipe gives the same model; see ``examples.tiny.model``, whose architecture it has.

    python -m examples.agents.model --out DIR

The supervised warm start shows two ways to answer: a guess, which is nearly always wrong, and a call of the calculator
followed by its result. Reinforcement learning has to find out which one pays.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from examples.agents.tasks import CALCULATOR, calculate, questions, text
from examples.cache import cache_folder, made_once
from examples.tiny.model import IGNORED, SPECIAL_TOKENS, llama_config
from examples.tiny.model import Recipe as TinyRecipe

#: ChatML; of the tools only their names are shown, and calls have the Hermes form.
TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system\ntools:' }}{% for tool in tools %}{{ ' ' + tool.function.name }}{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_ASSISTANT = re.compile(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", re.DOTALL)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the model is."""

    steps: int = 300
    batch_size: int = 64
    calls: float = 0.4  # share of the conversations that call the calculator
    lr: float = 2e-3
    warmup_steps: int = 20
    seed: int = 0
    corpus_size: int = 1024  # conversations the tokenizer learns from
    hidden: int = 128

    def folder_name(self) -> str:
        """Changes with the recipe and with any source that carries it out."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for source in (Path(__file__), Path(__file__).with_name("tasks.py")):
            digest.update(source.read_bytes())
        return f"agent-{digest.hexdigest()[:12]}"


def build(*, out: str | Path | None = None, **options: Any) -> str:
    """The folder of the model, made if it is not there yet; ``options`` are fields of ``Recipe``."""
    recipe = Recipe(**options)
    folder = Path(out) if out else cache_folder() / recipe.folder_name()
    return str(made_once(folder, lambda temporary: make(recipe, temporary)))


def make(recipe: Recipe, folder: Path) -> None:
    """Write tokenizer and warm-started model into ``folder``. The caller's randomness is left alone."""
    tokenizer = make_tokenizer(recipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = LlamaForCausalLM(llama_config(TinyRecipe(hidden=recipe.hidden), tokenizer))
    warm_start(model, tokenizer, recipe)
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def conversations(recipe: Recipe) -> Iterator[list[dict[str, Any]]]:
    """Endless training conversations, ``recipe.calls`` of them with a call."""
    rng = random.Random(recipe.seed)
    for a, b in questions("train", recipe.seed):
        asked = {"role": "user", "content": text(a, b)}
        if rng.random() < recipe.calls:
            call = {"function": {"name": "calculator", "arguments": {"expression": f"{a}*{b}"}}}
            result = calculate(f"{a}*{b}")
            yield [
                asked,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": result},
                {"role": "assistant", "content": result},
            ]
        else:
            yield [asked, {"role": "assistant", "content": str(a * b)}]


def make_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """A byte-level BPE learnt from the conversations; each digit is a token of its own, and so are the call's marks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    corpus = (
        "\n".join(f"{m['role']}\n{m['content']}{json.dumps(m.get('tool_calls', ''))}" for m in messages)
        for messages in conversations(recipe)
    )
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        min_frequency=50,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(islice(corpus, recipe.corpus_size), trainer)
    # Not special: what a call says must survive decoding.
    tokenizer.add_tokens(
        [AddedToken(mark, special=False, normalized=False) for mark in ("<tool_call>", "</tool_call>")]
    )
    end_of_text, _, end_of_message = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end_of_message,
        pad_token=end_of_text,
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def warm_start(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
    """Supervised steps; the loss sees the assistant's messages only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / recipe.warmup_steps))
    stream = conversations(recipe)
    model.train()
    for _ in range(recipe.steps):
        loss = model(**supervised_batch(list(islice(stream, recipe.batch_size)), tokenizer)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def supervised_batch(batch: list[list[dict[str, Any]]], tokenizer: PreTrainedTokenizerFast) -> dict[str, Tensor]:
    """``input_ids``, ``attention_mask`` and ``labels``, each int64 ``[batch, length]``, padded on the right."""
    rows = [_tokens_and_labels(messages, tokenizer) for messages in batch]
    length = max(len(tokens) for tokens, _ in rows)

    def padded(values: list[list[int]], filler: int) -> Tensor:
        return torch.tensor([row + [filler] * (length - len(row)) for row in values])

    return {
        "input_ids": padded([tokens for tokens, _ in rows], 0),
        "attention_mask": padded([[1] * len(tokens) for tokens, _ in rows], 0),
        "labels": padded([labels for _, labels in rows], IGNORED),
    }


def _tokens_and_labels(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], list[int]]:
    framed = tokenizer.apply_chat_template(messages, tools=[CALCULATOR], tokenize=False)
    assert isinstance(framed, str)
    tokens: list[int] = []
    labels: list[int] = []
    for index, piece in enumerate(_ASSISTANT.split(framed)):
        found = tokenizer(piece, add_special_tokens=False)["input_ids"]
        tokens += found
        labels += found if index % 2 else [IGNORED] * len(found)
    return tokens, labels


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.agents.model", description="Make the agents' model.")
    parser.add_argument("--out", help="folder to make it in; without it, its place in the cache")
    print(build(out=parser.parse_args().out))


if __name__ == "__main__":
    main()

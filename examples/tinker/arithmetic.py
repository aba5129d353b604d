"""Reinforcement learning of sums with Tinker's SDK, without this library: GRPO with importance
sampling.

skyasync tinker                                            # prints both
python examples/tinker/arithmetic.py TINKER_BASE_URL base_model
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import tinker
from tinker import types

PROMPTS = 32
SAMPLES = 8
STEPS = 30


def questions(seed: int) -> Iterator[tuple[str, str]]:
    rng = random.Random(seed)
    while True:
        left = rng.randint(0, 20)
        right = rng.randint(0, 20)
        yield f"Add: {left} + {right}", str(left + right)


def datum(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    tokens = list(sequence.tokens)
    logprobs = list(sequence.logprobs or [])
    sequence_tokens = prompt + tokens
    prompt_targets = len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(sequence_tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": sequence_tokens[1:],
            "logprobs": [0.0] * prompt_targets + logprobs,
            "advantages": [0.0] * prompt_targets + [advantage] * len(tokens),
        },
    )


def learn(base_url: str, base_model: str, steps: int = STEPS) -> list[float]:
    """The mean reward of each step."""
    service = tinker.ServiceClient(base_url=base_url, api_key="tml-local")
    trained = service.create_lora_training_client(base_model=base_model, rank=16, seed=0).result()
    tokenizer = trained.get_tokenizer()
    question = questions(seed=0)
    params = types.SamplingParams(max_tokens=6)
    means = list[float]()
    for step in range(steps):
        sampler = trained.save_weights_and_get_sampling_client().result()
        batch = [next(question) for _ in range(PROMPTS)]
        texts = [[{"role": "user", "content": text}] for text, _ in batch]
        prompts = [
            list(tokenizer.apply_chat_template(text, add_generation_prompt=True)["input_ids"])
            for text in texts
        ]
        answers = [
            sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, params)
            for prompt in prompts
        ]
        data = list[types.Datum]()
        rewards = list[float]()
        for (_, right), prompt, answer in zip(batch, prompts, answers, strict=True):
            sequences = answer.result().sequences
            decoded = [
                tokenizer.decode(list(sample.tokens), skip_special_tokens=True)
                for sample in sequences
            ]
            group = [float(text.strip() == right) for text in decoded]
            mean = sum(group) / SAMPLES
            rewards.append(mean)
            if 0 < mean < 1:
                pairs = zip(sequences, group, strict=True)
                data += [
                    datum(prompt, sequence, (reward - mean) / PROMPTS) for sequence, reward in pairs
                ]
        if data:
            gradient = trained.forward_backward(data, "importance_sampling")
            trained.optim_step(types.AdamParams(learning_rate=3e-3)).result()
            gradient.result()
        means.append(sum(rewards) / PROMPTS)
        print(f"step {step}: reward {means[-1]:.3f}", flush=True)
    service.close("success").result()
    return means


if __name__ == "__main__":
    learn(*sys.argv[1:3])

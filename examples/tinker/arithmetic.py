"""GRPO with importance sampling on sums, with Tinker's SDK alone: no import of skyasync.

skyasync tinker                                            # prints both arguments
python examples/tinker/arithmetic.py TINKER_BASE_URL base_model
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import tinker
from tinker import types

PROMPTS = 32  # of a step
SAMPLES = 8  # responses to each prompt, which are a group
STEPS = 30


def questions(seed: int) -> Iterator[tuple[str, str]]:
    """Endless questions and their answers."""
    rng = random.Random(seed)
    while True:
        left = rng.randint(0, 20)
        right = rng.randint(0, 20)
        yield f"Add: {left} + {right}", str(left + right)


def datum(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """A response as training data: the model predicts each token from those before it."""
    response = list(sequence.tokens)
    tokens = prompt + response
    # Targets begin with the second token. Those in the prompt have an advantage of 0: no loss.
    in_prompt = len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * in_prompt + list(sequence.logprobs or []),
            "advantages": [0.0] * in_prompt + [advantage] * len(response),
        },
    )


def learn(base_url: str, base_model: str, steps: int = STEPS) -> list[float]:
    """Train; returns the mean reward of each step."""
    service = tinker.ServiceClient(base_url=base_url, api_key="tml-local")
    trainer = service.create_lora_training_client(base_model=base_model, rank=16, seed=0).result()
    tokenizer = trainer.get_tokenizer()
    question = questions(seed=0)
    params = types.SamplingParams(max_tokens=6)
    mean_rewards: list[float] = []
    for step in range(steps):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        # All requests are sent before the first answer is awaited, so that they run together.
        requests = []
        for _ in range(PROMPTS):
            text, answer = next(question)
            chat = [{"role": "user", "content": text}]
            encoding = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
            prompt = list(encoding["input_ids"])
            future = sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, params)
            requests.append((prompt, answer, future))
        data: list[types.Datum] = []
        group_means: list[float] = []
        for prompt, answer, future in requests:
            sequences = future.result().sequences
            rewards = []
            for sequence in sequences:
                response = tokenizer.decode(list(sequence.tokens), skip_special_tokens=True)
                rewards.append(float(response.strip() == answer))
            mean = sum(rewards) / SAMPLES
            group_means.append(mean)
            if mean in (0.0, 1.0):  # all advantages are 0: nothing to learn
                continue
            for sequence, reward in zip(sequences, rewards, strict=True):
                data.append(datum(prompt, sequence, (reward - mean) / PROMPTS))
        if data:
            # The server runs both in this order, so the first is awaited last.
            gradient = trainer.forward_backward(data, "importance_sampling")
            trainer.optim_step(types.AdamParams(learning_rate=3e-3)).result()
            gradient.result()
        mean_rewards.append(sum(group_means) / PROMPTS)
        print(f"step {step}: reward {mean_rewards[-1]:.3f}", flush=True)
    service.close("success").result()
    return mean_rewards


if __name__ == "__main__":
    learn(*sys.argv[1:3])

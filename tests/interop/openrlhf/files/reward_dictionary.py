"""A reward file: tensors in a dictionary, for advantages, for filtering, and for logging."""

import torch


def reward_func(queries, prompts, labels, **kwargs):
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=False)]
    digits = torch.tensor(
        [float(sum(character.isdigit() for character in response)) for response in responses]
    )
    odd = torch.tensor([float(sum(map(ord, response)) % 2) for response in responses])
    assert all(
        prompt.startswith("<user>") and label.isdigit()
        for prompt, label in zip(prompts, labels, strict=False)
    )
    return {"rewards": odd + digits, "scores": odd, "extra_logs": {"digits": digits}}

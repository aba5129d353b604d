"""A reward function with AReaL's parameters."""


def parity_reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **kwargs) -> float:
    assert prompt.startswith("<user>") and prompt.endswith("<a>")
    assert len(prompt_ids) == len(
        prompt.replace("<eos>", ".")
    )  # a byte each, except the end of a message
    assert answer.isdigit() and isinstance(completions, str)
    return float(sum(completion_ids) % 2)

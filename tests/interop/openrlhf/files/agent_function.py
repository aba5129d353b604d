"""The first interface: a function whose state is in the file's globals, and a tuple as its answer."""

import torch

step_idx = 0


async def step(state, action, label, **kwargs):
    global step_idx
    step_idx += 1
    reward = torch.tensor(float(sum(map(ord, action)) % 2))
    return (
        reward,
        state + action + (" again: " if step_idx < 2 else ""),
        step_idx == 2,
        {"steps": step_idx},
    )

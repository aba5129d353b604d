"""A reward file that returns a plain list, and takes nothing else."""


def reward_func(queries, prompts, labels):
    return [(sum(map(ord, query)) % 3) / 2 for query in queries]

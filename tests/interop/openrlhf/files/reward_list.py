"""A reward file that returns a plain list, with no further parameters."""


def reward_func(queries, prompts, labels):
    return [(sum(map(ord, query)) % 3) / 2 for query in queries]

"""Rewards of two domains."""

from skyasync.rewards import quick


@quick
def math_rule(response, label):
    return float(sum(map(ord, response)) % 2)


@quick
def ifeval(response):
    return 2.0 + len(response) % 2

"""A reward that differs from answer to answer, whatever a random model writes."""

from skyasync.rewards import quick


@quick
def odd(response):
    return float(sum(map(ord, response)) % 2)

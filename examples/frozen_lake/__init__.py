"""FrozenLake, a game of several turns, on a tiny chat model: on a laptop, without downloads."""

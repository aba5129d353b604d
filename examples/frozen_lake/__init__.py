"""FrozenLake, an agent's game of several turns, on a tiny chat model: learned on a laptop, without
downloads."""

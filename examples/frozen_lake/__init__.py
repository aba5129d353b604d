"""FrozenLake, an agent's game of several turns, on a tiny chat model: learnt on a laptop, nothing downloaded."""

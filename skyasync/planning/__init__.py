"""What a run will need, said before anything of it starts.

Invariant: a plan is a pure function of a model's ``config.json``, the settings and the machine. Nothing here imports
torch, Ray or an engine, but for models whose family ``families`` does not know.
"""

"""vLLM, in the engine's process or as a server that the run does not start."""

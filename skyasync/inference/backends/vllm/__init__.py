"""vLLM, in the engine's process or as a server of somebody else."""

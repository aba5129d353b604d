"""vLLM behind the engines' protocol."""

"""The engine that needs no extra install: transformers, decoding in this process."""

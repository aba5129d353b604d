"""A run from its configuration to its end: experiment, processes, recovery, Ray, live page."""

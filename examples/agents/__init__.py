"""Agents as programs: a calculator agent that learns to use its tool, through the OpenAI-compatible
endpoint."""

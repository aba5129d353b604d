"""Agents as programs: a calculator agent learns to use its tool through an OpenAI endpoint."""

"""The OpenAI-compatible server, what it records, and the agent programs that ask it."""

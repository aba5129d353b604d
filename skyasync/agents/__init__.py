"""Agent programs and the OpenAI-compatible endpoint that they call: what it records is trained."""

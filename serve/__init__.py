"""The HTTP surface over decode: an OpenAI-compatible server."""

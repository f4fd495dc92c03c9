"""Talks to OpenAI-compatible servers from Trio. Knows the wire and nothing of the server."""

"""The scripted backend and fault injection: shipped, documented, used by our own tests."""

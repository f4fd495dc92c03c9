"""Metrics and logs: facts folded into numbers. Knows no request handling."""

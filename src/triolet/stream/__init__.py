"""One numbered, bounded log per request, and what to do with a reader that lags."""

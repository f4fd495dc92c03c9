"""Token ids in, token ids out. Knows no text, no HTTP and no Trio."""

"""Token ids to text to events, for one request. Pure: no clock, no randomness, no I/O."""

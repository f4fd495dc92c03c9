"""Where the engine thread and Trio meet: requests, their scopes and their ends."""

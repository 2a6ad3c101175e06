"""What a client asks: bodies, fields, prompts -> requests of the engine."""

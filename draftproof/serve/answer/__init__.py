"""What a client is told: results of the engine -> pieces of a message -> JSON, whole or as events."""

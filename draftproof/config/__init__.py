"""What checkpoints say. Nothing here imports torch."""

"""What weights do: the target, the drafter and their cache, on CPU or GPU."""

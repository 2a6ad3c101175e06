"""Speculation as pure functions on tensors: trees, noise, logits processors, the acceptance rule."""

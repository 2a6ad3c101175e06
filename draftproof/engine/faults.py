"""Telling a want of memory from other faults."""

from __future__ import annotations

import torch

SAID = ("out of memory", "can't allocate memory", "not enough memory")


def short_of_memory(error: BaseException) -> bool:
    """Python, CUDA and the allocator of the CPU each say it in their own way."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in SAID)

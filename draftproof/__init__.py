"""draftproof: speculative decoding you can prove."""

__version__ = "0.1.0"

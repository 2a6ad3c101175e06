"""A small Qwen3.5-like target with an MTP head, trained from scratch: corpus -> tokenizer -> loop -> export."""

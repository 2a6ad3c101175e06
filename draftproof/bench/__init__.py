"""Acceptance and speed, measured. Nothing here imports torch at import time."""

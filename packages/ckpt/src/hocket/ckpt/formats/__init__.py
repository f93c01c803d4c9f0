"""Checkpoints of other formats: listed, read by byte ranges, and written, without torch."""

"""Checkpoints that are committed whole, checked when read, and opened on any number of ranks."""

"""Activations that are cut along the sequence: the blocks that take them, and attention over all parts."""

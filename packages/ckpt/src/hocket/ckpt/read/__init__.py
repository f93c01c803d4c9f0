"""Opening and reading of checkpoints of every format as NumPy arrays, without torch."""

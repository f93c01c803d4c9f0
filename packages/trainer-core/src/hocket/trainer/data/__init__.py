"""This rank's batches: loaders, counts, positions, prefetch."""

"""Tensor parallelism: the plans of models, the styles of their layers, and the cut itself."""

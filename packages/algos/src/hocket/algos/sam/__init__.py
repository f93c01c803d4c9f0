"""SAM: gradients taken where the loss nearby is largest."""

from hocket.algos.sam.sam import SAM, SAMStep

__all__ = ["SAM", "SAMStep"]

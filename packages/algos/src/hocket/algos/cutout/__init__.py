"""CutOut: square holes in images."""

from hocket.algos.cutout.cutout import CutOut, cutout_batch

__all__ = ["CutOut", "cutout_batch"]

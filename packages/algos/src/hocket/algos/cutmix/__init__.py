"""CutMix: patches of other samples, with targets mixed by area."""

from hocket.algos.cutmix.cutmix import CutMix, cutmix_batch

__all__ = ["CutMix", "cutmix_batch"]

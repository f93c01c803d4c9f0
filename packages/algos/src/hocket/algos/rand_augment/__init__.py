"""RandAugment: a few random augmentations of each image."""

from hocket.algos.rand_augment.rand_augment import RandAugment, RandAugmentTransform, randaugment_image

__all__ = ["RandAugment", "RandAugmentTransform", "randaugment_image"]

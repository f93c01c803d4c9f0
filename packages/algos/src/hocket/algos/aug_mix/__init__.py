"""AugMix: a mixture of chains of augmentations of each image."""

from hocket.algos.aug_mix.aug_mix import AugmentAndMixTransform, AugMix, augmix_image

__all__ = ["AugMix", "AugmentAndMixTransform", "augmix_image"]

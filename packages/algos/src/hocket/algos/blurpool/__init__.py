"""BlurPool: a blur before each downsampling, against aliasing."""

from hocket.algos.blurpool.blurpool import BlurPool, apply_blurpool
from hocket.algos.blurpool.layers import BlurConv2d, BlurMaxPool2d, BlurPool2d, blur_2d, blurmax_pool2d

__all__ = [
    "BlurConv2d",
    "BlurMaxPool2d",
    "BlurPool",
    "BlurPool2d",
    "apply_blurpool",
    "blur_2d",
    "blurmax_pool2d",
]

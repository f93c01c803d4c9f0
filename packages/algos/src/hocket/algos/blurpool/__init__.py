"""BlurPool: a blur before each downsampling, against aliasing."""

from hocket.algos.blurpool.blurpool import BlurPool, apply_blurpool
from hocket.algos.blurpool.layers import BlurConv2d, BlurMaxPool2d, blur_2d

__all__ = ["BlurConv2d", "BlurMaxPool2d", "BlurPool", "apply_blurpool", "blur_2d"]

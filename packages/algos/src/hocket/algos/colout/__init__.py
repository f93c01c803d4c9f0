"""ColOut: random rows and columns of images are dropped."""

from hocket.algos.colout.colout import ColOut, ColOutTransform, colout_batch

__all__ = ["ColOut", "ColOutTransform", "colout_batch"]

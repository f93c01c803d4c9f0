"""Float8 training: matrix products of linear layers in 8 bits."""

from hocket.algos.float8.float8 import Float8, apply_float8

__all__ = ["Float8", "apply_float8"]

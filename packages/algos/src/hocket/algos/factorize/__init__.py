"""Factorize: two thin layers in place of each wide one."""

from hocket.algos.factorize.factorize import Factorize, apply_factorization
from hocket.algos.factorize.layers import FactorizedConv2d, FactorizedLinear
from hocket.algos.factorize.low_rank import LowRankSolution, factorize_conv2d, factorize_matrix

__all__ = [
    "Factorize",
    "FactorizedConv2d",
    "FactorizedLinear",
    "LowRankSolution",
    "apply_factorization",
    "factorize_conv2d",
    "factorize_matrix",
]

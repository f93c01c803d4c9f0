"""Factorize: wide layers become two thin ones."""

from hocket.algos.factorize.factorize import Factorize, apply_factorization
from hocket.algos.factorize.layers import FactorizedConv2d, FactorizedLinear

__all__ = ["Factorize", "FactorizedConv2d", "FactorizedLinear", "apply_factorization"]

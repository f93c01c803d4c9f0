"""Residual blocks that are skipped at random."""

from hocket.algos.stochastic_depth.layers import StochasticResidual
from hocket.algos.stochastic_depth.stochastic_depth import StochasticDepth, apply_stochastic_depth

__all__ = ["StochasticDepth", "StochasticResidual", "apply_stochastic_depth"]

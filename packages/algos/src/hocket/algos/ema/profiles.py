"""The weight of the past in an average: constant, or a power function of the number of updates."""

import math


def smoothing_of_half_life(interval: float, half_life: float) -> float:
    """Return the smoothing with which a weight's share halves after `half_life`, updated each `interval`."""
    return math.pow(2.0, -interval / half_life)


def power_exponent(sigma_rel: float) -> float:
    """Return γ of the power-function profile with a given relative width.

    `sigma_rel` is the profile's standard deviation as a share of the training so far:
    σ² = (γ + 1) / ((γ + 2)² (γ + 3)), which falls with γ; bisection inverts it.

    Source: Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models, 2024, equation
    127 of the appendix.
    """
    low, high = 0.0, 1.0
    while _width(high) > sigma_rel:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _width(middle) > sigma_rel else (low, middle)
    return (low + high) / 2.0


def power_smoothing(num_updates: int, gamma: float) -> float:
    """Return the share of the past in update number `num_updates`, counted from 1.

    Source: Karras et al., 2024, equation 2: β(t) = (1 - 1/t)^(γ + 1).
    """
    return math.pow(1.0 - 1.0 / num_updates, gamma + 1.0)


def _width(gamma: float) -> float:
    return math.sqrt((gamma + 1.0) / ((gamma + 2.0) ** 2 * (gamma + 3.0)))


MOST_SIGMA_REL = _width(0.0)
"""The width at γ = 0, a plain mean of all weights: 0.2887."""

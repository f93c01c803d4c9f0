"""Random draws from the rank's own generators, which a checkpoint stores; none waits for the device."""

import random

import torch


def draw_beta(alpha: float) -> float:
    """Draw from Beta(alpha, alpha) with Python's generator; `alpha` 0 gives 0 or 1 with equal chances."""
    if alpha == 0:
        return float(random.random() < 0.5)
    return random.betavariate(alpha, alpha)


def draw_dirichlet(alpha: float, size: int) -> list[float]:
    """Draw `size` weights that sum to 1 from a symmetric Dirichlet distribution."""
    parts = [random.gammavariate(alpha, 1.0) for _ in range(size)]
    total = sum(parts)
    return [part / total for part in parts] if total else [1.0 / size] * size


def draw_permutation(size: int, device: torch.device) -> torch.Tensor:
    """Draw a permutation of `range(size)` on the device, so that indexing does not wait for a copy."""
    return torch.randperm(size, device=device)

"""Dropout with masks from a fixed set, a few of which are in use for many batches."""

import torch
from torch import nn

from hocket.algos.checks import check_count
from hocket.algos.errors import AlgorithmConfigError


class GyroDropoutLayer(nn.Module):
    """Dropout whose masks come from a set of `sigma`; `tau` of them are in use for `period` batches.

    The set and the masks of each period are functions of `seed`, so that a resumed run and all ranks have the
    same masks. In evaluation the layer returns its input.

    Args:
        p: Probability of dropping a number, 0 to below 1.
        sigma: Number of masks in the set.
        tau: Number of masks that are in use at once, each for an equal share of the samples.
        seed: Seed of the set.
        period: Training batches after which other masks come into use. None leaves the change to `select`.

    Raises:
        AlgorithmConfigError: A setting is out of its range.
    """

    chosen: torch.Tensor

    def __init__(
        self, p: float = 0.5, sigma: int = 256, tau: int = 16, seed: int = 0, period: int | None = None
    ) -> None:
        super().__init__()
        check(p, sigma, tau)
        self.p = p
        self.sigma = sigma
        self.tau = tau
        self.seed = seed
        self.period = period
        self._num_batches = 0
        # Not stored in checkpoints: it follows from the batch's number.
        self.register_buffer("chosen", _choose(sigma, tau, seed, 0), persistent=False)

    def select(self, period_index: int) -> None:
        """Put the masks of the given period into use."""
        self.chosen.copy_(_choose(self.sigma, self.tau, self.seed, period_index))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop numbers of `(B, ...)` in training, and scale the others by `1 / (1 - p)`."""
        if not self.training or self.p == 0:
            return x
        if self.period is not None:
            if self._num_batches % self.period == 0:
                self.select(self._num_batches // self.period)
            self._num_batches += 1
        num_masks, chosen = self.tau, self.chosen
        if len(x) < self.tau:  # each sample has a mask of its own
            num_masks = len(x)
            chosen = chosen[torch.arange(num_masks, device=x.device) * self.tau // num_masks]
        positions = torch.arange(x[0].numel(), device=x.device)
        is_kept = _uniform(chosen[:, None] * len(positions) + positions, self.seed) >= self.p
        masks = (is_kept.to(x.dtype) / (1 - self.p)).view(num_masks, *x.shape[1:])
        rows = torch.arange(len(x), device=x.device) * num_masks // len(x)
        return x * masks[rows]

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"p={self.p}, sigma={self.sigma}, tau={self.tau}"


def mask_period(num_batches: int, sigma: int, tau: int) -> int:
    """Return the number of batches for which `tau` masks are in use; all `sigma` masks get equal shares."""
    return max(1, num_batches // sigma * tau)


def check(p: float, sigma: int, tau: int) -> None:
    """Raise `AlgorithmConfigError` unless the settings of gyro dropout are in their ranges."""
    if not 0 <= p < 1:
        raise AlgorithmConfigError(f"`p` is {p!r}, expected 0 to below 1")
    check_count("sigma", sigma)
    check_count("tau", tau)
    if tau > sigma:
        raise AlgorithmConfigError(f"`tau` is {tau}, expected at most `sigma`, {sigma}")


def _choose(sigma: int, tau: int, seed: int, period_index: int) -> torch.Tensor:
    """Return the masks of a period: the next `tau` of the set, which is in a new random order each round."""
    per_round = sigma // tau
    generator = torch.Generator().manual_seed((seed * 1_000_003 + period_index // per_round) % 2**63)
    start = period_index % per_round * tau
    return torch.randperm(sigma, generator=generator, device="cpu")[start : start + tau]


def _uniform(numbers: torch.Tensor, seed: int) -> torch.Tensor:
    """Hash integers to numbers that look uniform in [0, 1): a mask needs no memory between batches.

    Two rounds of multiply and xor-shift on 32 bits, kept in int64 so that no product overflows.
    """
    bits = (numbers ^ (seed * 0x9E3779B1)) & 0xFFFFFFFF
    for _ in range(2):
        bits = ((bits ^ (bits >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return (bits ^ (bits >> 16)).double() / 2**32

"""Seeds, as `composer.utils.reproducibility`."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hocket.compat.composer.utils import dist
from hocket.trainer.process.devices import choose_device
from hocket.trainer.process.rng import capture_rng, restore_rng, seed_rng

#: The largest seed.
MAX_SEED = 2**32 - 1


def seed_all(seed: int) -> None:
    """Seed the random generators of Python, NumPy and torch."""
    seed_rng(seed)


def get_random_seed() -> int:
    """Return a random seed that does not depend on the seeded generators."""
    return secrets.randbelow(MAX_SEED + 1)


@contextlib.contextmanager
def seed_context(seed: int) -> Iterator[None]:
    """Seed the random generators in a `with` block, and restore their states afterwards."""
    device = choose_device(None)
    rng_state = capture_rng(device)
    seed_rng(seed)
    try:
        yield
    finally:
        restore_rng(rng_state, device)


def get_rng_state() -> list[dict[str, Any]]:
    """Return the states of every rank's generators. Collective."""
    return dist.all_gather_object(capture_rng(choose_device(None)))


def load_rng_state(rng_state_dicts: Sequence[dict[str, Any]]) -> None:
    """Set this rank's generators to their states among those of every rank.

    Raises:
        ValueError: If there is no state for this rank.
    """
    rank = dist.get_global_rank()
    if rank >= len(rng_state_dicts):
        raise ValueError(
            f"there are states of {len(rng_state_dicts)} ranks and this is rank {rank}; "
            "load on as many ranks, or seed with `seed_all`"
        )
    restore_rng(rng_state_dicts[rank], choose_device(None))


def configure_deterministic_mode() -> None:
    """Make torch use deterministic kernels only; `Trainer(deterministic_mode=True)` does it for a run."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


__all__ = [
    "MAX_SEED",
    "configure_deterministic_mode",
    "get_random_seed",
    "get_rng_state",
    "load_rng_state",
    "seed_all",
    "seed_context",
]

"""Process groups for the tests of layouts, and a script for the tests of the launcher."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from support import launches
from support.standing_ranks import StandingRanks, standing_ranks


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Initialise `torch.distributed` with one rank for a whole module.

    A group per test would be cleaner, but torch's caches of sharding decisions keep the first mesh that they
    saw, and with it the sockets of its group, which the leak check would report.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="package")
def packages_two_ranks() -> Iterator[StandingRanks]:
    """Start two processes for `two_ranks`."""
    with standing_ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="package")
def packages_four_ranks() -> Iterator[StandingRanks]:
    """Start four processes for `four_ranks`."""
    with standing_ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two_ranks(packages_two_ranks: StandingRanks) -> Iterator[StandingRanks]:
    """Return two processes that all tests of this package share; a test must leave them unchanged."""
    yield packages_two_ranks
    packages_two_ranks.renew()


@pytest.fixture(scope="module")
def four_ranks(packages_four_ranks: StandingRanks) -> Iterator[StandingRanks]:
    """Return four processes that all tests of this package share; a test must leave them unchanged."""
    yield packages_four_ranks
    packages_four_ranks.renew()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Write `launches.SCRIPT` to `job.py` in `tmp_path`, and return its path."""
    path = tmp_path / "job.py"
    path.write_text(launches.SCRIPT)
    return path

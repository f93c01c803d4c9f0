"""Two, four and eight ranks that all tests of layouts share."""

from collections.abc import Iterator

import pytest
import torch

from support.standing_ranks import StandingRanks, standing_ranks

torch.set_num_threads(1)


@pytest.fixture(scope="package")
def folders_four_ranks() -> Iterator[StandingRanks]:
    """Start four processes for `four_ranks`."""
    with standing_ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four_ranks(folders_four_ranks: StandingRanks) -> Iterator[StandingRanks]:
    """Return four processes that all tests of this folder share; a test must leave them unchanged."""
    yield folders_four_ranks
    folders_four_ranks.renew()


@pytest.fixture(scope="package")
def folders_two_ranks() -> Iterator[StandingRanks]:
    """Start two processes for `two_ranks`."""
    with standing_ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two_ranks(folders_two_ranks: StandingRanks) -> Iterator[StandingRanks]:
    """Return two processes, as `four_ranks` returns four."""
    yield folders_two_ranks
    folders_two_ranks.renew()


@pytest.fixture(scope="package")
def folders_eight_ranks() -> Iterator[StandingRanks]:
    """Start eight processes for `eight_ranks`."""
    with standing_ranks(8) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def eight_ranks(folders_eight_ranks: StandingRanks) -> Iterator[StandingRanks]:
    """Return eight processes, as `four_ranks` returns four."""
    yield folders_eight_ranks
    folders_eight_ranks.renew()

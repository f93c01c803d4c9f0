"""Four ranks that all tests of layouts share."""

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

"""Four ranks that all tests of layouts share."""

from collections.abc import Iterator

import pytest
import torch

from support.standing_ranks import StandingRanks, standing_ranks

torch.set_num_threads(1)


@pytest.fixture(scope="package")
def four_ranks() -> Iterator[StandingRanks]:
    """Start four processes that all tests of this folder share; a test must leave them unchanged."""
    with standing_ranks(4) as ranks:
        yield ranks

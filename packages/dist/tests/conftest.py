"""A process group of one rank for the tests that shard in this very process."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Initialise `torch.distributed` with one rank for a whole module.

    One group a test would be cleaner, but torch's caches of sharding decisions keep the first mesh that they
    saw, and with it the sockets of its group, which the leak check rightly finds.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()

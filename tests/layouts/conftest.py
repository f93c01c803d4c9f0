"""Two, four and eight ranks that all tests of layouts share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support import rank_server
from support.standing_ranks import StandingRanks, standing_ranks

torch.set_num_threads(1)
# Importing the models of Hugging Face takes each new rank seconds of processor time.
rank_server.preload("transformers.modeling_utils")
rank_server.preload("hocket.trainer.models")


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], Any]], Any]:
    """Return a function that calls another one with a folder, and remembers its result under a name.

    Several tests load the checkpoint of a layout, which is saved once.
    """
    results: dict[str, Any] = {}

    def call(name: str, function: Callable[[Path], Any]) -> Any:
        if name not in results:
            results[name] = function(tmp_path_factory.mktemp("once"))
        return results[name]

    return call


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

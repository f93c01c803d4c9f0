"""The suite of `DataPlan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hocket.trainer.data.batches import num_samples
from hocket.trainer.protocols import DataPlan


def check_data_plan(make: Callable[[int, int], Any], num_ranks: int = 2) -> None:
    """Check that the loaders of a job divide each global batch: equally many steps, shares that add up.

    Args:
        make: A function `(rank, num_ranks) -> loader`, over the same data.
        num_ranks: Number of ranks to make loaders for, in this process.

    Raises:
        AssertionError: If the loaders fail a check.
    """
    loaders = [make(rank, num_ranks) for rank in range(num_ranks)]
    steps: list[list[tuple[int, int, int]]] = []
    for rank, made in enumerate(loaders):
        loader: Any = made
        assert isinstance(made, DataPlan), (
            f"`{type(loader).__name__}` has no `data_parallel` and `batch_share()`"
        )
        assert tuple(loader.data_parallel) == (rank, num_ranks), (
            f"`data_parallel` is {loader.data_parallel}; expected {(rank, num_ranks)}"
        )
        steps.append([(num_samples(batch), *loader.batch_share()) for batch in loader])
    lengths = [len(rank) for rank in steps]
    assert len(set(lengths)) == 1, f"ranks make {lengths} steps; expected as many on each"
    assert lengths[0], "there was no batch"
    for index, row in enumerate(zip(*steps, strict=True)):
        for rank, (rows, share, _) in enumerate(row):
            assert rows >= 1, f"rank {rank} has an empty batch at step {index}"
            assert 0 <= share <= rows, (
                f"rank {rank} has a share of {share} in its {rows} rows at step {index}"
            )
        totals = {total for _, _, total in row}
        assert len(totals) == 1, f"ranks state global batches of {sorted(totals)} rows at step {index}"
        added = sum(share for _, share, _ in row)
        assert added == totals.pop(), (
            f"the shares of step {index} add up to {added}, which is not the global batch"
        )

"""mosaicml-streaming's partitions: which places of an epoch each rank's batches hold.

The places `0..N` are cut into equal rows, one for each canonical node, and dealt out one of each row in turn.
The nodes take turns at that, and the ranks of a node at what the node has. What does not come out even is
filled with places that the taker had just before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.stream.errors import ConfigError

Places = NDArray[np.int64]
ALGORITHMS = ("orig", "relaxed")


def partition(
    algo: str,
    num_samples: int,
    *,
    num_canonical_nodes: int,
    num_nodes: int,
    ranks_per_node: int,
    batch_size: int,
    drop_first: int = 0,
    initial_nodes: int | None = None,
) -> Places:
    """Return each rank's batches as places in the epoch, `(ranks, batches, batch_size) int64`; -1 is none.

    Args:
        algo: `orig` or `relaxed`. They differ where nodes and canonical nodes do not divide each other:
            `relaxed` then plans for the nodes that the run began on, and deals each batch out anew.
        num_samples: Of the epoch, from 1.
        num_canonical_nodes: Rows.
        num_nodes: Machines now.
        ranks_per_node: Data-parallel ranks on each of them.
        batch_size: Samples of a batch on a rank.
        drop_first: Samples of the epoch that are done with.
        initial_nodes: Machines that the run began on.

    Raises:
        ConfigError: Nodes and canonical nodes do not divide each other, and `relaxed` has no way out.
    """
    if num_canonical_nodes % num_nodes == 0 or num_nodes % num_canonical_nodes == 0:
        return _deal(num_samples, num_canonical_nodes, num_nodes, ranks_per_node, batch_size, drop_first)
    nodes = initial_nodes if algo == "relaxed" else None
    global_batch = batch_size * num_nodes * ranks_per_node
    if nodes is None or (num_canonical_nodes % nodes and nodes % num_canonical_nodes):
        raise ConfigError(
            f"there are {num_nodes} machines and {num_canonical_nodes} canonical nodes: expected one of them "
            f"to divide the other, as `partition_algo={algo!r}` needs here; use another number of machines, "
            "or give `num_canonical_nodes` when the run begins"
        )
    if global_batch % (nodes * ranks_per_node):
        raise ConfigError(
            f"the global batch is {global_batch} samples, and the run began on {nodes} machines of "
            f"{ranks_per_node} ranks: expected their product to divide it, as `partition_algo='relaxed'` "
            f"needs to go on with {num_nodes}; choose another number of machines"
        )
    first_size = global_batch // (nodes * ranks_per_node)
    began = _deal(num_samples, num_canonical_nodes, nodes, ranks_per_node, first_size, drop_first)
    num_batches = began.shape[1]
    batches = began.transpose(1, 0, 2).reshape(num_batches, num_nodes * ranks_per_node, batch_size)
    return batches.transpose(1, 0, 2)


def _deal(
    num_samples: int, num_rows: int, num_nodes: int, ranks_per_node: int, batch_size: int, drop_first: int
) -> Places:
    if num_samples < num_rows:
        dealt = np.resize(np.arange(num_samples), num_rows)[None]
        dealt = _fill(dealt, num_nodes)[0]
    else:
        bounds = np.arange(num_rows + 1) * num_samples // num_rows
        rows = bounds[:-1, None] + np.arange(-(-num_samples // num_rows))
        rows = np.minimum(rows, bounds[1:, None] - 1)
        dealt = _fill(rows, max(num_nodes // num_rows, 1)).T.reshape(-1)
    left = dealt[drop_first - drop_first % num_nodes :]
    of_nodes = _fill(left.reshape(-1, num_nodes).T, ranks_per_node)
    of_ranks = of_nodes.reshape(num_nodes, -1, ranks_per_node).transpose(0, 2, 1)
    count = of_ranks.shape[2]
    num_batches = -(-count // batch_size)
    batches = np.full((num_nodes * ranks_per_node, num_batches * batch_size), -1, np.int64)
    batches[:, :count] = of_ranks.reshape(len(batches), count)
    return batches.reshape(len(batches), num_batches, batch_size)


def _fill(rows: Places, divisor: int) -> Places:
    """Lengthen rows to a multiple of `divisor` with places a whole turn back, or from the start if short."""
    length = rows.shape[1]
    missing = -length % divisor
    if not missing or not length:
        return rows
    first = length - divisor + 1 - missing
    back = np.arange(first, first + missing) if first >= 0 else np.resize(np.arange(length), missing)
    return np.concatenate([rows, rows[:, back]], axis=1)

"""The partition algorithms of mosaicml-streaming, which assign positions of an epoch to the ranks' batches.

The positions `0..N` are cut into one row per canonical node. Positions are taken from the rows in turn and
dealt to the nodes in turn, and then to the ranks of a node in turn. Shorter rows are filled by repeating
recent positions.
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
    """Return each rank's batches as positions in the epoch, `(ranks, batches, batch_size) int64`.

    -1 is padding.

    Args:
        algo: `orig` or `relaxed`. They differ if neither of nodes and canonical nodes divides the other:
            `relaxed` then plans for the initial number of nodes and deals each batch to the current ranks.
        num_samples: Number of samples in the epoch, at least 1.
        num_canonical_nodes: Number of rows.
        num_nodes: Current number of nodes.
        ranks_per_node: Data-parallel ranks per node.
        batch_size: Number of samples in a batch on each rank.
        drop_first: Number of samples that were read before a resume.
        initial_nodes: Number of nodes at the start of the run.

    Raises:
        ConfigError: Neither of nodes and canonical nodes divides the other, and `relaxed` cannot help.
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
    initial_batches = _deal(num_samples, num_canonical_nodes, nodes, ranks_per_node, first_size, drop_first)
    num_batches = initial_batches.shape[1]
    batches = initial_batches.transpose(1, 0, 2).reshape(num_batches, num_nodes * ranks_per_node, batch_size)
    return batches.transpose(1, 0, 2)


def _deal(
    num_samples: int, num_rows: int, num_nodes: int, ranks_per_node: int, batch_size: int, drop_first: int
) -> Places:
    if num_samples < num_rows:
        positions = np.resize(np.arange(num_samples), num_rows)[None]
        positions = _fill(positions, num_nodes)[0]
    else:
        bounds = np.arange(num_rows + 1) * num_samples // num_rows
        rows = bounds[:-1, None] + np.arange(-(-num_samples // num_rows))
        rows = np.minimum(rows, bounds[1:, None] - 1)
        positions = _fill(rows, max(num_nodes // num_rows, 1)).T.reshape(-1)
    remaining = positions[drop_first - drop_first % num_nodes :]
    node_positions = _fill(remaining.reshape(-1, num_nodes).T, ranks_per_node)
    rank_positions = node_positions.reshape(num_nodes, -1, ranks_per_node).transpose(0, 2, 1)
    count = rank_positions.shape[2]
    num_batches = -(-count // batch_size)
    batches = np.full((num_nodes * ranks_per_node, num_batches * batch_size), -1, np.int64)
    batches[:, :count] = rank_positions.reshape(len(batches), count)
    return batches.reshape(len(batches), num_batches, batch_size)


def _fill(rows: Places, divisor: int) -> Places:
    """Pad rows to a multiple of `divisor` with positions one round back, or from the start of short rows."""
    length = rows.shape[1]
    missing = -length % divisor
    if not missing or not length:
        return rows
    first = length - divisor + 1 - missing
    padding = np.arange(first, first + missing) if first >= 0 else np.resize(np.arange(length), missing)
    return np.concatenate([rows, rows[:, padding]], axis=1)

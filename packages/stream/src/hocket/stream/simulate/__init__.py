"""Simulation of downloads, cache use and shuffle quality on a cluster, from the indexes alone.

- `cluster`: the cluster
- `simulation`: the simulation of an epoch, of one or several streams, and measures of its shuffle
- `node_reads`: what a node reads, fetches and keeps in its cache
- `results`: the results
"""

from hocket.native.arguments import check_arguments
from hocket.stream.simulate.cluster import Cluster
from hocket.stream.simulate.results import MixSeries, NodeUse, Simulation, SimulationSeries, StreamUse
from hocket.stream.simulate.simulation import simulate

__all__ = [
    "Cluster",
    "MixSeries",
    "NodeUse",
    "Simulation",
    "SimulationSeries",
    "StreamUse",
    "simulate",
]

check_arguments([Cluster])

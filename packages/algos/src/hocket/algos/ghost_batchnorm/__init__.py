"""Ghost batch normalisation: statistics over parts of the batch."""

from hocket.algos.ghost_batchnorm.ghost_batchnorm import (
    GhostBatchNorm,
    GhostBatchNorm_,
    apply_ghost_batchnorm,
)

__all__ = ["GhostBatchNorm", "GhostBatchNorm_", "apply_ghost_batchnorm"]

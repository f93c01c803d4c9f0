"""Ghost batch normalisation: statistics over parts of the batch."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from hocket.algos.errors import AlgorithmConfigError
from hocket.algos.surgery import (
    SurgeryAlgorithm,
    SurgeryReport,
    is_plain,
    parts_of,
    replace_module_classes,
)
from hocket.algos.surgery.optimizers import Optimizers

if TYPE_CHECKING:
    from hocket.trainer.state import State

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


class GhostBatchNorm_(nn.Module):  # noqa: N801 - the plain name is the algorithm's, as in Composer
    """Normalises each part of a batch by itself in training; evaluation uses the inner module.

    Args:
        batchnorm: The inner module, whose parameters and running statistics are used.
        ghost_batch_size: Samples in a part, at most. One more in a batch that would leave a part of a single
            value in each channel, which has no variance: 3 samples `(3, C)` in parts of 2, for example.
    """

    def __init__(self, batchnorm: BatchNorm, ghost_batch_size: int = 32) -> None:
        super().__init__()
        self.batchnorm = batchnorm
        self.ghost_batch_size = ghost_batch_size

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Normalise `(B, C, ...)`."""
        norm = self.batchnorm
        inputs = self._split(input) if norm.training else (input,)
        if len(inputs) == 1:
            whole: torch.Tensor = norm(input)
            return whole
        if norm.momentum is None:  # a plain average of all statistics: the parts count like batches
            return torch.cat([norm(part) for part in inputs])
        norm._check_input_dim(input)
        if norm.track_running_stats and norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(len(inputs))
        mean, var = (norm.running_mean, norm.running_var) if norm.track_running_stats else (None, None)
        momentum = norm.momentum / len(inputs)
        parts = [
            F.batch_norm(part, mean, var, norm.weight, norm.bias, True, momentum, norm.eps) for part in inputs
        ]
        return torch.cat(parts)

    def _split(self, input: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: A002 - as in `forward`
        """Split `(B, C, ...)` into parts as Composer does, unless one would have a single value a channel."""
        size = input.shape[0]
        num_parts = max(-(-size // self.ghost_batch_size), 1)
        parts = input.chunk(num_parts)
        if self.ghost_batch_size > 1 and size > 1 and parts[-1].numel() == input.shape[1]:
            # Parts that differ by at most one sample, and have at least two.
            return input.tensor_split(min(num_parts, size // 2))
        return parts

    def extra_repr(self) -> str:
        """Show the size."""
        return f"ghost_batch_size={self.ghost_batch_size}"


class GhostBatchNorm(SurgeryAlgorithm):
    """Makes batch normalisation use statistics of at most `ghost_batch_size` samples, at INIT.

    Args:
        ghost_batch_size: Above 0.
        reapply: Same as for every `SurgeryAlgorithm`.

    Raises:
        AlgorithmConfigError: The size is not above 0.

    Example:
        >>> GhostBatchNorm(16)
        GhostBatchNorm(ghost_batch_size=16)
    """

    def __init__(self, ghost_batch_size: int = 32, *, reapply: bool = False) -> None:
        super().__init__(reapply=reapply)
        _check(ghost_batch_size)
        self.ghost_batch_size = ghost_batch_size

    @property
    def targets(self) -> tuple[type[nn.Module], ...]:
        """Batch normalisation in one, two and three dims."""
        return (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

    def operate(self, state: "State") -> SurgeryReport:
        """Replace the normalisations of `state.model`."""
        return apply_ghost_batchnorm(state.model, self.ghost_batch_size, state.optimizers)

    def __repr__(self) -> str:
        return f"GhostBatchNorm(ghost_batch_size={self.ghost_batch_size})"


def apply_ghost_batchnorm(
    model: nn.Module, ghost_batch_size: int = 32, optimizers: Optimizers | None = None
) -> SurgeryReport:
    """Replace a model's batch normalisations by ghost batch normalisations, in place; needs no trainer.

    Args:
        model: Changed in place; parameters and running statistics stay, with `batchnorm.` in their names.
        ghost_batch_size: Above 0.
        optimizers: Built over the model's parameters; nothing in them has to change.

    Returns:
        The report of the surgery.

    Raises:
        AlgorithmConfigError: The size is not above 0.

    Source: Hoffer et al., Train longer, generalize better, 2017, algorithm 1; Dimitriou and Arandjelovic, A
    New Look at Ghost Normalization, 2020.
    """
    _check(ghost_batch_size)
    inside = parts_of(model, GhostBatchNorm_)

    def ghost(module: BatchNorm, index: int) -> nn.Module | None:  # noqa: ARG001 - the policy's form
        is_usual = is_plain(module, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        return GhostBatchNorm_(module, ghost_batch_size) if is_usual and id(module) not in inside else None

    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return replace_module_classes(model, dict.fromkeys(kinds, ghost), optimizers, title="GhostBatchNorm")


def _check(ghost_batch_size: int) -> None:
    if not (isinstance(ghost_batch_size, int) and ghost_batch_size > 0):
        raise AlgorithmConfigError(f"`ghost_batch_size` is {ghost_batch_size!r}, expected an int above 0")

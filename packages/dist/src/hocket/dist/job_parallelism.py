"""The base of all layouts of a model over ranks.

A layout has the methods of the trainer's `Parallelism` protocol and owns a `ProcessGroup`, left by `close`.
"""

from collections.abc import Iterable
from types import TracebackType
from typing import Self

import torch

from hocket.dist.layout.clipping import clip_grad_norm_
from hocket.dist.ranks.process_group import ProcessGroup, Reduction


class JobParallelism:
    """The parts that do not depend on the layout: the process group and its collectives.

    Attributes:
        data_parallel: (rank, size) of this process among those that share a global batch.
        device: The device of the model.
        timeout_s: Seconds that a collective may take.
        num_equal_inputs: Ranks that have the same positions of the same samples, as those of `tp` do.
    """

    num_equal_inputs: int = 1

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.timeout_s = group.timeout_s
        self.data_parallel: tuple[int, int] = (group.world.rank, group.world.world_size)
        self.device = group.device

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: rank {self.global_rank} of {self.world_size}, {self.device}>"

    @property
    def global_rank(self) -> int:
        """The rank of this process among all."""
        return self._group.world.rank

    @property
    def world_size(self) -> int:
        """The number of processes of the job."""
        return self._group.world.world_size

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Scale gradients in place to a joint 2-norm of at most `max_norm`, by `hocket.dist.clip_grad_norm_`.

        Collective where gradients are sharded. Returns the norm before, a plain scalar equal on all ranks.
        """
        return clip_grad_norm_(parameters, max_norm)

    def reduce_async(self, values: torch.Tensor) -> Reduction:
        """Start a sum of `values` over the data-parallel ranks and return at once; `.wait()` returns the sum.

        Collective. CPU tensors use a gloo group of their own, apart from the gradients.
        """
        return self._group.reduce_async(values)

    def reduce_all_async(self, values: torch.Tensor) -> Reduction:
        """Start a sum of `values` over all ranks of the job, those that share their data included."""
        return self._group.reduce_async(values)

    def close(self) -> None:
        """Leave the process group, if it was made here. Safe to call twice."""
        self._group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

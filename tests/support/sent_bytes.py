"""The bytes that a rank sends by collectives, by the ranks that take part."""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TIMES = {
    "all_gather_into_tensor": None,
    "all_reduce": 2,
    "all_to_all_single": None,
    "allgather_": None,
    "alltoall_base_": None,
    "allreduce_": 2,
    "reduce_scatter_tensor": 1,
    "send": None,
}
"""The operators that are counted, and how often a rank sends each other one its part of what it gives."""


class SentBytes(TorchDispatchMode):
    """Counts the bytes of floating-point numbers that this rank sends within the block.

    Parameters and gradients that `fully_shard` gathers and reduces are left out: it has operators of its own.

    Attributes:
        sent: The bytes by operator and ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[tuple[str, tuple[int, ...]], float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # the collectives within its operators come here by themselves
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name in _TIMES:
            self._count(name, [*args, *(kwargs or {}).values()])
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: list[Any]) -> None:
        is_functional = isinstance(args[-1], str)
        objects = [one for one in args if isinstance(one, torch.ScriptObject)]
        group: dist.ProcessGroup = (
            _resolve_process_group(args[-1]) if is_functional else dist.ProcessGroup.unbox(objects[0])
        )
        has_output = name in ("allgather_", "alltoall_base_")
        given = [one for one in tree_leaves(args[has_output]) if isinstance(one, torch.Tensor)]
        if not all(one.is_floating_point() for one in given):
            return
        size, rank = group.size(), group.rank()
        part = (_TIMES[name] or size) * (size - 1) / size
        if name == "send":
            part = 1
        elif name in ("all_to_all_single", "alltoall_base_"):
            rows = [*(args[2] if is_functional else args[4])] or [1] * size
            part = 1 - rows[rank] / max(sum(rows), 1)
        place = name, tuple(dist.get_process_group_ranks(group))
        self.sent[place] += part * sum(one.nbytes for one in given)

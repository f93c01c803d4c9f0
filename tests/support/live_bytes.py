"""Measures the bytes of live tensors on a CPU, as the allocator does on a GPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages after each operation; `peak` is the highest sum.

    Tensors made before the block do not count, nor does memory that an operation allocates and frees inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, int] = {}
        """A weak reference to each storage by address; no address is reused while its reference exists."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        pytree.tree_map_only(Tensor, self._follow, result)
        self.peak = max(self.peak, self._count())
        return result

    def _follow(self, tensor: Tensor) -> None:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if storage.device.type != "meta" and storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage._weak_ref()

    def _count(self) -> int:
        total = 0
        for address, reference in list(self._storages.items()):
            storage = UntypedStorage._new_with_weak_ptr(reference)
            if storage is None:
                UntypedStorage._free_weak_ref(reference)
                del self._storages[address]
            else:
                total += storage.nbytes()
        return total

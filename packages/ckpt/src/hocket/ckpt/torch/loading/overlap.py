"""Detection of tensors that overlap in memory, which cannot be loaded together."""

from collections.abc import Iterable
from operator import itemgetter
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import torch

from hocket.ckpt.errors import CheckpointStateError

__all__ = ["refuse_overlaps"]

_MAX_COMPARED = 4
"""Limit of exact comparisons per tensor, so that the cost is not quadratic for many interleaved views."""

_MAX_WORK = 10_000
"""Limit of NumPy's search in an exact comparison."""

_Span = tuple[int, int, str, torch.Tensor]
"""A tensor's first address, the address after its last byte, its name, and the tensor."""


def refuse_overlaps(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise if two tensors overlap partially in memory.

    Tensors that cover the same bytes, such as a matrix and its transpose, are accepted, and so are views that
    interleave without a common byte, such as the columns of a matrix.

    Raises:
        CheckpointStateError: Two tensors have some bytes in common, and not all.
    """
    by_device: dict[torch.device, list[_Span]] = {}
    for name, tensor in tensors:
        num_bytes = tensor.nbytes if tensor.is_contiguous() else _span_bytes(tensor)
        if num_bytes:
            begin = tensor.data_ptr()
            by_device.setdefault(tensor.device, []).append((begin, begin + num_bytes, name, tensor))
    for spans in by_device.values():
        spans.sort(key=itemgetter(0))
        farthest = spans[0]
        for number, span in enumerate(spans[1:], 1):
            if span[0] < farthest[1]:
                for other in (*spans[max(0, number - _MAX_COMPARED) : number], farthest):
                    _refuse_overlap(other, span)
            if span[1] > farthest[1]:
                farthest = span


def _refuse_overlap(first: _Span, second: _Span) -> None:
    """Raise if two spans, in the order of their addresses, have common bytes and are not the same."""
    is_apart = first[1] <= second[0] or first[:2] == second[:2]
    if not is_apart and _have_common_bytes(first[3], second[3]):
        raise CheckpointStateError(
            f"`{first[2]}` and `{second[2]}` overlap in memory: what is read into one would overwrite a part "
            "of the other. Load into tensors with memory of their own (`.clone()`), or load one of them only"
        )


def _span_bytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the first item to the end of the last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize


def _have_common_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors with overlapping spans share a byte; False if that takes long to decide."""
    try:
        # NumPy's stubs know two of the values that `max_work` takes.
        return np.shares_memory(_as_array(one), _as_array(other), max_work=_MAX_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False


def _as_array(tensor: torch.Tensor) -> npt.NDArray[np.void]:
    """Return an array with a tensor's address and strides, on any device; its items must not be accessed."""
    interface = {
        "version": 3,
        "data": (tensor.data_ptr(), False),
        "typestr": f"|V{tensor.itemsize}",
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))

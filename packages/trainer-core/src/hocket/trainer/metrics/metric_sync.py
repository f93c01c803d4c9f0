"""Exact gathering of torchmetrics' states over the data-parallel ranks, with any shapes.

torchmetrics' own gathering uses torch's default process group. It counts a sample several times where
several ranks share the sample (tensor parallelism), and fails where a rank without samples has a state of
another shape. This module needs only the all-reduce of `Parallelism.reduce_async` (see `rank_gather`).
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

import torch

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.protocols import Parallelism
from hocket.trainer.ranks.rank_gather import gather_async, sum_slots

if TYPE_CHECKING:
    from torchmetrics import Metric

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_MAX_DIMS = 8
# Some backends sum neither booleans nor small floats.
_SUMMED_AS = {
    torch.bool: torch.uint8,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int16: torch.int32,
    torch.int8: torch.int32,
}


def sync_by(metric: Metric, parallelism: Parallelism) -> None:
    """Make `metric.compute()` gather its state over the ranks of `parallelism`; it is then collective.

    A metric that was made with a `dist_sync_fn` or `process_group` of its own keeps it.
    """
    size = parallelism.data_parallel[1]
    switch = _SyncSwitch()

    def gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:  # noqa: ARG001 - torchmetrics'
        return gather_tensor(tensor, parallelism)

    def is_distributed() -> bool:
        return size > 1 and switch.is_on

    parts: list[Any] = list(metric.modules())
    for part in parts:
        if hasattr(part, "dist_sync_fn") and part.dist_sync_fn is None and part.process_group is None:
            part.dist_sync_fn, part.distributed_available_fn = gather, is_distributed
            part.sync_switch = switch


class _SyncSwitch:
    """A switch for gathering a metric's state over the ranks in `compute`."""

    is_on = True


@contextlib.contextmanager
def without_sync(metrics: Mapping[str, Metric]) -> Iterator[None]:
    """Make metrics compute from this rank's samples alone, without a collective."""
    parts = [part for metric in metrics.values() for part in metric.modules()]
    switches = [switch for part in parts if (switch := getattr(part, "sync_switch", None)) is not None]
    for switch in switches:
        switch.is_on = False
    try:
        yield
    finally:
        for switch in switches:
            switch.is_on = True


def forget_value(metric: Metric) -> None:
    """Clear a metric's cached value, so that it is computed again, over other ranks than before."""
    parts: list[Any] = list(metric.modules())
    for part in parts:
        if hasattr(part, "_computed"):
            part._computed = None


def gather_tensor(tensor: torch.Tensor, parallelism: Parallelism) -> list[torch.Tensor]:
    """Return the tensors of all data-parallel ranks, in rank order. Collective and blocking.

    Shapes may differ. The empty tensor of a rank may have any dtype and number of dims; it is returned with
    the dtype and the number of dims of the other ranks.

    Args:
        tensor: This rank's tensor, of at most 8 dims.
        parallelism: The parallelism of the ranks.
    """
    rank, size = parallelism.data_parallel
    if size == 1:
        return [tensor]
    # Every rank's dtype, number of dims and shape; ints are exact in float64.
    facts = (_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *[0] * (_MAX_DIMS - tensor.dim()))
    rows = [[int(number) for number in row] for row in gather_async(facts, parallelism).read()]
    shapes = [tuple(row[2 : 2 + row[1]]) for row in rows]
    lengths = [math.prod(shape) for shape in shapes]
    full = next((index for index, length in enumerate(lengths) if length), None)
    if full is None:
        return [tensor] * size
    dtype = _DTYPES[rows[full][0]]
    summed_as = _SUMMED_AS.get(dtype, dtype)
    starts = [sum(lengths[:index]) for index in range(size)]
    own = tensor.detach().reshape(-1).to(summed_as)
    flat = sum_slots(own, parallelism, start=starts[rank], total=sum(lengths)).wait().to(dtype)
    empty = (0, *shapes[full][1:])
    return [
        flat[start : start + length].reshape(shape if length else empty)
        for start, length, shape in zip(starts, lengths, shapes, strict=True)
    ]


def compute_metrics(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Compute metrics over all ranks, as tensors on the device. Collective with several ranks.

    A metric whose result is a dict gives an entry for each of its keys, `<Name>/<key>`.

    Raises:
        TrainerConfigError: If the result of a metric is a tuple or a list.
    """
    values: dict[str, Any] = {}
    with warnings.catch_warnings():
        # A rank without samples computes from the samples of the other ranks.
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric", category=UserWarning)
        for name, metric in metrics.items():
            value = metric.compute()
            if isinstance(value, (tuple, list)):
                raise _several_values(name, metric)
            if isinstance(value, Mapping):
                values.update({f"{name}/{key}": part for key, part in value.items()})
            else:
                values[name] = value
    return values


def check_values(metrics: Mapping[str, Metric]) -> None:
    """Refuse a metric whose `compute` states that it returns a tuple or a list.

    Raises:
        TrainerConfigError: If there is such a metric.
    """
    for name, metric in metrics.items():
        if any(_returns_several(one) for one in (metric, *metric.children())):
            raise _several_values(name, metric)


def _returns_several(metric: Any) -> bool:
    try:
        stated = get_type_hints(type(metric).compute).get("return")
    except (NameError, TypeError, AttributeError):
        return False
    options = get_args(stated) if get_origin(stated) in (Union, UnionType) else (stated,)
    return all((get_origin(option) or option) in (tuple, list) for option in options)


def _several_values(name: str, metric: Any) -> TrainerConfigError:
    return TrainerConfigError(
        f"the metric `{name}`, a `{type(metric).__name__}`, has several values: its `compute` returns a "
        "tuple or a list; expected a number, a tensor or a dict of them. Return a dict, whose entries are "
        f"logged as `{name}/<key>`, or one of the values"
    )


def copy_metric(metric: Metric, device: torch.device, parallelism: Parallelism) -> Metric:
    """Return an empty copy of a metric on `device` that gathers over the ranks of `parallelism`."""
    copied_metric: Metric = copy.deepcopy(metric)
    if device.type == "mps":  # no float64 on MPS
        copied_metric.set_dtype(torch.float32)
    copied_metric = copied_metric.to(device)
    copied_metric.reset()
    sync_by(copied_metric, parallelism)
    return copied_metric

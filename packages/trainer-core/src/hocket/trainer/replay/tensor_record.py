"""Measurements of the tensors of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from hocket.trainer.ranks.sharded_tensors import local_part
from hocket.trainer.ranks.tensor_digest import digest

Kind = Literal[
    "batch",
    "parameter",
    "buffer",
    "activation",
    "loss",
    "gradient of activation",
    "gradient",
    "updated parameter",
    "optimizer state",
]
"""What a tensor is of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """What is kept of a tensor of a step: this rank's part of it, in numbers."""

    kind: Kind
    name: str
    """The name of the parameter, of the module whose output it is, or the path in the batch."""
    norm: float
    """The 2-norm; of a sharded parameter or gradient, that of the whole."""
    num_nan: int
    num_inf: int
    num: int
    """Number of elements."""
    digest: int
    """A number that, barring collisions, changes with any bit."""

    @property
    def is_finite(self) -> bool:
        """Whether all elements are finite."""
        return not self.num_nan + self.num_inf

    def __str__(self) -> str:
        if self.kind == "loss":
            return "the loss"
        return f"{self.kind} `{self.name or '(the whole model)'}`"


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """The tensors of a step on one rank, in the order in which they were computed."""

    step: int
    rank: int
    tensors: list[TensorRecord] = field(default_factory=list)
    loss: float | None = None
    """The mean loss of the global batch; None for a step without one."""
    notices: list[str] = field(default_factory=list)
    """Sentences about what was not measured."""

    def first_nonfinite(self) -> tuple[int, TensorRecord] | None:
        """Return the first tensor that is not finite, with its number; None if all are finite.

        The loss is recorded after the backward pass, and counts as computed before it.
        """
        bad = [(index, one) for index, one in enumerate(self.tensors) if not one.is_finite]
        if not bad:
            return None
        first = bad[0]
        if first[1].kind in ("gradient of activation", "gradient"):
            return next(((first[0], one) for _, one in bad if one.kind == "loss"), first)
        return first


def measure(kind: Kind, name: str, tensor: Tensor, *, norm: float | None = None) -> TensorRecord | None:
    """Measure this rank's part of a tensor; None for one without data. Waits for the device.

    Args:
        kind: What the tensor is of the step.
        name: Its name.
        tensor: The tensor, which is not changed.
        norm: The norm of the whole, if the tensor is sharded.
    """
    with torch.no_grad():
        local: Tensor = local_part(tensor.detach())
        if local.is_meta or local.is_quantized:
            return None
        if local.is_nested:
            local = local.values()
        if local.layout is not torch.strided:
            local = local.coalesce().values() if local.layout is torch.sparse_coo else local.to_dense()
        if local.device.type == "mps":
            local = local.cpu()  # no float64 on MPS
        local = local.resolve_conj().resolve_neg()
        numbers = torch.view_as_real(local) if local.is_complex() else local
        num_nan = num_inf = 0
        if numbers.is_floating_point():
            # Dtypes of one byte have few operations of their own.
            numbers = numbers.float() if numbers.itemsize == 1 else numbers
            num_nan, num_inf = int(numbers.isnan().sum()), int(numbers.isinf().sum())
        if norm is None:
            norm = float(torch.linalg.vector_norm(_as_floating(numbers), dtype=torch.float64))
        return TensorRecord(
            kind=kind,
            name=name,
            norm=norm,
            num_nan=num_nan,
            num_inf=num_inf,
            num=local.numel(),
            digest=digest(local),
        )


def _as_floating(numbers: Tensor) -> Tensor:
    return numbers if numbers.is_floating_point() else numbers.double()

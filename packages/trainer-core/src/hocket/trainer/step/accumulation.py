"""Microbatches: the split of a batch, and loss weights that make the result independent of the split.

Let r run over the D data-parallel ranks and m over the microbatches of a rank. n_rm is the loss weight of
microbatch m on rank r: the number of its samples, or of its labels that are not ignored. The loss of the
global batch is the mean over all samples (or labels) i, with N = Σ_r Σ_m n_rm:

    L = 1/N · Σ_r Σ_m Σ_i ℓ_i

A model returns the mean over a microbatch, loss_rm = 1/n_rm · Σ_i ℓ_i, and gradients are *averaged* over
ranks: g = 1/D · Σ_r g_r, where g_r is the sum over the backward passes of rank r. So each microbatch's loss
is multiplied by

    D · n_rm / N

before its backward pass: g = 1/D · Σ_r Σ_m D · n_rm/N · ∇(1/n_rm Σ_i ℓ_i) = 1/N · Σ_r Σ_m Σ_i ∇ℓ_i = ∇L,
whatever the sizes of microbatches and of ranks' batches. N is known before the first forward pass, since
the batch's weights are host numbers that the ranks summed when they fetched it.

A model that returns a `LossSum` gives Σ_i ℓ_i and n_rm itself, and this n_rm may be known only on the
device. In that case each sum is multiplied by D/N with the N above, which only keeps it in range. Once the
gradients are whole, they are multiplied by N/N', where N' = Σ_r Σ_m n_rm uses the model's weights. N' takes
one more small all-reduce, and the host never reads it.

A loss that is a sum over its samples has no n_rm and no N: each microbatch's sum is multiplied by D, and the
sums are added.

A microbatch without weight (padding of a short tail, or all labels ignored) still runs, because its rank
must take part in the step's collectives, and adds exactly zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch

from hocket.trainer.data.batch_tree import tensors
from hocket.trainer.data.data_spec import DataSpec
from hocket.trainer.data.prefetch import DeviceBatch
from hocket.trainer.models.base import LossSum
from hocket.trainer.protocols import Parallelism, Work
from hocket.trainer.ranks.sharded_tensors import local_part
from hocket.trainer.ranks.step_sync import GlobalStep
from hocket.trainer.step.losses.loss_parts import TINY

Weight: TypeAlias = float | torch.Tensor
"""The loss weight of a microbatch: a host number, or a scalar tensor where it is known only on the device."""


class Microbatch(NamedTuple):
    """A part of a rank's batch."""

    batch: Any
    weight: Weight
    is_counted: bool
    """Whether it has samples of its own; False if it only keeps this rank in step with the other ranks."""
    is_last: bool


def microbatches(
    batch: Any, facts: DeviceBatch, step: GlobalStep, *, size: int | None, spec: DataSpec
) -> Iterator[Microbatch]:
    """Yield the microbatches of a rank's batch.

    Every rank yields as many as the rank with the largest batch needs, because all ranks take part in the
    collectives of a pass. A rank with fewer samples repeats its last sample, with weight 0.

    Args:
        batch: The rank's batch, on the device.
        facts: The rows of the batch and their loss weights.
        step: The facts about the global batch.
        size: Number of samples in a microbatch; None for all of them.
        spec: Slices the batch.
    """
    num, samples = num_microbatches(step, size), facts.samples
    if num == 1 or size is None:
        transformed = spec.transform_microbatch(batch)
        yield Microbatch(transformed, weight_of(facts, 0, samples), facts.counted > 0, True)
        return
    size = max(size, -(-samples // num))
    for index in range(num):
        start = min(index * size, samples)
        stop = min(start + size, samples)
        is_counted = start < min(stop, facts.counted)
        weight: Weight
        if start == stop:
            start, weight = samples - 1, 0.0
        else:
            weight = weight_of(facts, start, stop)
        part = spec.transform_microbatch(spec.split(batch, start, stop, num_samples=samples))
        yield Microbatch(part, weight, is_counted, index == num - 1)


def num_microbatches(step: GlobalStep, size: int | None) -> int:
    """Return the number of microbatches of at most `size` samples that every rank makes of its batch."""
    return 1 if size is None else -(-step.most_samples // size)


def first_microbatch(facts: DeviceBatch, step: GlobalStep, size: int | None) -> int:
    """Return the number of samples of the first microbatch of a rank's batch."""
    if size is None:
        return facts.samples
    return min(max(size, -(-facts.samples // num_microbatches(step, size))), facts.samples)


def weight_of(facts: DeviceBatch, start: int, stop: int) -> Weight:
    """Return the loss weight of the rows `start` to `stop - 1` of a rank's batch."""
    weights = facts.weights
    if weights is None:
        return facts.weight if stop - start == facts.samples else float(stop - start)
    if isinstance(weights, torch.Tensor):
        return weights[start:stop].sum()
    return float(sum(weights[start:stop]))


class LossMean:
    """The mean loss of one global batch, added up from the losses of its microbatches.

    Args:
        step: Provides N, the loss weight of the global batch.
        parallelism: Provides D and the sum over ranks.
        is_sum: Whether the loss is a sum over the batch and not a mean.

    Attributes:
        is_sum: The argument.
        total_weight: N.
    """

    __slots__ = (
        "_given_weight",
        "_is_alone",
        "_num_ranks",
        "_parallelism",
        "_part",
        "_summed",
        "is_sum",
        "total_weight",
    )

    def __init__(self, step: GlobalStep, parallelism: Parallelism, *, is_sum: bool = False) -> None:
        self._parallelism = parallelism
        self.is_sum = is_sum
        self._num_ranks = num_ranks = parallelism.data_parallel[1]
        self._is_alone = num_ranks == 1
        self.total_weight = step.weight
        self._part: torch.Tensor | None = None
        self._given_weight: torch.Tensor | None = None
        self._summed: Work | None = None

    @property
    def needs_correction(self) -> bool:
        """Whether the gradients have to be corrected once they are whole, because the model gave sums."""
        return self._given_weight is not None

    @property
    def has_parts(self) -> bool:
        """Whether a microbatch's loss was added."""
        return self._part is not None

    def share_of(self, loss: torch.Tensor | LossSum, weight: Weight, outputs: Any = None) -> torch.Tensor:
        """Return the scalar to call `backward` on for a microbatch; the module's docstring derives it.

        Args:
            loss: The return value of the model's `loss`.
            weight: The microbatch's loss weight.
            outputs: The return value of the model's `forward`.
        """
        if (
            self._is_alone
            and type(weight) is float
            and weight == self.total_weight
            and weight
            and type(loss) is torch.Tensor
            and self._part is None
        ):
            # The common case: one microbatch in one process is the whole mean.
            self._part = loss.detach()
            return loss
        if isinstance(weight, torch.Tensor):
            # The weight is known only on the device, so the mean becomes a sum, as a model may give it.
            if not isinstance(loss, LossSum):
                # The mean over no label is NaN.
                _pass_gradients_of(outputs, weight > 0)
                loss = LossSum(torch.where(weight > 0, loss, 0.0) * weight, weight)
            weight = 1.0
        share = weight / self.total_weight if self.total_weight else 0.0
        if isinstance(loss, LossSum):
            share = 1.0 / self.total_weight if weight else 0.0
            self._add_given(loss, weight)
            loss = loss.total
        if share == 0.0:
            loss, share = _nothing(loss, outputs), 1.0
        part = loss.detach() if share == 1.0 else loss.detach() * share
        self._part = part if self._part is None else self._part + part
        scale = share * self._num_ranks
        return loss if scale == 1.0 else loss * scale

    def _add_given(self, loss: LossSum, weight: float) -> None:
        given_weight = torch.as_tensor(loss.weight, dtype=torch.float32, device=loss.total.device).detach()
        given_weight = given_weight if weight else torch.zeros_like(given_weight)
        self._given_weight = given_weight if self._given_weight is None else self._given_weight + given_weight

    def numbers(self, device: torch.device) -> torch.Tensor:
        """Return the mean and the given weight so far, zeros where there are none: two numbers in float64."""
        numbers = [self._part, self._given_weight]
        return torch.stack(
            [torch.zeros((), device=device) if one is None else one.to(device).reshape(()) for one in numbers]
        ).double()

    def take_numbers(self, numbers: torch.Tensor, *, gives_sums: bool) -> None:
        """Take the return value of `numbers` on another rank, which computed the losses.

        Args:
            numbers: The mean and the given weight.
            gives_sums: Whether the model gave sums.
        """
        self._part, self._given_weight = numbers[0].float(), numbers[1].float() if gives_sums else None

    def correct(self, parameters: Iterable[torch.Tensor]) -> None:
        """Scale the gradients to those of the mean if the model gave sums; call it when they are whole.

        On several ranks, with sums, this is the only collective of the step that the device waits for.
        """
        if self._given_weight is None:
            return
        assert self._part is not None
        self._summed = self._parallelism.reduce_async(_for_reduction(self._part, self._given_weight))
        correction = self.total_weight / self._summed.wait()[1].clamp(min=TINY)
        gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, correction.to(torch.float32))

    def of_this_rank(self, weight: float) -> torch.Tensor:
        """Return the mean over this rank's part of the batch, of weight `weight`: a scalar on the device."""
        assert self._part is not None
        if self.is_sum:
            return self._part
        if self._given_weight is not None:
            return self._part * self.total_weight / self._given_weight.clamp(min=TINY)
        return self._part if weight in (self.total_weight, 0.0) else self._part * (self.total_weight / weight)

    @staticmethod
    def plain(loss: torch.Tensor, parallelism: Parallelism) -> Work | torch.Tensor:
        """Return the plain mean of a scalar over the ranks, or a handle on it. Collective."""
        num_ranks = parallelism.data_parallel[1]
        if num_ranks == 1:
            return loss
        return _Only(parallelism.reduce_async(_for_reduction(loss / num_ranks)))

    def over_ranks(self) -> Work | torch.Tensor:
        """Return the mean over the global batch: a scalar, or a handle to wait on later. Collective."""
        assert self._part is not None
        if self._summed is not None:
            return _Ratio(self._summed, self.total_weight)
        if self._num_ranks == 1:
            return self._part
        return _Only(self._parallelism.reduce_async(_for_reduction(self._part)))


def _nothing(loss: torch.Tensor, outputs: Any) -> torch.Tensor:
    """Return a scalar zero whose backward pass gives gradients of zero to all that the loss depends on.

    The mean over nothing is NaN, and so are its gradients at any scale. So nothing is multiplied by zero:
    zeros start the backward pass, and take the place of the gradients that the outputs get from the loss.
    """
    parts = [part for part in tensors(outputs) if part.requires_grad]
    for part in parts:
        if part is not loss:
            part.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
    zero: torch.Tensor = _Zero.apply(loss, *parts)
    return zero


class _Zero(torch.autograd.Function):
    """A zero that depends on tensors, with gradients of zero."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss, *parts)
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.zeros_like, ctx.saved_tensors))


def _pass_gradients_of(outputs: Any, is_counted: torch.Tensor) -> None:
    """Replace the gradients that outputs get from a loss by zeros, if a flag on the device is false."""
    for part in tensors(outputs):
        if part.requires_grad and part.dim():
            part.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: torch.where(is_counted, gradient, 0.0)
            )


def _for_reduction(*scalars: torch.Tensor) -> torch.Tensor:
    stacked = torch.stack(scalars)
    return stacked.double() if stacked.device.type == "cpu" else stacked.float()


class _Ratio:
    """The mean of a batch whose model gave sums: (Σ total / N) · N / N'."""

    def __init__(self, summed: Work, total_weight: float) -> None:
        self._summed = summed
        self._total_weight = total_weight

    def wait(self) -> torch.Tensor:
        part, weight = self._summed.wait().unbind()
        return part * self._total_weight / weight.clamp(min=TINY)


class _Only:
    """A reduction of one number."""

    def __init__(self, summed: Work) -> None:
        self._summed = summed

    def wait(self) -> torch.Tensor:
        return self._summed.wait()[0]

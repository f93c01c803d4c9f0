"""Microbatches: how a batch is split, and how losses are weighted so that the split does not matter.

Let r be the data-parallel ranks (D of them), m the microbatches of a rank, and n_rm what the samples of
microbatch m on rank r weigh in the loss: samples, or those of their labels that are not ignored. The loss
of the global batch is the mean over all of them, with N = Σ_r Σ_m n_rm:

    L = 1/N · Σ_r Σ_m Σ_i ℓ_i

A model returns the mean over a microbatch, loss_rm = 1/n_rm · Σ_i ℓ_i, and gradients are *averaged* over
ranks: g = 1/D · Σ_r g_r. A rank's g_r sums up what its backward passes add. So with each microbatch's loss
times

    D · n_rm / N

before its backward pass, g = 1/D · Σ_r Σ_m D · n_rm/N · ∇(1/n_rm Σ_i ℓ_i) = 1/N · Σ_r Σ_m Σ_i ∇ℓ_i = ∇L,
whatever the sizes of microbatches and of ranks' batches. N is known before the first forward pass, since
the batch's weights are host numbers that the ranks summed when they fetched it.

A model that returns a `LossSum` gives Σ_i ℓ_i and n_rm itself, and its n_rm may be known to the device
alone. There each sum is multiplied by D/N with the N above, which only keeps it in range, and the gradients
by N/N' once they are whole, where N' = Σ_r Σ_m n_rm as the model gave it is one more small sum over ranks,
and a number that the host never sees.

A microbatch without weight (padding of a short tail, or all labels ignored) still runs, because its rank
must take part in the step's collectives, and adds exactly zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from hocket.trainer.agreement import Agreed
from hocket.trainer.data_spec import DataSpec
from hocket.trainer.feeding import Fed
from hocket.trainer.models.base import LossSum
from hocket.trainer.parallelism import DoneWork
from hocket.trainer.protocols import Parallelism, Work


def microbatches(
    batch: Any, fed: Fed, agreed: Agreed, *, size: int | None, spec: DataSpec, samples: int
) -> Iterator[tuple[Any, float, bool]]:
    """Split a rank's batch; yields microbatches, what they weigh, and whether each is the last.

    Every rank makes as many as the rank with the largest batch needs, since each takes part in the
    collectives of a pass; one with fewer samples repeats its last one, without weight.

    Args:
        batch: On the device.
        fed: Its samples' weights.
        agreed: Of its global batch.
        size: Samples in a microbatch; None for all of them.
        spec: How to slice.
        samples: Rows in `batch`: as fetched, unless an algorithm changed them.
    """
    num = 1 if size is None else -(-agreed.most_samples // size)
    if num == 1:
        yield batch, fed.weight, True
        return
    assert size is not None
    size = max(size, -(-samples // num))
    for index in range(num):
        start = min(index * size, samples)
        stop = min(start + size, samples)
        if start == stop:
            yield spec.split(batch, samples - 1, samples), 0.0, index == num - 1
        else:
            yield spec.split(batch, start, stop), _weight(fed, start, stop, samples), index == num - 1


def _weight(fed: Fed, start: int, stop: int, samples: int) -> float:
    if samples != fed.samples:
        # An algorithm made another number of samples of the batch: they share its weight evenly.
        return fed.weight * (stop - start) / samples
    return float(stop - start) if fed.weights is None else float(sum(fed.weights[start:stop]))


class LossMean:
    """The mean loss of one global batch, as its microbatches' losses come in.

    Args:
        agreed: N, what the global batch weighs.
        parallelism: D, and the sum over ranks.
    """

    def __init__(self, agreed: Agreed, parallelism: Parallelism) -> None:
        self._parallelism = parallelism
        self._num_ranks = parallelism.data_parallel[1]
        self._total_weight = agreed.weight
        self._part: torch.Tensor | None = None
        self._given_weight: torch.Tensor | None = None
        self._summed: Work | None = None

    def share_of(self, loss: torch.Tensor | LossSum, weight: float, outputs: Any = None) -> torch.Tensor:
        """The scalar to call `backward` on for a microbatch that weighs `weight`; the module says why.

        Args:
            loss: What the model's `loss` returned.
            weight: Of the microbatch, on the host.
            outputs: What its `forward` returned.
        """
        share = weight / self._total_weight if self._total_weight else 0.0
        if isinstance(loss, LossSum):
            share = 1.0 / self._total_weight if weight else 0.0
            self._add_given(loss, weight)
            loss = loss.total
        if share == 0.0:
            loss, share = _nothing(loss, outputs), 1.0
        part = loss.detach() if share == 1.0 else loss.detach() * share
        self._part = part if self._part is None else self._part + part
        scale = share * self._num_ranks
        return loss if scale == 1.0 else loss * scale

    def _add_given(self, loss: LossSum, weight: float) -> None:
        given = torch.as_tensor(loss.weight, dtype=torch.float32, device=loss.total.device).detach()
        given = given if weight else torch.zeros_like(given)
        self._given_weight = given if self._given_weight is None else self._given_weight + given

    def correct(self, parameters: Iterable[torch.Tensor]) -> None:
        """Make the gradients those of the mean, when the model gave sums; call it when they are whole.

        With several ranks and sums this is the step's one collective that the device waits for.
        """
        if self._given_weight is None:
            return
        assert self._part is not None
        self._summed = self._parallelism.reduce_async(_for_reduction(self._part, self._given_weight))
        correction = self._total_weight / self._summed.wait()[1].clamp(min=_TINY)
        gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, correction.to(torch.float32))

    def of_this_rank(self, weight: float) -> torch.Tensor:
        """The mean over this rank's part of the batch, which weighs `weight`: a scalar on the device."""
        assert self._part is not None
        if self._given_weight is not None:
            return self._part * self._total_weight / self._given_weight.clamp(min=_TINY)
        return (
            self._part if weight in (self._total_weight, 0.0) else self._part * (self._total_weight / weight)
        )

    def over_ranks(self) -> Work:
        """The mean over the global batch, a scalar, as a handle that need not be waited for. Collective."""
        assert self._part is not None
        if self._summed is not None:
            return _Ratio(self._summed, self._total_weight)
        if self._num_ranks == 1:
            return DoneWork(self._part)
        return _Only(self._parallelism.reduce_async(_for_reduction(self._part)))


def _nothing(loss: torch.Tensor, outputs: Any) -> torch.Tensor:
    """A scalar zero that goes back through the model with gradients of zero.

    It goes back from the outputs, because a mean over nothing is not a number, and its gradients would not be
    zero however it were scaled.
    """
    zeros = [(part * 0.0).sum() for part in _with_gradients(outputs)]
    return torch.stack(zeros).sum() if zeros else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0


def _with_gradients(part: Any) -> Iterator[torch.Tensor]:
    if isinstance(part, torch.Tensor):
        if part.requires_grad:
            yield part
    elif isinstance(part, Mapping):
        for value in part.values():
            yield from _with_gradients(value)
    elif isinstance(part, (tuple, list)):
        for value in part:
            yield from _with_gradients(value)


def local_part(tensor: Any) -> torch.Tensor:
    """The part of a sharded tensor that this rank holds; a plain tensor itself."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _for_reduction(*scalars: torch.Tensor) -> torch.Tensor:
    stacked = torch.stack(scalars)
    return stacked.double() if stacked.device.type == "cpu" else stacked.float()


_TINY = 1e-30  # keeps a batch without weight from dividing by zero: its sums are zero


class _Ratio:
    """The mean of a batch whose model gave sums: (Σ total / N) · N / N'."""

    def __init__(self, summed: Work, total_weight: float) -> None:
        self._summed = summed
        self._total_weight = total_weight

    def wait(self) -> torch.Tensor:
        part, weight = self._summed.wait().unbind()
        return part * self._total_weight / weight.clamp(min=_TINY)


class _Only:
    """A reduction of one number."""

    def __init__(self, summed: Work) -> None:
        self._summed = summed

    def wait(self) -> torch.Tensor:
        return self._summed.wait()[0]

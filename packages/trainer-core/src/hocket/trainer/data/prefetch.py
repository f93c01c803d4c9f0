"""A prefetcher that fetches batches from a data loader, counts them and copies them to the device.

This module does not depend on ranks, steps or checkpoints.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from hocket.trainer.data.batch_tree import map_tensors, tensors
from hocket.trainer.data.data_spec import DataSpec
from hocket.trainer.data.worker_deadline import explain, iterate
from hocket.trainer.errors import DataError

_END = object()
_SEQUENCES = (list, tuple)
_EMPTY = "the data loader yielded a batch without samples; expected at least 1 in each batch"


@dataclass(slots=True)
class DeviceBatch:
    """A batch on the device, with its counts."""

    batch: Any
    samples: int
    """Rows of this rank's batch."""
    counted: int
    """Rows with a share in the global batch; the others are padding of a short last batch."""
    tokens: int
    weights: Sequence[float] | torch.Tensor | None
    """The loss weight of each row: host numbers, or a device tensor `(samples,)` where labels are on a
    device; None where each row weighs 1."""
    weight: float
    """The summed loss weight; the number of counted rows where `weights` is a device tensor."""
    arrival: torch.cuda.Event | None = None
    """Recorded when the copy to the device is done; None where there is no copy to wait for."""
    global_step: Any = None
    """The cached facts about the global batch in a job of one process; None before their first use."""


_NO_RECORD = DeviceBatch(None, 0, 0, 0, None, 0.0)


class BatchPrefetcher:
    """A prefetcher of at most `depth` batches.

    Copies to a CUDA device run on a stream of their own and do not block the host where the batch is pinned.

    Args:
        spec: The data loader, with the functions that count its batches.
        device: The device to copy to.
        depth: Number of batches that `fetch` keeps ahead.
        max_batches: Number of batches after which an epoch ends; None for all of them.
        timeout_s: Seconds that a loader's workers may take for a batch; None for no deadline.
    """

    def __init__(
        self,
        spec: DataSpec,
        *,
        device: torch.device,
        depth: int = 1,
        max_batches: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.loader: Any = spec.dataloader
        self.depth = max(depth, 1)
        self.max_batches = max_batches
        self._timeout_s = timeout_s
        self.next_batch: Callable[[Iterator[Any], Any], Any] = next
        """The function that fetches from the loader; a profiler replaces it with a timed one."""
        self._device = device
        self._share = getattr(self.loader, "batch_share", None)
        self._copies = device.type != "cpu"
        self._to_device = methodcaller("to", device, non_blocking=True)
        self.use_spec(spec)
        self.reuses_records = False
        """Whether a record is reused for the second batch after its own, if that batch has as many rows."""
        self.is_started = False
        """Whether an epoch is in progress."""
        self._iterator: Iterator[Any] | None = None
        self._num_fetched = 0
        self._ahead: deque[DeviceBatch | None] = deque()
        self._stream = (
            torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        )

    def use_spec(self, spec: DataSpec) -> None:
        """Count the batches that are fetched from now on by another specification of the same loader."""
        self.spec = spec
        # Then the number of rows is the only count that most batches need.
        self._counts_rows = self._share is None and spec.counts_plainly()
        self._only_counts_rows = self._counts_rows and spec.batch_transforms is None and not self._copies
        self._record = self._spare = _NO_RECORD

    @property
    def num_ahead(self) -> int:
        """The number of fetched batches that `next` has not returned; the end of an epoch counts as one."""
        return len(self._ahead)

    def start(self, epoch: int = 0, *, skip: int = 0, counts: bool = False, loader: Any = None) -> int:
        """Begin an epoch: set its number on samplers and data set, then fetch and discard `skip` batches.

        Args:
            epoch: Number of the epoch.
            skip: Number of batches to discard.
            counts: Whether to count the samples of the discarded batches.
            loader: A copy of the loader for this epoch, which begins within it.

        Returns:
            Number of the counted samples that have a share in their global batch.

        Raises:
            DataError: If the loader has fewer than `skip` batches.
        """
        # A loader that plans for the whole job sets the epoch of its data set by itself.
        parts = () if hasattr(self.loader, "data_parallel") else ("sampler", "batch_sampler", "dataset")
        for part in parts:
            if callable(set_epoch := getattr(getattr(self.loader, part, None), "set_epoch", None)):
                set_epoch(epoch)
        self._ahead.clear()
        self._iterator = iterate(self.loader if loader is None else loader, self._timeout_s, epoch=epoch)
        self.is_started = True
        self._num_fetched, num_samples = skip, 0
        for index in range(skip):
            batch = next(self._iterator, _END)
            if counts and batch is not _END:
                share = None if self._share is None else self._share()[0]
                num_samples += count(self.spec, self.spec.transform(batch), share).counted
            if batch is _END:
                raise DataError(
                    f"the data loader ended after {index} batches of an epoch of which {skip} were trained "
                    "on before; resume with the same data and batch size"
                )
        return num_samples

    @property
    def is_cut(self) -> bool:
        """Whether `max_batches` ended the epoch, and not the loader."""
        return self._num_fetched == self.max_batches

    def continue_at(self, num_batches: int) -> None:
        """Set the number of batches of the epoch that the loader skips by its own restored state."""
        self._num_fetched = num_batches

    def fetch(self) -> None:
        """Fetch one more batch, unless `depth` batches are ahead or the epoch has ended."""
        if len(self._ahead) < self.depth and not (self._ahead and self._ahead[-1] is None):
            self._ahead.append(self.fetch_now())

    def next(self) -> DeviceBatch | None:
        """Return the next batch, ready on the current stream; None at the end of the epoch."""
        batch = self._ahead.popleft() if self._ahead else self.fetch_now()
        if batch is not None and batch.arrival is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(batch.arrival)
            for tensor in tensors(batch.batch):
                if tensor.is_cuda:  # the CUDA allocator must not reuse its memory before `stream` has read it
                    tensor.record_stream(stream)
        return batch

    def discard(self, limit: int) -> None:
        """Fetch and drop the rest of the epoch, at most `limit` batches."""
        self._ahead.clear()
        for _ in range(limit if self._iterator is not None else 0):
            assert self._iterator is not None
            if next(self._iterator, _END) is _END:
                return

    def stop(self) -> None:
        """Release the loader's iterator with its workers, and drop batches that are ahead."""
        self._ahead.clear()
        self._iterator = None
        self.is_started = False

    @property
    def is_immediate(self) -> bool:
        """Whether `next` is the same as `fetch_now`, because no batch is fetched ahead of it or copied."""
        return self.depth == 1 and not self._copies

    def fetch_now(self) -> DeviceBatch | None:
        """Fetch and return the batch after those that are ahead; None at the end of the epoch."""
        iterator: Any = self._iterator
        if self._num_fetched == self.max_batches:
            return None
        try:
            batch = self.next_batch(iterator, _END)
        except RuntimeError as error:
            if (explained := explain(error, iterator)) is error:
                raise
            raise explained from error
        if batch is _END:
            return None
        self._num_fetched += 1
        if self._only_counts_rows and type(batch) in _SEQUENCES and len(batch) == 2:
            # Most batches are pairs of tensors, whose rows are compared here to save a function call.
            first, second = batch
            if type(first) is type(second) is Tensor and (shape := first.shape) and (other := second.shape):
                samples = shape[0]
                if samples == other[0] and samples:
                    record = self._spare
                    if record.samples == samples and self.reuses_records:
                        record.batch = batch
                    else:
                        record = DeviceBatch(batch, samples, samples, 0, None, samples * 1.0)
                    self._spare, self._record = self._record, record
                    return record
        if self.spec.batch_transforms is not None:
            batch = self.spec.batch_transforms(batch)
        if self._counts_rows and (type(batch) is list or type(batch) is tuple):
            samples = self.spec.count_samples(batch)
            if samples < 1:
                raise DataError(_EMPTY)
            record = DeviceBatch(batch, samples, samples, 0, None, float(samples))
        else:
            record = count(self.spec, batch, None if self._share is None else self._share()[0])
        if self._copies:
            self._copy(record)
        return record

    def _copy(self, record: DeviceBatch) -> None:
        """Copy the batch to the device."""
        if self._stream is None:
            record.batch = map_tensors(self._to_device, record.batch)
            return
        with torch.cuda.stream(self._stream):
            record.batch = map_tensors(self._to_device, record.batch)
            record.arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            record.arrival.record(self._stream)


def count(spec: DataSpec, batch: Any, share: int | None = None) -> DeviceBatch:
    """Count the samples, tokens and loss weights of a batch, without waiting for a device.

    Args:
        spec: The data specification with the counting functions.
        batch: The batch, from the loader or an algorithm.
        share: Number of leading rows that count in the global batch; None for all.

    Raises:
        DataError: If the batch has no samples, or if its samples cannot be counted.
    """
    samples = spec.count_samples(batch)
    if samples < 1:
        raise DataError(_EMPTY)
    tokens = spec.count_tokens(batch)
    weights = spec.loss_weights(batch)
    if weights is not None and len(weights) != samples:
        raise DataError(
            f"a batch of {samples} samples has {len(weights)} loss weights; expected one for each sample "
            "from `get_loss_weights` of the `DataSpec`, or from the model's `loss_weights`"
        )
    if share is None or share >= samples:
        if weights is None or isinstance(weights, torch.Tensor):
            return DeviceBatch(batch, samples, samples, tokens, weights, float(samples))
        return DeviceBatch(batch, samples, samples, tokens, weights, float(sum(weights)))
    # Rows beyond the share only keep this rank in step with the other ranks; their weight is 0.
    tokens = tokens * share // samples
    if isinstance(weights, torch.Tensor):
        weights = weights.clone()
        weights[share:] = 0
        return DeviceBatch(batch, samples, share, tokens, weights, float(share))
    weights = [*(weights[:share] if weights else [1.0] * share), *[0.0] * (samples - share)]
    return DeviceBatch(batch, samples, share, tokens, weights, float(sum(weights)))

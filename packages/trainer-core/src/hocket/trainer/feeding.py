"""`Feed`: gets batches from the data loader to the device, one ahead of the step that trains on them."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hocket.trainer.agreement import Agreed, Agreement, PendingAgreement, Said
from hocket.trainer.data_spec import DataSpec
from hocket.trainer.errors import DataError
from hocket.trainer.protocols import Stateful
from hocket.trainer.timestamp import Counts

_NOTHING = object()
# Stands in a batch until the ranks are told of it.
_NOT_TOLD = Agreed(True, False, 0, 0, 0.0, 0, None)


@dataclass(slots=True)
class Fed:
    """A batch on its way to its step."""

    batch: Any
    samples: int
    """Rows of this rank's batch."""
    weights: Sequence[float] | None
    """What each row weighs in the loss; None where each weighs 1."""
    weight: float
    """What they weigh together."""
    loader_state: Mapping[str, Any] | None
    """The loader's state as it was just after this batch, whatever was fetched since."""
    pending: Agreed | PendingAgreement
    arrival: torch.cuda.Event | None
    """When the copy to the device is done; None where there is no copy to wait for."""


class Feed:
    """Fetches batches, copies them to the device, and keeps the position that a checkpoint stores.

    A batch is fetched one step ahead (`fetch_ahead`), its copy to a CUDA device runs on a stream of its own,
    and what the ranks agree on about it is under way by then. The loop does not fetch ahead of a checkpoint
    that is due, so that a loader that draws from the process's generators finds them after a resume as it
    would have found them without one.

    A loader that is `Stateful` is resumed by its state. Any other is resumed by fetching the batches that
    were trained on and discarding them, from the generators' state at the epoch's start, so that a shuffle
    comes out the same.

    Args:
        spec: The loader and how to count its batches.
        device: Where batches go.
        agreement: Between the ranks.
        wants_stop: Whether something on this rank wants the training to end.
        counts: What was trained on so far.
        capture_generators: Called before an epoch of a loader that is not `Stateful`; None for never.
    """

    def __init__(
        self,
        spec: DataSpec,
        *,
        device: torch.device,
        agreement: Agreement,
        wants_stop: Callable[[], bool],
        counts: Callable[[], Counts],
        capture_generators: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self.spec = spec
        self.loader: Any = spec.dataloader
        self.is_stateful = isinstance(self.loader, Stateful)
        self.is_epoch_over = False
        """Whether the last `take` found the epoch's data at its end."""
        self.should_stop = False
        """Whether the last `take` brought the ranks' decision to stop."""
        self.epoch_generators: dict[str, Any] | None = None
        """The generators' state before the present epoch's first batch; None between epochs."""
        self._device = device
        self._agreement = agreement
        self._wants_stop = wants_stop
        self._counts = counts
        self._capture_generators = capture_generators
        self._share: Callable[[], tuple[int, int]] | None = getattr(self.loader, "batch_share", None)
        self._iterator: Iterator[Any] | None = None
        self._ahead: Fed | None = None
        self._state = self._loader_state()
        self._num_to_skip = 0
        self._stream = _new_stream(device) if device.type == "cuda" else None

    def take(self) -> tuple[Fed, Agreed] | None:
        """The next batch and what the ranks agreed on about it; None when there is none to train on.

        None means the end of the epoch (`is_epoch_over`), or that the ranks agreed to stop (`should_stop`);
        the batch is then kept for later. Collective when there are several ranks.
        """
        fed = self._ahead or self._fetch()
        self._ahead = None
        agreed = fed.pending.wait()
        self.is_epoch_over = self.should_stop = False
        if agreed.is_end:
            if not self._counts().batch_in_epoch:
                raise DataError(
                    "the data loader yielded no batch in a whole epoch; expected at least 1 (a generator can "
                    "be iterated once only, and more ranks than samples leave some without)"
                )
            if fed.batch is not _NOTHING and self._iterator is not None:
                # An epoch ends on all ranks at once: what a rank has left is passed over.
                collections.deque(self._iterator, maxlen=0)
            self._state = self._loader_state()
            self._iterator = None
            self.epoch_generators = None
            self.is_epoch_over = True
            return None
        if agreed.should_stop:
            agreed.should_stop = False
            self._ahead = fed
            fed.pending = agreed
            self.should_stop = True
            return None
        if fed.arrival is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(fed.arrival)
            _record_stream(fed.batch, stream)
        self._state = fed.loader_state
        return fed, agreed

    def fetch_ahead(self) -> None:
        """Fetch the next batch now, unless it is there already."""
        if self._ahead is None:
            self._ahead = self._fetch()

    def is_at_end(self) -> bool:
        """Whether a rank has no further batch in this epoch, which then ends on all of them. Collective."""
        self.fetch_ahead()
        assert self._ahead is not None
        agreed = self._ahead.pending.wait()
        self._ahead.pending = agreed
        return agreed.is_end and self.take() is None

    def state_dict(self) -> Mapping[str, Any] | None:
        """The loader's state just after the last batch taken, or after the epoch's end, if it has one."""
        return self._state

    def resume(self, state: Mapping[str, Any] | None, *, num_batches: int) -> bool:
        """Go on behind the `num_batches` batches of the epoch that were trained on.

        Args:
            state: What `state_dict` gave; None to fetch and discard instead.
            num_batches: Of the present epoch.

        Returns:
            Whether batches will have to be fetched and discarded.
        """
        self._ahead = self._iterator = None
        if state is not None and self.is_stateful:
            self.loader.load_state_dict(state)
            self._state = state
            return False
        self._num_to_skip = num_batches
        return num_batches > 0

    def skip(self) -> None:
        """Fetch and discard what `resume` left to skip; the caller has set the generators for it."""
        if self._num_to_skip:
            self._start_epoch()

    def close(self) -> None:
        """Let go of the loader's iterator, and so of its workers."""
        self._ahead = self._iterator = None

    def _fetch(self) -> Fed:
        if self._iterator is None:
            self._start_epoch()
        assert self._iterator is not None
        batch = next(self._iterator, _NOTHING)
        state = self._loader_state()
        if batch is _NOTHING:
            return self._tell(Fed(_NOTHING, 0, None, 0.0, state, _NOT_TOLD, None), 0, 0)
        samples = self.spec.num_samples(batch)
        if samples < 1:
            raise DataError(
                "the data loader yielded a batch without samples; expected at least 1 in each batch"
            )
        counted = samples if self._share is None else self._share()[0]
        tokens = self.spec.num_tokens(batch)
        weights = self.spec.loss_weights(batch)
        if counted < samples:
            # A short tail: rows beyond this rank's share are there to keep it in step, and weigh nothing.
            weights = [*(weights[:counted] if weights else [1.0] * counted), *[0.0] * (samples - counted)]
            tokens = tokens * counted // samples
        weight = float(samples) if weights is None else float(sum(weights))
        arrival = None
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                batch = to_device(batch, self._device)
                arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of torch
                arrival.record(self._stream)
        elif self._device.type != "cpu":
            batch = to_device(batch, self._device)
        return self._tell(Fed(batch, samples, weights, weight, state, _NOT_TOLD, arrival), counted, tokens)

    def _tell(self, fed: Fed, counted: int, tokens: int) -> Fed:
        said = Said(
            has_batch=fed.batch is not _NOTHING,
            samples=fed.samples,
            samples_counted=counted,
            tokens=tokens,
            weight=fed.weight,
            wants_stop=self._wants_stop(),
        )
        fed.pending = self._agreement.begin(said, clock_s=time.perf_counter())
        return fed

    def _start_epoch(self) -> None:
        for part in (getattr(self.loader, "sampler", None), getattr(self.loader, "batch_sampler", None)):
            if set_epoch := getattr(part, "set_epoch", None):
                set_epoch(self._counts().epoch)
        if self._capture_generators is not None and not self.is_stateful:
            self.epoch_generators = self._capture_generators()
        self._iterator = iter(self.loader)
        num_to_skip, self._num_to_skip = self._num_to_skip, 0
        for index in range(num_to_skip):
            if next(self._iterator, _NOTHING) is _NOTHING:
                raise DataError(
                    f"the data loader ended after {index} batches of an epoch of which {num_to_skip} were "
                    "trained on before; resume with the same data and batch size"
                )

    def _loader_state(self) -> Mapping[str, Any] | None:
        return self.loader.state_dict() if self.is_stateful else None


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # of torch


def to_device(part: Any, device: torch.device) -> Any:
    """Copy the tensors of a batch to `device`, without waiting where they are pinned; the rest stays."""
    if isinstance(part, torch.Tensor):
        return part.to(device, non_blocking=True)
    if isinstance(part, Mapping):
        return {name: to_device(value, device) for name, value in part.items()}
    if isinstance(part, (tuple, list)):
        items = (to_device(item, device) for item in part)
        return type(part)(*items) if hasattr(part, "_fields") else type(part)(items)
    return part


def _record_stream(part: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that a batch's memory is used on `stream`, too."""
    if isinstance(part, torch.Tensor):
        if part.is_cuda:
            part.record_stream(stream)
    elif isinstance(part, Mapping):
        for value in part.values():
            _record_stream(value, stream)
    elif isinstance(part, (tuple, list)):
        for item in part:
            _record_stream(item, stream)

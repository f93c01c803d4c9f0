"""`DataSpec`: a data loader, with functions that transform, count and split its batches."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any

import torch
from torch.utils.data import Dataset

from hocket.trainer.checks import check_count
from hocket.trainer.data.batches import loss_weights, num_samples, num_tokens, slice_batch
from hocket.trainer.data.loader_checks import LOADER_OF, check_yields_batches, is_sample
from hocket.trainer.errors import DataError, TrainerConfigError


@dataclass(frozen=True, slots=True, repr=False)
class DataSpec:
    """A data loader with functions for batches that the trainer cannot transform, count or split by itself.

    The functions get a batch as the loader yields it, on the host, except `split_batch` and
    `microbatch_transforms`, which get it on the device; none of them should read a device.

    Raises:
        TrainerConfigError: If a field that takes a function has something else.

    Example:
        >>> DataSpec(loader, batch_transforms=lambda batch: {**batch, "labels": batch["label"]})
    """

    dataloader: Iterable[Any]
    """The loader of this rank's batches."""
    _: KW_ONLY
    num_samples: int | None = None
    """Samples of an epoch on all ranks, if the loader does not state them; for callbacks only."""
    num_tokens: int | None = None
    """Tokens of an epoch on all ranks, if the loader does not state them; for callbacks only."""
    batch_transforms: Callable[[Any], Any] | None = None
    """Called with each batch on the host, before it is counted."""
    microbatch_transforms: Callable[[Any], Any] | None = None
    """Called with each microbatch on the device, before its forward pass."""
    split_batch: Callable[..., Any] | None = None
    """`(batch, microbatch_size) -> microbatches`, the last one shorter; or `(batch, start, stop) -> samples
    start … stop - 1`. By default every part of the batch is sliced, and must have a row or an item for each
    sample; numbers, texts and tensors without dims belong to all samples."""
    get_num_samples_in_batch: Callable[[Any], int] | None = None
    """Samples in a batch; by default the length of the first dimension, the same in all its tensors."""
    get_num_tokens_in_batch: Callable[[Any], int | Mapping[str, int]] | None = None
    """Tokens in a batch; by default rows × columns of `input_ids`; else the data set's `max_seq_len` for each
    sample; else 0. May return `{"total": …, "loss_generating": …}`; the latter then weights the loss."""
    get_loss_weights: Callable[[Any], Sequence[float] | torch.Tensor | None] | None = None
    """The weight of each sample in the loss; by default the number of its `labels` that are not ignored where
    a sample has several labels, else 1."""
    is_sharded: bool = False
    """Whether each rank's loader already yields its own share of the samples, regardless of its sampler."""
    is_replicated: bool = False
    """Whether every rank's loader yields the same batches on purpose; ranks then compare their first batches,
    and must have equal ones. Otherwise ranks that have the same first batch raise."""

    def __repr__(self) -> str:
        given = [field.name for field in fields(self)[1:] if getattr(self, field.name) not in (None, False)]
        own = f": with its own {', '.join(given)}" if given else ""
        return f"<DataSpec of {type(self.dataloader).__name__}{own}>"

    def __post_init__(self) -> None:
        for name in ("batch_transforms", "microbatch_transforms", "split_batch", *_COUNTERS):
            given = getattr(self, name)
            if given is not None and not callable(given):
                raise TrainerConfigError(
                    f"`{name}` of the `DataSpec` is a `{type(given).__name__}`; expected a function"
                )
        for name in ("num_samples", "num_tokens"):
            if (count := getattr(self, name)) is not None:
                check_count(name, count, least=0)
        if self.is_sharded and self.is_replicated:
            raise TrainerConfigError(
                "`is_sharded` and `is_replicated` of the `DataSpec` are both True; ranks have either shares "
                "of the samples or the same batches, so set one of them"
            )

    def as_stated(self) -> DataSpec:
        """Return the spec with only the fields that the user stated; a subclass may have filled in others."""
        return self

    def transform(self, batch: Any) -> Any:
        """Apply `batch_transforms` to a batch of the loader."""
        return batch if self.batch_transforms is None else self.batch_transforms(batch)

    def transform_microbatch(self, microbatch: Any) -> Any:
        """Apply `microbatch_transforms` to a microbatch on the device."""
        return microbatch if self.microbatch_transforms is None else self.microbatch_transforms(microbatch)

    def count_samples(self, batch: Any) -> int:
        """Return the number of samples in `batch`."""
        return (self.get_num_samples_in_batch or num_samples)(batch)

    def count_tokens(self, batch: Any) -> int:
        """Return the number of tokens in `batch`."""
        if self.get_num_tokens_in_batch is None:
            tokens = num_tokens(batch)
            length = 0 if tokens else getattr(getattr(self.dataloader, "dataset", None), "max_seq_len", 0)
            return tokens or (length * self.count_samples(batch) if isinstance(length, int) else 0)
        counted = self.get_num_tokens_in_batch(batch)
        return counted if isinstance(counted, int) else int(_entry(counted, "total"))

    def loss_weights(self, batch: Any) -> Sequence[float] | torch.Tensor | None:
        """Return the samples' weights in the loss; None where each weighs 1."""
        if self.get_loss_weights is not None:
            return self.get_loss_weights(batch)
        weights = loss_weights(batch)
        if self.get_num_tokens_in_batch is None:
            return weights
        counted = self.get_num_tokens_in_batch(batch)
        if not isinstance(counted, Mapping):
            return weights
        if isinstance(weights, list) and sum(weights) == _entry(counted, "loss_generating"):
            return weights
        rows = (self.split(batch, row, row + 1) for row in range(self.count_samples(batch)))
        return [float(_entry(self.get_num_tokens_in_batch(row), "loss_generating")) for row in rows]

    def weighted_by(self, weigh: Callable[[Any], Sequence[float] | torch.Tensor | None] | None) -> DataSpec:
        """Return this description with other `get_loss_weights`; with None every sample weighs 1."""
        return replace(self, get_loss_weights=weigh or _no_weights)

    def counts_plainly(self) -> bool:
        """Return whether a list or tuple of tensors has no tokens and no loss weights, so only rows count."""
        return (
            self.get_num_samples_in_batch in (None, _num_samples_of_batch)
            and self.get_num_tokens_in_batch is None
            and self.get_loss_weights in (None, _no_weights)
            and not isinstance(getattr(getattr(self.dataloader, "dataset", None), "max_seq_len", None), int)
        )

    def split(self, batch: Any, start: int, stop: int, *, num_samples: int | None = None) -> Any:
        """Return the samples `start` to `stop - 1` of `batch`.

        If `split_batch` takes `(batch, microbatch_size)`, `start` must be 0 or a multiple of a size that is
        at least `stop - start`.

        Args:
            batch: The batch.
            start: The first sample.
            stop: The sample after the last one.
            num_samples: The samples of the batch, if they were counted.

        Raises:
            DataError: If the batch cannot be split without `split_batch`.
        """
        if self.split_batch is None:
            total = self.count_samples(batch) if num_samples is None else num_samples
            return slice_batch(batch, start, stop, num_samples=total)
        if _num_parameters(self.split_batch) >= 3:
            return self.split_batch(batch, start, stop)
        head = batch if stop == self.count_samples(batch) else self.split_batch(batch, stop)[0]
        return head if start == 0 else self.split_batch(head, start)[1]


def _no_weights(batch: Any) -> None:  # noqa: ARG001 - every sample weighs 1
    return None


_COUNTERS = ("get_num_samples_in_batch", "get_num_tokens_in_batch", "get_loss_weights")


def _entry(counted: Any, name: str) -> int:
    if not isinstance(counted, Mapping) or name not in counted:
        returned = sorted(map(str, counted)) if isinstance(counted, Mapping) else type(counted).__name__
        raise DataError(
            f"`get_num_tokens_in_batch` returned {returned}; expected a number, or a dict with the entries "
            "`total` and `loss_generating`"
        )
    number: int = counted[name]
    return number


def _num_parameters(function: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 2
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in kinds and one.default is inspect.Parameter.empty for one in parameters)


def as_data_spec(given: Any) -> DataSpec:
    """Make a `DataSpec` from a data loader, a dict of its arguments, or a `DataSpec`.

    Raises:
        TrainerConfigError: If a dict has a name that `DataSpec` does not know, or no `dataloader`; or if the
            loader is a class, or a data set, which has samples and no batches.
    """
    if isinstance(given, DataSpec):
        return _checked(given.as_stated())
    if not isinstance(given, Mapping):
        return _checked(DataSpec(given))
    known = [field.name for field in fields(DataSpec)]
    for name in given:
        if name not in known:
            matches = difflib.get_close_matches(str(name), known, n=1)
            raise TrainerConfigError(
                f"`{name}` is no argument of `DataSpec`; "
                + (f"did you mean `{matches[0]}`?" if matches else f"expected some of {', '.join(known)}")
            )
    if "dataloader" not in given:
        raise TrainerConfigError(f"the dict of a `DataSpec` has {sorted(given)} but no `dataloader`; add it")
    return _checked(DataSpec(**given))


def _checked(spec: DataSpec) -> DataSpec:
    """Return a spec whose loader has batches; of a data set that is iterated, the items show it."""
    check_yields_batches(spec.dataloader)
    is_set = isinstance(spec.dataloader, Dataset) or hasattr(spec.dataloader, "column_names")
    if is_set and spec.get_num_samples_in_batch is None and spec.batch_transforms is None:
        return replace(spec, get_num_samples_in_batch=_num_samples_of_batch)
    return spec


def _num_samples_of_batch(batch: Any) -> int:
    """Count the samples of an item of a data set.

    Raises:
        DataError: If the item is a sample, or its samples cannot be counted.
    """
    if is_sample(batch):
        raise DataError(f"the data set in place of a data loader yields samples and no batches; {LOADER_OF}")
    return num_samples(batch)


def with_model_weights(spec: DataSpec, model: Any) -> DataSpec:
    """Return a spec that takes loss weights from the model, if it has them and the spec has none."""
    weigh = getattr(model, "loss_weights", None)
    if not callable(weigh) or spec.get_loss_weights or spec.get_num_tokens_in_batch:
        return spec
    return replace(spec, get_loss_weights=weigh)

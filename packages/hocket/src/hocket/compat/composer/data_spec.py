"""`DataSpec` whose functions can be called, whether the user gave them or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hocket.trainer import DataSpec as _DataSpec
from hocket.trainer.data.data_spec import as_data_spec


class DataSpec(_DataSpec):
    """`hocket.trainer.DataSpec` with Composer's order of arguments.

    `get_num_samples_in_batch(batch)`, `get_num_tokens_in_batch(batch, token_type="total")` and
    `split_batch(batch, microbatch_size)` are always functions: those given, or the trainer's defaults.

    Args:
        dataloader: As in `hocket.trainer.DataSpec`.
        num_samples: As there.
        num_tokens: As there.
        batch_transforms: As there.
        microbatch_transforms: As there.
        split_batch: As there.
        get_num_samples_in_batch: As there.
        get_num_tokens_in_batch: As there.
        device_transforms: The past name of `microbatch_transforms`.
        get_loss_weights: As there.
        is_sharded: As there.
    """

    __slots__ = ("_stated",)

    _stated: _DataSpec

    def __init__(
        self,
        dataloader: Iterable[Any],
        num_samples: int | None = None,
        num_tokens: int | None = None,
        batch_transforms: Callable[[Any], Any] | None = None,
        microbatch_transforms: Callable[[Any], Any] | None = None,
        split_batch: Callable[..., Any] | None = None,
        get_num_samples_in_batch: Callable[[Any], int] | None = None,
        get_num_tokens_in_batch: Callable[[Any], int | Mapping[str, int]] | None = None,
        *,
        device_transforms: Callable[[Any], Any] | None = None,
        get_loss_weights: Callable[[Any], Sequence[float] | torch.Tensor | None] | None = None,
        is_sharded: bool = False,
    ) -> None:
        spec = _DataSpec(
            dataloader,
            num_samples=num_samples,
            num_tokens=num_tokens,
            batch_transforms=batch_transforms,
            microbatch_transforms=microbatch_transforms or device_transforms,
            split_batch=split_batch,
            get_num_samples_in_batch=get_num_samples_in_batch,
            get_num_tokens_in_batch=get_num_tokens_in_batch,
            get_loss_weights=get_loss_weights,
            is_sharded=is_sharded,
        )
        object.__setattr__(self, "_stated", spec)

        def count_tokens(batch: Any, token_type: str = "total") -> int:
            if get_num_tokens_in_batch is None:
                return spec.count_tokens(batch)
            counted = get_num_tokens_in_batch(batch)
            return counted if isinstance(counted, int) else int(counted[token_type])

        def split(batch: Any, microbatch_size: int) -> Sequence[Any]:
            if split_batch is not None:
                parts: Sequence[Any] = split_batch(batch, microbatch_size)
                return parts
            rows = spec.count_samples(batch)
            return [
                spec.split(batch, start, min(start + microbatch_size, rows), num_samples=rows)
                for start in range(0, rows, microbatch_size)
            ]

        super().__init__(
            dataloader,
            num_samples=_length_of_data(dataloader) if num_samples is None else num_samples,
            num_tokens=num_tokens,
            batch_transforms=batch_transforms,
            microbatch_transforms=spec.microbatch_transforms,
            split_batch=split,
            get_num_samples_in_batch=spec.count_samples,
            get_num_tokens_in_batch=count_tokens,
            get_loss_weights=get_loss_weights,
            is_sharded=is_sharded,
        )

    def as_stated(self) -> _DataSpec:
        """Return the description with only what the user gave."""
        return self._stated


def _length_of_data(dataloader: Iterable[Any]) -> int | None:
    """Return the number of samples in a data loader's data set; None if it is not known."""
    try:
        return len(dataloader.dataset)  # type: ignore[attr-defined]  # caught below
    except (AttributeError, TypeError, NotImplementedError):
        return None


def default_split_batch(batch: Any, microbatch_size: int) -> Sequence[Any]:
    """Split a batch into parts of `microbatch_size` samples, as the trainer does without `split_batch`."""
    split: Any = DataSpec([]).split_batch
    parts: Sequence[Any] = split(batch, microbatch_size)
    return parts


def ensure_data_spec(dataloader: Any) -> DataSpec:
    """Return a `DataSpec` unchanged, or make one from a data loader or a dict of its arguments."""
    if isinstance(dataloader, DataSpec):
        return dataloader
    spec = as_data_spec(dataloader)
    return DataSpec(
        spec.dataloader,
        spec.num_samples,
        spec.num_tokens,
        spec.batch_transforms,
        spec.microbatch_transforms,
        spec.split_batch,
        spec.get_num_samples_in_batch,
        spec.get_num_tokens_in_batch,
        get_loss_weights=spec.get_loss_weights,
        is_sharded=spec.is_sharded,
    )


__all__ = ["DataSpec", "default_split_batch", "ensure_data_spec"]

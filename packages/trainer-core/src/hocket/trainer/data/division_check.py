"""The comparison of the ranks' first batches, which finds data that is not divided over them."""

from __future__ import annotations

import hashlib
import itertools
import pickle
from typing import Any

import torch

from hocket.trainer.data.batch_tree import children_of
from hocket.trainer.data.data_spec import DataSpec
from hocket.trainer.errors import DataError
from hocket.trainer.ranks.step_sync import StepSync


class DivisionCheck:
    """A check that is called with each rank's first batch. Collective, once in a run.

    The ranks exchange digests of their batches, on every rank of the job, whatever its own loader is.

    Args:
        spec: The loader of this rank.
        sync: The exchange between the ranks.
        is_unknown: Whether nothing says that this rank's samples are other ones than those of other ranks.
    """

    def __init__(self, spec: DataSpec, sync: StepSync, *, is_unknown: bool) -> None:
        self._spec = spec
        self._sync = sync
        self._is_unknown = is_unknown

    def __call__(self, batch: Any) -> None:
        """Compare the batches; None stands for no batch.

        Raises:
            DataError: If ranks have the same batch, or if `is_replicated` is set and they have not; or if
                their loaders have different orders.
        """
        sync = self._sync
        self._check_orders()
        has_copies = sync.num_data_ranks < sync.num_ranks
        is_compared = batch is not None and (self._is_unknown or self._spec.is_replicated or has_copies)
        digests = sync.gather(digest_of(batch) if is_compared else 0)
        if self._spec.is_replicated:
            self._check_equal(digests)
            return
        for rank, other in itertools.combinations(range(len(digests)), 2):
            shares_data = sync.data_rank_of[rank] == sync.data_rank_of[other]
            if digests[rank] and digests[other] and shares_data and digests[rank] != digests[other]:
                raise DataError(self._unequal(rank, other))
            is_compared = self._is_unknown and not shares_data
            if is_compared and digests[rank] and digests[rank] == digests[other]:
                raise DataError(self._refusal(rank, other))

    def _check_orders(self) -> None:
        loader: Any = self._spec.dataloader
        parts = (loader, getattr(loader, "dataset", None))
        source = next((part for part in parts if callable(getattr(part, "order_digest", None))), None)
        orders = self._sync.gather(0 if source is None else source.order_digest())
        known = [(rank, order) for rank, order in enumerate(orders) if order]
        for rank, order in known:
            if order != known[0][1]:
                raise DataError(
                    f"ranks {known[0][0]} and {rank} read in different orders, so that samples come twice or "
                    "not at all: expected the same data, batch size, seed and weights on every rank. This "
                    f"rank, {self._sync.rank}, has {source!r:.300}"
                )

    def _check_equal(self, digests: list[float]) -> None:
        if len(set(filter(None, digests))) > 1:
            raise DataError(
                "`is_replicated` of the `DataSpec` says that every rank has the same batches, and the first "
                "batches of the ranks differ; make the loaders from the same data and seed (a shuffle draws "
                "from a generator that differs between the ranks), or leave `is_replicated` out"
            )

    def _unequal(self, rank: int, other: int) -> str:
        return (
            f"ranks {rank} and {other} share the matrices of the model, so they need the same batches, and "
            "their first batches of `train_dataloader` differ. Divide the data by the data-parallel rank and "
            f"size (rank {self._sync.data_rank} of {self._sync.num_data_ranks} here), and shuffle by a "
            "generator with a seed that does not depend on the process"
        )

    def _refusal(self, rank: int, other: int) -> str:
        loader: Any = self._spec.dataloader
        data = getattr(loader, "dataset", None)
        name = f"`{type(loader).__name__}`" + ("" if data is None else f" over a `{type(data).__name__}`")
        size = self._sync.num_data_ranks
        return (
            f"ranks {rank} and {other} have the same first batch of `train_dataloader` ({name}), so the data "
            f"is not divided over the {size} ranks, and each sample would be trained on more than once. Let "
            f"the data set yield every {size}th sample from the rank on (`itertools.islice(samples, rank, "
            "None, world_size)`; of Hugging Face's `datasets`: `split_dataset_by_node`). If the ranks have "
            "the same batches on purpose, pass `DataSpec(loader, is_replicated=True)`; if these are other "
            "samples with the same values, `DataSpec(loader, is_sharded=True)`"
        )


def digest_of(batch: Any) -> int:
    """Return a digest of a batch from 1 to 2**52, which a double holds exactly; 0 if it cannot be read."""
    digest = hashlib.blake2b(digest_size=6)
    try:
        _update(digest, batch)
    except (TypeError, AttributeError, ValueError, pickle.PicklingError):
        return 0
    return int.from_bytes(digest.digest(), "little") + 1


def _update(digest: Any, part: Any) -> None:
    if isinstance(part, torch.Tensor) and part.layout is torch.strided and not part.is_quantized:
        digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
        flat = part.detach().resolve_conj().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy())
    elif (children := children_of(part)) is not None:
        for name, value in children:
            digest.update(repr(name).encode())
            _update(digest, value)
    else:
        digest.update(pickle.dumps(part))

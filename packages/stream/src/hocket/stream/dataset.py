"""Reading a data set, batch by batch, in an order that no topology changes."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from hocket.native import _native
from hocket.stream.engine import Engine, RankBatch, ReadSettings
from hocket.stream.errors import ConfigError
from hocket.stream.location import resolve_location
from hocket.stream.position import Cursor, OrderSettings
from hocket.stream.topology import resolve_data_parallel

logger = logging.getLogger("hocket.stream")

_TAILS = ("short", "drop", "pad")
_DEFAULT_BLOCK = 1 << 18
_MOST_LANES = 64


class StreamingDataset:
    """A data set of MDS shards, in a store or on disk, as one stream of global batches.

    Global batch `k` of an epoch is the same list of samples in the same order on any number of ranks and
    workers; each rank reads its contiguous slice of it. A saved position goes on from there on any other
    number. Nothing is negotiated: no collective, no shared memory, no lock that outlives its process.

    Args:
        remote: The data set's folder: a URI, or a path, which is read in place unless `local` differs.
        local: The cache folder, which may be shared by all processes of a machine; or, without `remote`, the
            data set itself. Compressed shards are unpacked into it.
        split: A folder within both.
        batch_size: Samples of a batch on each rank. This or `global_batch_size`.
        global_batch_size: Samples of a batch over all ranks; it need not be divisible by them.
        shuffle: Permute shards, and samples within blocks, anew each epoch. False: the order of storage.
        shuffle_seed: Of the permutations, from 0 to below 2^64.
        shuffle_block_size: Samples of a block; 262,144 by default.
        num_canonical_nodes: Lanes that each batch is drawn from, a divisor of the batch: a machine reads only
            its own lanes' shards where the number of machines divides it. Default: gcd(batch, 64), and
            without shuffling 1, which is the order of storage.
        tail: The last batch of an epoch: `short`; `drop` it; `pad` it with the epoch's first samples.
        validate_hash: The digest to check; by default the quickest one that the index carries. Shards are
            checked when they arrive, and when a process first opens one that was there.
        keep_zip: Keep downloaded compressed shards beside the raw ones.
        rank: Data-parallel rank; by default `RANK` divided by `replication`.
        world_size: Number of those; by default `WORLD_SIZE` divided by `replication`.
        replication: So many consecutive processes read the same samples.
        allow_unsafe_types: Take columns whose decoding runs code out of the data.
        download_timeout: Seconds that all tries of one request may take together, plus one for each MiB.
        download_retry: Fetches of a shard before wrong bytes are final.
        prefetch_bytes: Bytes of shards fetched ahead of their first use.
        prefetch_batches: Finished batches that may wait.
        fetch_threads: Shards fetched at once.

    Raises:
        ConfigError: An argument does not work, or there are more ranks than samples.
        IndexNotFoundError: There is no data set.
        IndexCorruptError: Its index cannot be trusted.
        StoreError: The store's own errors, as they come.

    Example:
        >>> dataset = StreamingDataset(remote="s3://bucket/train", batch_size=32, shuffle=True)
        >>> for batch in dataset.batches():
        ...     batch["tokens"]  # (32, 1024) uint16
    """

    def __init__(
        self,
        *,
        remote: str | os.PathLike[str] | None = None,
        local: str | os.PathLike[str] | None = None,
        split: str | None = None,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        shuffle: bool = False,
        shuffle_seed: int = 9176,
        shuffle_block_size: int | None = None,
        num_canonical_nodes: int | None = None,
        tail: str = "short",
        validate_hash: str | None = None,
        keep_zip: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        replication: int | None = None,
        allow_unsafe_types: bool = False,
        download_timeout: float = 120.0,
        download_retry: int = 3,
        prefetch_bytes: int = 256 << 20,
        prefetch_batches: int = 4,
        fetch_threads: int = 8,
    ) -> None:
        if tail not in _TAILS:
            raise ConfigError(f"`tail` is {tail!r}: expected one of {_TAILS}")
        if not 0 <= shuffle_seed < 1 << 64:
            raise ConfigError(f"`shuffle_seed` is {shuffle_seed}: expected 0 to below 2^64")
        for name, value in [
            ("shuffle_block_size", shuffle_block_size),
            ("num_canonical_nodes", num_canonical_nodes),
            ("download_retry", download_retry),
            ("prefetch_batches", prefetch_batches),
            ("fetch_threads", fetch_threads),
        ]:
            if value is not None and value < 1:
                raise ConfigError(f"`{name}` is {value}: expected at least 1")
        self.data_parallel = resolve_data_parallel(rank, world_size, replication=replication)
        """This process's data-parallel (rank, number of ranks)."""
        self.cursor = Cursor()
        """Where the iteration is; moved by `batches` and by the loader."""
        self._shuffle = shuffle
        self._shuffle_seed = shuffle_seed
        self._shuffle_block_size = shuffle_block_size or _DEFAULT_BLOCK
        self._num_canonical_nodes = num_canonical_nodes
        self._tail = tail
        self._is_tail_reported = False
        self._engine = Engine(
            resolve_location(remote, local, split=split),
            ReadSettings(
                validate_hash=validate_hash,
                keep_zip=keep_zip,
                download_timeout=download_timeout,
                download_retry=download_retry,
                prefetch_bytes=prefetch_bytes,
                prefetch_batches=prefetch_batches,
                fetch_threads=fetch_threads,
                allow_unsafe_types=allow_unsafe_types,
            ),
        )
        self._settings: OrderSettings | None = None
        self._check_size()
        if batch_size is not None or global_batch_size is not None:
            self.set_batch_size(batch_size, global_batch_size=global_batch_size)

    def _check_size(self) -> None:
        world_size = self.data_parallel[1]
        if self.size < world_size:
            raise ConfigError(
                f"the data set at `{self._engine.location.origin}` has {self.size} samples for {world_size} "
                "data-parallel ranks: expected at least one for each; use fewer ranks or more data"
            )

    def set_batch_size(self, batch_size: int | None = None, *, global_batch_size: int | None = None) -> None:
        """Set the size of batches, once. The loader calls it with its own `batch_size`.

        Args:
            batch_size: Samples on each rank.
            global_batch_size: Samples over all ranks.

        Raises:
            ConfigError: Both or neither are given, the batch is smaller than the number of ranks, the lanes
                do not divide it, `drop` leaves nothing of the data, or another size was set before.
        """
        world_size = self.data_parallel[1]
        if (batch_size is None) == (global_batch_size is None):
            raise ConfigError(
                f"`batch_size` is {batch_size} and `global_batch_size` {global_batch_size}: "
                "expected one of them"
            )
        size = global_batch_size if batch_size is None else batch_size * world_size
        if size is None or size < max(world_size, 1):
            raise ConfigError(
                f"the global batch is {size} samples for {world_size} data-parallel ranks: expected at least "
                "one for each; make it larger or use fewer ranks"
            )
        lanes = self._num_canonical_nodes or (math.gcd(size, _MOST_LANES) if self._shuffle else 1)
        settings = OrderSettings(
            fingerprint=self._engine.index.fingerprint,
            num_samples=self.size,
            global_batch_size=size,
            num_canonical_nodes=lanes,
            shuffle=self._shuffle,
            shuffle_seed=self._shuffle_seed,
            shuffle_block_size=self._shuffle_block_size,
            tail=self._tail,
        )
        if self._settings is not None and settings != self._settings:
            raise ConfigError(
                f"the global batch is {size} samples, and was set to {self._settings.global_batch_size} "
                "before: expected one size; give it to the data set or to the loader, not to both"
            )
        if settings.num_batches == 0:
            raise ConfigError(
                f"`tail='drop'` leaves nothing of {self.size} samples in batches of {size}: make the batch "
                "smaller, or use `tail='short'`"
            )
        if size % lanes:
            raise ConfigError(
                f"`num_canonical_nodes` is {lanes} and the global batch {size} samples: expected a divisor "
                f"of it, such as {math.gcd(size, lanes)}"
            )
        self._settings = settings

    @property
    def settings(self) -> OrderSettings:
        """Everything that the order depends on.

        Raises:
            ConfigError: No batch size was set yet.
        """
        if self._settings is None:
            raise ConfigError("no batch size is set: give `batch_size` or `global_batch_size`")
        return self._settings

    @property
    def size(self) -> int:
        """Samples of the whole data set."""
        return self._engine.index.num_samples

    @property
    def num_batches(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return self.settings.num_batches

    def __len__(self) -> int:
        """Return the number of samples that this rank yields in an epoch."""
        rank, world_size = self.data_parallel
        order = self._order(self.cursor.epoch)
        last = self.num_batches - 1
        return last * order.share(0, rank, world_size)[0] + order.share(last, rank, world_size)[0]

    def sample_ids(self, batch: int, *, epoch: int | None = None) -> list[int]:
        """Return the samples of a global batch, in order, by their numbers in storage order.

        Reads nothing. `epoch` is the current one by default.

        Raises:
            IndexError: The epoch has no such batch.
        """
        return self._order(self.cursor.epoch if epoch is None else epoch).sample_ids(batch)

    def read_batches(self, *, epoch: int, first: int = 0, stride: int = 1) -> Iterator[RankBatch]:
        """Yield this rank's part of batches `first`, `first + stride`, … of an epoch; the cursor stays.

        Raises:
            ShardNotFoundError: A shard is nowhere.
            ShardCorruptError: Its bytes are wrong, however often fetched.
            StreamIOError: The cache folder refuses.
            StoreError: The store's own errors, as they come.
        """
        rank, world_size = self.data_parallel
        return self._engine.read(
            self._order(epoch), rank=rank, world_size=world_size, first=first, stride=stride
        )

    def batches(self) -> Iterator[dict[str, Any]]:
        """Yield this rank's batches from the cursor to the end of the epoch, then move to the next epoch.

        Values by column: one writable array, or a list where values differ in size. At the end of an epoch
        it yields nothing. A rank without a share of a short last batch gets one sample, of share 0.

        Raises:
            As `read_batches`.
        """
        for batch in self._walk():
            yield batch.columns

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield this rank's samples, each a value by column. Samples that do not count are left out.

        The state stands after a batch once its last sample was yielded, and before it until then.
        """
        token = self.cursor.begin()
        self.report_tail()
        for batch in self.read_batches(epoch=self.cursor.epoch, first=self.cursor.batch):
            for place, sample in enumerate(self.samples(batch)[: batch.local], start=1):
                if place == batch.local:
                    self.cursor.move(token, batch.number + 1, share=(batch.local, batch.total))
                yield sample
        self.cursor.end_epoch(token)

    def samples(self, batch: RankBatch) -> list[dict[str, Any]]:
        """Return a batch's samples, each a value by column; one that does not count among them."""
        items = [(name, self._engine.encodings[name].item, column) for name, column in batch.columns.items()]
        return [
            {name: item(column, place) for name, item, column in items}
            for place in range(max(batch.local, 1))
        ]

    def batch_share(self) -> tuple[int, int]:
        """Return how many samples of the batch just yielded count here, and over all ranks."""
        return self.cursor.share

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch just yielded: JSON, below 1 KB, of no topology."""
        return self.cursor.state(self.settings)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, on whatever number of ranks and workers.

        Raises:
            StateMismatchError: It is of other data, or of another order; the message names the field.
            ConfigError: It is no state of this kind.
        """
        self.cursor.load(state, self.settings)

    def report_tail(self) -> None:
        """Say once, on rank 0, what the tail policy does to this data set."""
        if self._is_tail_reported or self.data_parallel[0] != 0:
            return
        self._is_tail_reported = True
        rest = self.size % self.settings.global_batch_size
        if not rest:
            return
        order = self._order(self.cursor.epoch)
        size = self.settings.global_batch_size
        if self._tail == "short":
            logger.info(
                "the last batch of each epoch has %d samples instead of %d (`tail='short'`)", rest, size
            )
        elif self._tail == "drop":
            logger.warning(
                "%d of %d samples are left out in each epoch (`tail='drop'`)", order.num_dropped, self.size
            )
        else:
            logger.warning("%d samples come twice in each epoch (`tail='pad'`)", order.num_repeated)

    def _walk(self) -> Iterator[RankBatch]:
        token = self.cursor.begin()
        self.report_tail()
        for batch in self.read_batches(epoch=self.cursor.epoch, first=self.cursor.batch):
            self.cursor.move(token, batch.number + 1, share=(batch.local, batch.total))
            yield batch
        self.cursor.end_epoch(token)

    def _order(self, epoch: int) -> _native.EpochOrder:
        settings = self.settings
        return self._engine.index.order(
            epoch=epoch,
            global_batch_size=settings.global_batch_size,
            num_canonical_nodes=settings.num_canonical_nodes,
            shuffle=settings.shuffle,
            shuffle_seed=settings.shuffle_seed,
            shuffle_block_size=settings.shuffle_block_size,
            tail=settings.tail,
        )

"""Whether a data set's shards are what its index says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hocket.native.errors import StoreNotFoundError
from hocket.stream.errors import ShardCorruptError, ShardNotFoundError
from hocket.stream.inventory import Inventory, Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """One shard, and what is wrong with it."""

    number: int
    """Its place in the index."""

    name: str
    """The base name of its raw data."""

    num_bytes: int
    """Bytes that the index says are stored of it."""

    problem: str | None
    """What is wrong: missing, a size, a digest, the table of offsets, a value. None where it is sound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """All shards of a data set."""

    uri: str
    shards: tuple[Checked, ...]

    @property
    def bad(self) -> list[Checked]:
        """Those with a problem."""
        return [shard for shard in self.shards if shard.problem is not None]


def verify(uri: str, *, on_shard: Callable[[Checked], None] | None = None) -> Verdict:
    """Read every shard of a data set, and say what is wrong with each.

    Compared are the sizes, the quickest digest that the index carries, the table of offsets, and every value
    with its encoding, images to the last pixel; pickled values are not decoded. Each shard is fetched into a
    temporary folder and removed again, four at a time; nothing is written to the data set.

    Args:
        uri: The data set's folder, a path or a URI.
        on_shard: Called after each shard, in the index's order.

    Raises:
        IndexNotFoundError: There is no data set.
        IndexCorruptError: Its index cannot be trusted.
        ConfigError: A column's encoding is unknown, or needs a library that is not installed.
        StoreError: The store's own errors, as they come; a shard that is not there is none.
    """
    inventory = Inventory(uri)
    checked = []
    for shard in inventory.each(lambda shard: _check(inventory, shard)):
        checked.append(shard)
        if on_shard is not None:
            on_shard(shard)
    return Verdict(uri=inventory.uri, shards=tuple(checked))


def _check(inventory: Inventory, shard: Shard) -> Checked:
    try:
        problem = _sizes(inventory, shard) if shard.num_samples == 0 else _values(inventory, shard)
    except (ShardNotFoundError, ShardCorruptError) as error:
        problem = str(error)
    return Checked(number=shard.number, name=shard.name, num_bytes=shard.stored_bytes, problem=problem)


def _values(inventory: Inventory, shard: Shard) -> str | None:
    with inventory.open(shard) as opened:
        decoder = opened.decoder(loads_images=True)
        for samples, columns in opened.read():
            try:
                decoder.decode(columns, len(samples))
            except ShardCorruptError as error:
                return f"in samples {samples[0]} to {samples[-1]}, {error}"
    return None


def _sizes(inventory: Inventory, shard: Shard) -> str | None:
    """An empty shard is never opened to be read: what there is of it is compared by size."""
    for file in shard.stored_files:
        try:
            size = inventory.store.head(file["basename"]).size
        except StoreNotFoundError:
            return f"`{file['basename']}` is not there"
        if size != file["bytes"]:
            return f"`{file['basename']}` has {size} bytes, expected {file['bytes']} bytes"
    return None

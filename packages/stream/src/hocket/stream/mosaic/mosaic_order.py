"""`MosaicOrder`: the order of mosaicml-streaming, selected by the names of its algorithms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hocket.stream.errors import ConfigError
from hocket.stream.mosaic import partitions, shuffles


@dataclass(frozen=True, kw_only=True, slots=True)
class MosaicOrder:
    """The algorithms of mosaicml-streaming's order: `StreamingDataset(order=MosaicOrder(...))`.

    Raises:
        ConfigError: There is no algorithm of that name.
    """

    shuffle_algo: str = "py1e"
    """`naive`, `py1s`, `py2s`, `py1br` or `py1e`."""

    partition_algo: str = "relaxed"
    """`orig` or `relaxed`."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"`{name}` is {value!r}: expected one of {choices}")


_CHOICES = {"shuffle_algo": tuple(shuffles.ALGORITHMS), "partition_algo": partitions.ALGORITHMS}


def choose_order(order: str | MosaicOrder | None, algorithms: Mapping[str, object]) -> MosaicOrder | None:
    """Return the order of mosaicml-streaming if a data set's arguments select it, None for the native one.

    Args:
        order: `native`, `mosaic`, an object, or None, which leaves the choice to `algorithms`.
        algorithms: The fields of `MosaicOrder` as arguments of the data set; None if not given.

    Raises:
        ConfigError: There is no such order, or it has no such algorithms.
    """
    given = {name: value for name, value in algorithms.items() if value is not None}
    if order not in (None, "native", "mosaic") and not isinstance(order, MosaicOrder):
        raise ConfigError(f"`order` is {order!r}: expected 'native', 'mosaic' or a `MosaicOrder`")
    if order is None or order == "mosaic":
        return MosaicOrder(**given) if given or order else None  # type: ignore[arg-type]  # checked there
    if given:
        raise ConfigError(
            f"{' and '.join(f'`{name}` is {value!r}' for name, value in given.items())} beside "
            f"`order={order!r}`, which has its own: expected no algorithm beside it; "
            "leave out the algorithm or `order`"
        )
    return order if isinstance(order, MosaicOrder) else None

"""The position of a run in its data, and the check that a saved position belongs to this data and order."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from hocket.native import _native
from hocket.stream.errors import ConfigError, StateMismatchError
from hocket.stream.read.epoch_counter import EpochCounter
from hocket.stream.settings.order_rules import OrderRules
from hocket.stream.settings.validation import whole

_VERSION = 2

#: The value of `mixture` if each sample of each stream is taken once.
WHOLE = "whole"


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderSettings(OrderRules):
    """All settings that the order of samples depends on. Ranks and workers are not among them."""

    fingerprint: str
    """A digest of the columns, and of the sample counts, sizes and digests of all shards."""

    mixture: str
    """`whole` if an epoch has each sample once, else a digest of the number of samples per stream."""

    epoch_size: int
    """Number of samples in an epoch."""

    global_batch_size: int
    """Number of samples in a batch over all ranks."""

    num_canonical_nodes: int
    """Number of lanes that each batch is drawn from; it divides the global batch size."""

    shuffle_block_size: int
    """Number of samples in a shuffle block."""

    def order(self, mix: _native.StreamMix, epoch: int) -> _native.EpochOrder:
        """Return the order of an epoch.

        Raises:
            ConfigError: The settings do not give an order, such as stratified batches too small for a stream.
        """
        return mix.order(self, epoch=epoch)

    def values(self) -> dict[str, Any]:
        """Return all settings by name, those of the data first."""
        rules = self.rules()
        data = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in rules}
        return data | rules

    def check(self, state: Mapping[str, Any], *, ignore: Collection[str] = ()) -> None:
        """Raise if a state was saved with other data or another order.

        Args:
            state: The state.
            ignore: Names of settings that may differ.

        Raises:
            StateMismatchError: A field differs; the message has both values and what to do.
        """
        for name, current in self.used().items():
            if name in ignore:
                continue
            saved = state[name]
            if current != saved or type(current) is not type(saved):
                raise StateMismatchError(
                    f"`{name}` is {saved!r} in the state and {current!r} here: expected equal "
                    f"values, because the order of samples depends on them; {_remedy(name, saved)}"
                )

    def used(self) -> dict[str, Any]:
        """Return the settings by name, without those that have no effect in combination with the others."""
        unused: set[str] = set()
        if self.mixture == WHOLE:
            unused |= {"sampling_method", "sampling_granularity"}
        if not self.shuffle:
            unused |= {"shuffle_block_size"} | ({"shuffle_seed"} if self.mixture == WHOLE else set())
        return {name: value for name, value in self.values().items() if name not in unused}


def _remedy(field: str, saved: object) -> str:
    if field == "fingerprint":
        return (
            "point `remote` or `local` at the data of the saved run (on a hub, at the commit that its log "
            "names), or start without this state"
        )
    if field == "mixture":
        return "give the streams the weights of the saved run, or start without this state"
    return f"give `{field}={saved!r}`, or start without this state"


class Cursor:
    """The position of a run in its data. One iteration at a time moves it.

    After batch `k` was yielded the position is `(epoch, k + 1)`; after the last batch it stays in its epoch
    until the iteration has ended, then it is `(epoch + 1, 0)`. A new iteration starts the epoch that follows
    the last one that was started, unless a position was set or loaded since.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.batch = 0
        self.share = (0, 0)
        self.starts = EpochCounter()
        """Position at which the next iteration starts."""
        self._token = 0
        self._is_started = False

    def begin(self, worker: tuple[int, int] | None = None) -> int:
        """Move to the start of a new iteration and return its token; earlier iterations become invalid.

        Args:
            worker: Number and base seed of a DataLoader's worker; None outside of one.
        """
        self._token += 1
        self._is_started = worker is not None
        self.epoch, self.batch = self.starts.next_position() if worker is None else self.starts.join(*worker)
        return self._token

    def start(self, token: int) -> None:
        """Count the iteration's epoch as started. Called before its first sample is yielded.

        Raises:
            ConfigError: Another iteration was started, or a state loaded, since.
        """
        self.check(token)
        if not self._is_started:
            self._is_started = True
            self.starts.start(self.epoch)

    def move(self, token: int, batch: int, *, share: tuple[int, int]) -> None:
        """Move to `batch` once the batch before it was yielded.

        Args:
            token: Token of the iteration.
            batch: Number of the next batch.
            share: Samples of the batch just yielded, on this rank and over all ranks.

        Raises:
            ConfigError: Another iteration was started, or a state loaded, since.
        """
        self.start(token)
        self.batch = batch
        self.share = share

    def end_epoch(self, token: int) -> None:
        """Move to the start of the next epoch.

        Raises:
            ConfigError: Another iteration was started, or a state loaded, since.
        """
        self.start(token)
        self._token += 1
        self.epoch, self.batch = self.epoch + 1, 0

    def go(self, epoch: int, batch: int) -> None:
        """Set the position; an iteration in progress becomes invalid."""
        self._token += 1
        self.epoch, self.batch = epoch, batch
        self.starts.set(epoch, batch)

    def resume(self, token: int, epoch: int, batch: int) -> None:
        """Move an iteration that has yielded nothing yet to another position."""
        self.check(token)
        self.epoch, self.batch = epoch, batch
        self._is_started = True
        self.starts.start(epoch)

    def state(self, settings: OrderSettings) -> dict[str, Any]:
        """Return the position and the order's settings as JSON values, below 1 KB for data of any size."""
        return {"version": _VERSION, "epoch": self.epoch, "batch": self.batch} | settings.values()

    def load(self, state: Mapping[str, Any], settings: OrderSettings, *, num_batches: int) -> None:
        """Set the position from a saved state.

        Raises:
            StateMismatchError: It was saved with other data or another order.
            ConfigError: It is not a state of `hocket.stream`.
        """
        check_keys(state)
        settings.check(state)
        try:
            epoch, batch = whole("epoch", state["epoch"]), whole("batch", state["batch"], most=num_batches)
        except ConfigError as error:
            raise ConfigError(f"the state is not a position in this data set: {error}") from None
        self.go(epoch, batch)

    def check(self, token: int) -> None:
        """Raise if an iteration may not move the cursor any more.

        Raises:
            ConfigError: Another iteration was started, or a state loaded, since.
        """
        if token != self._token:
            raise ConfigError(
                "this iteration has ended, because another one was started or a state was loaded; "
                "use the newest iterator"
            )


def check_keys(state: Mapping[str, Any]) -> None:
    """Raise if a state does not have the keys of a state in the native order.

    Raises:
        ConfigError: It is not a state of `hocket.stream`.
    """
    expected = {"version", "epoch", "batch"} | {field.name for field in fields(OrderSettings)}
    if not isinstance(state, Mapping) or set(state) - {"sample"} != expected or state["version"] != _VERSION:
        raise ConfigError(
            f"the state is {state!r:.200}: expected the keys "
            f"{sorted(expected)} with version {_VERSION}, as `state_dict()` of hocket.stream returns it"
        )

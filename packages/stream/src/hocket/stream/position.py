"""Where in the data a run is, and whether a saved place belongs to this data and order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from hocket.native import _native
from hocket.stream.arguments import whole
from hocket.stream.errors import ConfigError, StateMismatchError

_VERSION = 2

#: The mixture of streams that are all taken once.
WHOLE = "whole"


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderSettings:
    """Everything that the order depends on, beside the epoch. Ranks and workers are not in it."""

    fingerprint: str
    """Of the data: columns, and samples, sizes and digests of all streams' shards."""

    mixture: str
    """`whole` where an epoch has each sample once, else a digest of the samples it takes of each stream."""

    epoch_size: int
    """Samples of an epoch."""

    global_batch_size: int
    """Samples of a batch over all ranks."""

    num_canonical_nodes: int
    """Lanes that each batch is drawn from, a divisor of the batch."""

    shuffle: bool
    """Whether shards and blocks are permuted."""

    shuffle_seed: int
    """Of the permutations and of the draws."""

    shuffle_block_size: int
    """Samples of a block."""

    tail: str
    """What becomes of the last batch: `short`, `drop` or `pad`."""

    batching_method: str
    """How streams come together: `random`, `stratified` or `per_stream`."""

    sampling_method: str
    """Whether a part of a stream is drawn anew in each epoch: `balanced` or `fixed`."""

    sampling_granularity: int
    """Samples drawn from one shard at a time where a part of a stream is taken."""

    def order(self, mix: _native.StreamMix, epoch: int) -> _native.EpochOrder:
        """Return the order of an epoch.

        Raises:
            ConfigError: Such an order there is none, as of stratified batches without room for a stream.
        """
        return mix.order(
            epoch=epoch,
            global_batch_size=self.global_batch_size,
            num_canonical_nodes=self.num_canonical_nodes,
            shuffle=self.shuffle,
            shuffle_seed=self.shuffle_seed,
            shuffle_block_size=self.shuffle_block_size,
            tail=self.tail,
            batching_method=self.batching_method,
            sampling_method=self.sampling_method,
            sampling_granularity=self.sampling_granularity,
        )

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that would go on in other samples or in another order.

        Raises:
            StateMismatchError: Naming the field, both values and the remedy.
        """
        for field in fields(self):
            if field.name in self._idle():
                continue
            ours, saved = getattr(self, field.name), state[field.name]
            if ours != saved or type(ours) is not type(saved):
                raise StateMismatchError(
                    f"`{field.name}` is {saved!r} in the state and {ours!r} here: expected the same, else "
                    f"the order of samples would not go on where it stopped; {_remedy(field.name, saved)}"
                )

    def _idle(self) -> set[str]:
        """The settings that nothing depends on, the others being as they are."""
        idle = set()
        if self.mixture == WHOLE:
            idle |= {"sampling_method", "sampling_granularity"}
        if not self.shuffle:
            idle |= {"shuffle_block_size"} | ({"shuffle_seed"} if self.mixture == WHOLE else set())
        return idle


def _remedy(field: str, saved: object) -> str:
    if field == "fingerprint":
        return "point `remote` or `local` at the data that the run began on, or begin without this state"
    if field == "mixture":
        return "give the streams the weights that the run began with, or begin without this state"
    return f"give `{field}={saved!r}`, or begin without this state"


class Cursor:
    """A place in the data, moved by one iteration at a time.

    Between batch `k` and the next it is `(epoch, k + 1)`; after the last it stays in its epoch until the
    iteration has ended, then it is `(epoch + 1, 0)`.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.batch = 0
        self.share = (0, 0)
        self._turn = 0
        self._is_walked = False

    def begin(self) -> int:
        """Start an iteration, which ends any earlier one's right to move. Returns its token."""
        self._turn += 1
        return self._turn

    def move(self, token: int, batch: int, *, share: tuple[int, int]) -> None:
        """Stand before `batch`, having yielded the one before, of which `share` is (local, global) samples.

        Raises:
            ConfigError: Another iteration or a loaded state has taken over since.
        """
        self.check(token)
        self.batch = batch
        self.share = share
        self._is_walked = True

    def is_spent(self, num_batches: int) -> bool:
        """Return whether an iteration gave all batches of the epoch, and was left before it told the end."""
        return self._is_walked and self.batch >= num_batches

    def end_epoch(self, token: int) -> None:
        """Stand at the start of the next epoch.

        Raises:
            ConfigError: As for `move`.
        """
        self.check(token)
        self.go(self.epoch + 1, 0)

    def go(self, epoch: int, batch: int) -> None:
        """Stand elsewhere; an iteration that is under way has no right to move any more."""
        self.begin()
        self.epoch, self.batch = epoch, batch
        self._is_walked = False

    def state(self, settings: OrderSettings) -> dict[str, Any]:
        """Return the place and all that it depends on: JSON, below 1 KB whatever the size of the data."""
        return {"version": _VERSION, "epoch": self.epoch, "batch": self.batch} | asdict(settings)

    def load(self, state: Mapping[str, Any], settings: OrderSettings, *, num_batches: int) -> None:
        """Go where `state` says.

        Raises:
            StateMismatchError: It is of other data, or of another order.
            ConfigError: It is no state of this kind.
        """
        expected = {"version", "epoch", "batch"} | {field.name for field in fields(settings)}
        if not isinstance(state, Mapping) or set(state) != expected or state["version"] != _VERSION:
            raise ConfigError(
                f"the state is {state!r:.200}: expected the keys "
                f"{sorted(expected)} with version {_VERSION}, as `state_dict()` of hocket.stream returns it"
            )
        settings.check(state)
        try:
            epoch, batch = whole("epoch", state["epoch"]), whole("batch", state["batch"], most=num_batches)
        except ConfigError as error:
            raise ConfigError(f"the state is of no place here: {error}") from None
        self.go(epoch, batch)

    def check(self, token: int) -> None:
        """Refuse an iteration that has no right to move any more.

        Raises:
            ConfigError: As for `move`.
        """
        if token != self._turn:
            raise ConfigError(
                "this iteration is over: another was started, or a state loaded, since; go on with the newest"
            )

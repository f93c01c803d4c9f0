"""Where in the data a run is, and whether a saved place belongs to this data and order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from hocket.stream.errors import ConfigError, StateMismatchError

_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderSettings:
    """Everything that the order of samples depends on, beside the epoch. Ranks and workers are not in it."""

    fingerprint: str
    """Of the data set: columns, and samples, sizes and digests of its shards."""

    num_samples: int
    """Of the data set."""

    global_batch_size: int
    """Samples of a batch over all ranks."""

    num_canonical_nodes: int
    """Lanes that each batch is drawn from, a divisor of the batch."""

    shuffle: bool
    """Whether shards and blocks are permuted."""

    shuffle_seed: int
    """Of the permutations."""

    shuffle_block_size: int
    """Samples of a block."""

    tail: str
    """What becomes of the last batch: `short`, `drop` or `pad`."""

    @property
    def num_batches(self) -> int:
        """Batches of an epoch, the same on every rank."""
        whole, rest = divmod(self.num_samples, self.global_batch_size)
        return whole + (rest > 0 and self.tail != "drop")

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that would go on in other samples or in another order.

        Raises:
            StateMismatchError: Naming the field, both values and the remedy.
        """
        for field in fields(self):
            if not self.shuffle and field.name in ("shuffle_seed", "shuffle_block_size"):
                continue
            ours, saved = getattr(self, field.name), state[field.name]
            if ours != saved or type(ours) is not type(saved):
                raise StateMismatchError(
                    f"`{field.name}` is {saved!r} in the state and {ours!r} here: expected the same, else "
                    f"the order of samples would not go on where it stopped; {_remedy(field.name, saved)}"
                )


def _remedy(field: str, saved: object) -> str:
    if field in ("fingerprint", "num_samples"):
        return "point `remote` or `local` at the data that the run began on, or begin without this state"
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

    def begin(self) -> int:
        """Start an iteration, which ends any earlier one's right to move. Returns its token."""
        self._turn += 1
        return self._turn

    def move(self, token: int, batch: int, *, share: tuple[int, int]) -> None:
        """Stand before `batch`, having yielded the one before, of which `share` is (local, global) samples.

        Raises:
            ConfigError: Another iteration or a loaded state has taken over since.
        """
        self._check(token)
        self.batch = batch
        self.share = share

    def end_epoch(self, token: int) -> None:
        """Stand at the start of the next epoch.

        Raises:
            ConfigError: As for `move`.
        """
        self._check(token)
        self.epoch += 1
        self.batch = 0

    def state(self, settings: OrderSettings) -> dict[str, Any]:
        """Return the place and all that it depends on: JSON, below 1 KB whatever the size of the data."""
        return {"version": _VERSION, "epoch": self.epoch, "batch": self.batch} | asdict(settings)

    def load(self, state: Mapping[str, Any], settings: OrderSettings) -> None:
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
        epoch, batch = state["epoch"], state["batch"]
        if (
            type(epoch) is not int
            or type(batch) is not int
            or epoch < 0
            or not 0 <= batch <= settings.num_batches
        ):
            raise ConfigError(
                f"the state is at epoch {epoch!r}, batch {batch!r}: expected integers, the batch from 0 to "
                f"{settings.num_batches}"
            )
        self.begin()
        self.epoch, self.batch = epoch, batch

    def _check(self, token: int) -> None:
        if token != self._turn:
            raise ConfigError(
                "this iteration is over: another was started, or a state loaded, since; go on with the newest"
            )

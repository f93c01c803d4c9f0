"""Weights of streams that change at given samples of the run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from hocket.stream.errors import ConfigError, StateMismatchError
from hocket.stream.settings.weights import parse_count

#: Sum of whole weights from which on they are rounded, so that native orders can count with them.
_MOST_TOTAL = 2**62

#: The argument `weights`: the first sample of each phase, and the weights of its streams by name.
Weights = Sequence[tuple[int | str, Mapping[str, float]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchStarts:
    """The first samples of the batches of a run, counted over all ranks and epochs."""

    epoch_size: int
    """Number of samples in an epoch, with those that `tail` leaves out."""

    global_batch_size: int

    tail: str
    """Policy for the last batch of an epoch: `short` or `drop`."""

    def first_sample(self, batch: int) -> int:
        """Return the number of samples of the run before a batch, whatever the epochs end with."""
        size = self.global_batch_size
        used = self.epoch_size // size * size if self.tail == "drop" else self.epoch_size
        epoch, rest = divmod(batch, max(1, -(-used // size)))
        return epoch * used + rest * size


def find_batch(value: object) -> int | None:
    """Return the batch that a start such as `50000ba` counts; None for another value."""
    found = re.fullmatch(r"([\d,_]*\d)\s*ba", value.strip().lower()) if isinstance(value, str) else None
    return None if found is None else int(found[1].replace(",", "").replace("_", ""))


def parse_start(name: str, value: int | str, batches: BatchStarts | None) -> int:
    """Return the first sample of a phase: a number of samples, or of batches such as `50000ba`.

    Raises:
        ConfigError: It is neither, or counts batches whose size is not known.
    """
    if (batch := find_batch(value)) is None:
        return 0 if value == 0 else parse_count(name, value)
    if batches is None:
        raise ConfigError(
            f"`{name}` has a phase from {value!r}, which counts batches, and no batch size is known: give "
            "the data set `batch_size` or `global_batch_size`, and not the loader"
        )
    return batches.first_sample(batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixPhase:
    """Weights from a sample of the run on."""

    start: int
    """Number of the first sample, over all ranks and epochs."""

    weights: tuple[float, ...]
    """The weight of each stream."""

    is_set: bool = False
    """Whether `set_weights` made it, in place of an argument."""

    def whole(self) -> list[int]:
        """Return the weights as the smallest whole numbers with the same ratios.

        Computed weights, such as those of a softmax, have too many digits for that. They are rounded to 53
        bits of the total, and none that is above 0 becomes 0.
        """
        exact = [Fraction(str(weight)) for weight in self.weights]
        common = math.lcm(*(share.denominator for share in exact))
        counts = [int(share * common) for share in exact]
        divisor = math.gcd(*counts)
        if (total := sum(counts) // divisor) >= _MOST_TOTAL:
            return [max(round(Fraction(count // divisor, total) * 2**53), int(count > 0)) for count in counts]
        return [count // divisor for count in counts]


@dataclass(frozen=True, kw_only=True, slots=True)
class MixSchedule:
    """The phases of a run, the first of which starts at sample 0."""

    names: tuple[str, ...]
    """Names of the streams."""

    phases: tuple[MixPhase, ...]

    @classmethod
    def parse(
        cls, value: Weights, names: Sequence[str], *, batches: BatchStarts | None = None
    ) -> MixSchedule:
        """Return the schedule that the argument `weights` describes for streams of these names.

        Args:
            value: The argument.
            names: Names of the streams.
            batches: The first samples of batches, for phases in `ba`; None if the batch size is not known.

        Raises:
            ConfigError: It does not describe one, or a phase leaves out a stream or has an unknown one.
        """
        if len(set(names)) < len(names):
            raise ConfigError(
                f"the streams are named {list(names)}: expected different names, by which `weights` refers "
                "to them; give each `Stream` a `name`"
            )
        phases: list[MixPhase] = []
        try:
            pairs = [(start, dict(weights)) for start, weights in value]
        except (TypeError, ValueError):
            pairs = []
        if not pairs:
            raise ConfigError(
                f"`weights` is {value!r:.100}: expected a list of pairs, each of the first sample and the "
                "weights by stream, such as `[(0, {'web': 0.7, 'code': 0.3})]`"
            )
        for start, weights in pairs:
            first = parse_start("weights", start, batches)
            if not phases and first:
                raise ConfigError(f"the first phase of `weights` starts at sample {first}: expected 0")
            if phases and first <= phases[-1].start:
                raise ConfigError(
                    f"`weights` has a phase from sample {first} after one from {phases[-1].start}: expected "
                    "ascending samples"
                )
            phases.append(MixPhase(start=first, weights=_ordered(weights, names)))
        return cls(names=tuple(names), phases=tuple(phases))

    def native(self) -> list[tuple[int, list[int]]]:
        """Return the phases in the form that native orders take."""
        return [(phase.start, phase.whole()) for phase in self.phases]

    def with_weights(self, start: int, weights: Mapping[str, float]) -> MixSchedule:
        """Return the schedule with these weights from a sample on, in place of all later phases.

        Raises:
            ConfigError: A stream is left out or unknown.
        """
        phase = MixPhase(start=start, weights=_ordered(weights, self.names), is_set=True)
        return replace(self, phases=(*self.before(start), phase))

    def check_sizes(self, sizes: Sequence[int]) -> None:
        """Check that each stream that is read in some phase has samples.

        Raises:
            ConfigError: One has none.
        """
        for name, size, *weights in zip(
            self.names, sizes, *(phase.weights for phase in self.phases), strict=True
        ):
            if any(weights) and not size:
                raise ConfigError(
                    f"stream `{name}` has a weight and no samples: expected a weight of 0, or samples"
                )

    def before(self, position: int) -> tuple[MixPhase, ...]:
        """Return the phases that start before a sample."""
        return tuple(phase for phase in self.phases if phase.start < position)

    def state(self) -> list[list[Any]]:
        """Return the phases as JSON values."""
        return [
            [phase.start, dict(zip(self.names, phase.weights, strict=True))] + [True] * phase.is_set
            for phase in self.phases
        ]

    def resume(self, state: Sequence[Sequence[Any]], position: int) -> MixSchedule:
        """Return the schedule of a run that goes on at `position` from a state.

        Phases from the position on are those of this schedule, so that a run may be resumed with other
        weights for its future. Those that `set_weights` made go on, in place of this schedule's phases from
        the first of them on.

        Raises:
            StateMismatchError: The phases before the position differ.
            ConfigError: It is not a state.
        """
        try:
            saved = MixSchedule.parse([(phase[0], phase[1]) for phase in state], self.names)
            marks = [len(phase) > 2 for phase in state]
        except (IndexError, TypeError) as error:
            raise ConfigError(f"`weights` of the state is {state!r:.200}: expected phases") from error
        phases = zip(saved.phases, marks, strict=True)
        saved = replace(saved, phases=tuple(replace(phase, is_set=mark) for phase, mark in phases))
        made = tuple(phase for phase in saved.phases if phase.is_set)
        resumed = replace(self, phases=(*self.before(made[0].start), *made)) if made else self
        past, mine = (
            [(phase.start, phase.whole()) for phase in one.before(position)] for one in (saved, resumed)
        )
        if past != mine:
            raise StateMismatchError(
                f"`weights` before sample {position} are {past} in the state and {mine} here (streams "
                f"{list(self.names)}): expected the same, because the order of samples depends on them; "
                "weights from that sample on may differ"
            )
        return resumed


def _ordered(weights: Mapping[str, float], names: Sequence[str]) -> tuple[float, ...]:
    """Return the weights in the order of the streams."""
    for kind, wrong in (("unknown", set(weights) - set(names)), ("missing", set(names) - set(weights))):
        if wrong:
            raise ConfigError(
                f"`weights` has {kind} streams {sorted(wrong)} in {dict(weights)}: expected one for each "
                f"of {list(names)}, 0 for one that is not read"
            )
    for name, weight in weights.items():
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"the weight of `{name}` is {weight!r}: expected a number from 0")
    if not any(weights.values()):
        raise ConfigError(f"the weights are {dict(weights)}: expected at least one above 0")
    return tuple(weights[name] for name in names)

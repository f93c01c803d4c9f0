"""Progress of the training, in any unit of its duration."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hocket.trainer.state import State
    from hocket.trainer.time import Time


def elapsed_fraction(state: "State") -> float:
    """Return the share of `max_duration` that is trained, 0 to 1, as a Python number.

    If the duration is in epochs of known length, the batches of the present epoch count, too.
    """
    share = state.get_elapsed_duration()
    assert share is not None  # `fit` refuses to start without a duration
    return min(float(share), 1.0)


def has_come(state: "State", time: "Time") -> bool:
    """Return whether training has reached `time`; a time in `dur` is a share of `max_duration`."""
    if time.unit.value == "dur":
        return elapsed_fraction(state) >= time.value
    return state.timestamp.get(time.unit).value >= time.value


def num_batches_in_all(state: "State") -> int | None:
    """Return the number of batches in `max_duration`, or None if it does not follow from the unit."""
    duration = state.max_duration
    assert duration is not None  # `fit` refuses to start without one
    if duration.unit.value == "ba":
        return int(duration.value)
    if duration.unit.value == "ep" and state.dataloader_len:
        return int(duration.value * state.dataloader_len)
    return None

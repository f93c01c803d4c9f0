"""`LossJournal`: the losses of the last steps, whose bits a checkpoint keeps for a later replay."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hocket.trainer.protocols import Work

MOST_STEPS = 4096
"""The most steps that a journal keeps; their losses take 16 to 32 KiB in a checkpoint."""


class LossJournal:
    """The mean losses of the last steps, each with all of its bits.

    A loss in host memory is read at once. One on a device is copied there, and read when the journal is
    saved, so that no step waits for the device.
    """

    def __init__(self) -> None:
        self.num_ranks = 1
        """Number of data-parallel ranks of the run, which the state names."""
        self._losses: deque[tuple[int, Any]] = deque(maxlen=MOST_STEPS)

    def add(self, step: int, loss: torch.Tensor | Work) -> None:
        """Keep the loss of a step: a scalar tensor, or the handle of a reduction over ranks."""
        if self._losses and self._losses[-1][0] >= step:
            self._losses.clear()  # the time started again
        if isinstance(loss, torch.Tensor):
            # A copy, because a captured graph writes each step's loss to the same memory.
            value = loss.tolist() if loss.device.type == "cpu" else loss.detach().clone()
            self._losses.append((step, value))
        else:
            self._losses.append((step, loss))

    def losses(self) -> dict[int, float]:
        """Return the losses by step; waits for the device, and for the ranks of reductions in progress."""
        steps = [step for step, _ in self._losses]
        values = [
            one if isinstance(one, (float, torch.Tensor)) else one.wait().detach() for _, one in self._losses
        ]
        held = [(index, one) for index, one in enumerate(values) if isinstance(one, torch.Tensor)]
        if held:
            # One copy from the device in place of one for each step.
            read = torch.stack([_as_wide(one).reshape(()) for _, one in held]).tolist()
            for (index, _), number in zip(held, read, strict=True):
                values[index] = number
        self._losses = deque(zip(steps, values, strict=True), maxlen=MOST_STEPS)
        return dict(self._losses)

    def state_dict(self) -> dict[str, Any]:
        """Return the losses as bytes, with the ranges of their steps."""
        losses = self.losses()
        kind = "f" if all(map(_is_single, losses.values())) else "d"
        return {
            "steps": [list(part) for part in _ranges(list(losses))],
            "kind": kind,
            "num_ranks": self.num_ranks,
            "values": struct.pack(f"<{len(losses)}{kind}", *losses.values()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        steps = [step for start, stop, stride in state["steps"] for step in range(start, stop, stride)]
        values = struct.unpack(f"<{len(steps)}{state['kind']}", state["values"])
        self._losses = deque(zip(steps, values, strict=True), maxlen=MOST_STEPS)


def same_bits(one: float, other: float) -> bool:
    """Return whether two losses are the same float64; any NaN is the same as any other."""
    return (one != one and other != other) or struct.pack("d", one) == struct.pack("d", other)


def _as_wide(loss: torch.Tensor) -> torch.Tensor:
    return loss.float() if loss.device.type == "mps" else loss.double()  # no float64 on MPS


def _is_single(number: float) -> bool:
    """Return whether a number is exact as a float32."""
    try:
        return same_bits(struct.unpack("f", struct.pack("f", number))[0], number)
    except OverflowError:
        return False


def _ranges(steps: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield rising steps as ranges `(start, stop, stride)`."""
    first = 0
    while first < len(steps):
        stride = steps[first + 1] - steps[first] if first + 1 < len(steps) else 1
        last = first
        while last + 1 < len(steps) and steps[last + 1] - steps[last] == stride:
            last += 1
        yield steps[first], steps[last] + 1, stride
        first = last + 1

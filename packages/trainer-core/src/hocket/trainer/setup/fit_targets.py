"""`FitTargets`: the ends of the calls of `Trainer.fit`, which a resumed run keeps."""

from __future__ import annotations

from typing import Any

from hocket.trainer.checkpoint.registry import CheckpointEntry
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.loop.run import Run
from hocket.trainer.setup.arguments import as_duration, scaled_duration
from hocket.trainer.time import Time, TimeInput


class FitTargets:
    """The durations at which the calls of `fit` end, in order; checkpoints store them."""

    def __init__(self) -> None:
        self._targets: list[str] = []
        self._num_fits = 0

    def register(self, run: Run) -> None:
        """Add the targets to the checkpoints of a run."""

        def load(targets: Any) -> None:
            self._targets = list(targets)

        run.run_state.registry.add(
            CheckpointEntry(name="fits", save=lambda: list(self._targets), load=load, placement="rank_zero")
        )

    def is_repeated(self, run: Run) -> bool:
        """Return whether the run that is resumed had begun the next call of `fit`."""
        return run.is_own_checkpoint and self._num_fits < len(self._targets)

    def set_duration(self, run: Run, duration: TimeInput | None, ratio: float) -> None:
        """Set `max_duration` for the next call of `fit`.

        Args:
            run: The run.
            duration: The length of the call, from the present time; in a resumed run, from the time at which
                the same call began. None for the present `max_duration`.
            ratio: A factor by which `duration` is stretched.

        Raises:
            TrainerConfigError: If there is no duration.
        """
        state, index = run.state, self._num_fits
        is_resumed = self.is_repeated(run)
        if duration is not None:
            length = scaled_duration(as_duration(duration), ratio)
            if is_resumed:
                state.max_duration = Time.from_timestring(self._targets[index])
            else:
                state.max_duration = state.timestamp.get(length.unit) + length
        if state.max_duration is None:
            raise TrainerConfigError(
                "no training duration was given; pass `max_duration=` to `Trainer` or `duration=` to `fit`"
            )
        self._num_fits += 1
        later_targets = self._targets[index + 1 :] if is_resumed else []
        self._targets = [*self._targets[:index], str(state.max_duration), *later_targets]

"""`MixedPrecision`, a training method of earlier Composer releases, which this layer's trainer reads."""

from __future__ import annotations

from hocket.trainer import Algorithm, Event, Logger, State
from hocket.trainer.errors import TrainerConfigError


class MixedPrecision(Algorithm):
    """A setting that makes the trainer compute in half precision: bf16, or fp16 on a GPU without bf16.

    `hocket.compat.composer.Trainer` reads the setting if `precision` is not given.

    Raises:
        TrainerConfigError: At `INIT`, if the trainer's precision is another one.
    """

    events = frozenset({Event.INIT})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Check that the run computes in half precision."""
        if state.precision not in ("amp_bf16", "amp_fp16"):
            raise TrainerConfigError(
                f"`MixedPrecision` is among the algorithms and `precision` is `{state.precision}`; leave "
                "one of them out, or set `precision='amp_bf16'`"
            )

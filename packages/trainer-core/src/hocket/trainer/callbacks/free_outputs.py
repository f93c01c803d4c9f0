"""A callback that frees the model's outputs early."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.trainer.callback import Callback
from hocket.trainer.log.logger import Logger

if TYPE_CHECKING:
    from hocket.trainer.state import State


class FreeOutputs(Callback):
    """Drops `state.outputs` after the loss, before the backward pass.

    Saves memory where outputs are large and the graph does not need them. Training metrics that are updated
    from the outputs, and callbacks that read them later, see None.
    """

    reads_outputs = False

    def after_loss(self, state: State, logger: Logger) -> None:
        """Drop the outputs."""
        state.outputs = None

"""`SkippingStep`: a step that skips given batches, such as bad data in a rerun from a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.protocols import TrainStep
from hocket.trainer.step.step import StepContext

_log = logging.getLogger(__name__)


def step_ranges(given: Any) -> tuple[range, ...]:
    """Return the steps in `steps_to_skip` as ranges of numbers.

    Args:
        given: A number, a `range`, a text such as `"1200-1250"` (both included), or several of them.

    Raises:
        TrainerConfigError: If an item is none of these.
    """
    if given is None:
        return ()
    items = [given] if isinstance(given, (int, str, range)) else given
    if not isinstance(items, Iterable):
        raise TrainerConfigError(_refusal(given))
    return tuple(_as_range(one) for one in items)


def _as_range(given: Any) -> range:
    if isinstance(given, range) and given.step == 1:
        steps = given
    elif isinstance(given, int) and not isinstance(given, bool):
        steps = range(given, given + 1)
    elif (
        isinstance(given, str) and len(parts := given.split("-")) in (1, 2) and all(map(str.isdecimal, parts))
    ):
        steps = range(int(parts[0]), int(parts[-1]) + 1)
    else:
        raise TrainerConfigError(_refusal(given))
    if not steps or steps.start < 1:
        raise TrainerConfigError(_refusal(given))
    return steps


def _refusal(given: Any) -> str:
    return (
        f"`steps_to_skip` has {given!r}; expected numbers of batches from 1 on, as in the log: a number, a "
        "`range`, or a text such as '1200-1250'"
    )


class SkippingStep:
    """A step that skips given batches: the data and the time advance, and the model does not change.

    A skipped step logs no loss, and `state.loss` keeps the loss of the step before.

    Args:
        inner: The step for all other batches.
        context: The parts of the run.
        steps: The numbers of the batches to skip.
    """

    def __init__(self, inner: TrainStep, context: StepContext, steps: tuple[range, ...]) -> None:
        self.inner = inner
        self._context = context
        self._steps = steps

    def compute_gradients(self, batch: Any) -> torch.Tensor:
        """See `TrainStep`."""
        context, state = self._context, self._context.state
        number = state.timestamp.counts.batch + 1
        context.is_skipped = any(number in steps for steps in self._steps)
        if not context.is_skipped:
            return self.inner.compute_gradients(batch)
        _log.info("batch %d: its data is skipped, as `steps_to_skip` asks", number)
        context.mean = None
        if state.precision == "amp_fp16":
            # The update of the gradient scale after each step requires gradients.
            parameters = [parameter for parameter in state.model.parameters() if parameter.requires_grad]
            context.precision.backward(
                torch.stack([(parameter * 0.0).sum() for parameter in parameters]).sum()
            )
        loss = state.loss if isinstance(state.loss, torch.Tensor) and not state.loss.dim() else None
        return torch.zeros((), device=state.device) if loss is None else loss.detach()

    def update(self) -> None:
        """See `TrainStep`."""
        if self._context.is_skipped:
            self._context.skip_update()
        else:
            self.inner.update()

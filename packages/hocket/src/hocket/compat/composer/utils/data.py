"""Functions for data sets and intervals, as `composer.utils`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hocket.trainer import Event, State
from hocket.trainer.interval import IsTime, every
from hocket.trainer.process.extras import import_extra
from hocket.trainer.time import TimeInput


def add_vision_dataset_transform(
    dataset: Any, transform: Callable[[Any], Any], is_tensor_transform: bool = False
) -> None:
    """Add a transform to a data set of torchvision's kind.

    Args:
        dataset: The data set, whose attribute `transform` is changed.
        transform: A function of a picture, or of a tensor.
        is_tensor_transform: Put it after the conversion to a tensor; False puts it before.
    """
    transforms: Any = import_extra(
        "torchvision.transforms", "torchvision", needed_by="add_vision_dataset_transform"
    )

    present = dataset.transform
    steps = list(present.transforms) if isinstance(present, transforms.Compose) else [present]
    steps = [step for step in steps if step is not None]
    conversions = (transforms.ToTensor, transforms.PILToTensor)
    position = next((index for index, step in enumerate(steps) if isinstance(step, conversions)), None)
    if position is None:
        position = len(steps)
    elif is_tensor_transform:
        position += 1
    steps.insert(position, transform)
    dataset.transform = steps[0] if len(steps) == 1 else transforms.Compose(steps)


def create_interval_scheduler(
    interval: TimeInput | IsTime,
    include_end_of_training: bool = True,
    checkpoint_events: bool = True,
    final_events: set[Event] | None = None,
) -> IsTime:
    """Return a function `(state, event) -> bool` that is true once each interval.

    Args:
        interval: A number of epochs, a time, or such a function.
        include_end_of_training: Whether it is also true when the training's duration is reached.
        checkpoint_events: Whether it is true at the `*_CHECKPOINT` events rather than at `*_END`.
        final_events: The events at which it is true at the end of the training, such as `{Event.FIT_END}`;
            None for the events of the interval.
    """
    if final_events is None or not include_end_of_training:
        return every(
            interval, include_end_of_training=include_end_of_training, checkpoint_events=checkpoint_events
        )
    is_due, events = every(interval, checkpoint_events=checkpoint_events), frozenset(final_events)
    last_batch = -1

    def is_time(state: State, event: Event) -> bool:
        nonlocal last_batch
        batch = state.timestamp.counts.batch
        is_over = event in events and (state.get_elapsed_duration() or 0.0) >= 1.0
        if not is_due(state, event) and not (is_over and batch != last_batch):
            return False
        last_batch = batch
        return True

    return is_time

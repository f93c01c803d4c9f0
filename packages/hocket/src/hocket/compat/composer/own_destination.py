"""Adapters between the signatures that Composer and Hocket have for the methods of a destination."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hocket.trainer import State
from hocket.trainer.log.destination import Destination
from hocket.trainer.log.logged_images import ImageBatch, capture_images


def accept_calls(destination: Destination, state: State) -> None:
    """Adapt the methods of a destination, so that both the trainer and a script can call them.

    A script's own destination has Composer's signatures: `upload_file(state, remote_file_name, file_path,
    overwrite)` and `log_images(images, name, channels_last, step, masks, mask_class_labels, use_table)`. A
    script calls `log_images` of any destination with these arguments.

    Args:
        destination: The destination, changed in place.
        state: The run's state, for its time and for `upload_file`.
    """
    run = weakref.ref(state)
    method = _own(destination, "upload_file")
    if "state" in inspect.signature(method).parameters:
        destination.upload_file = functools.partial(_upload, method, run)  # type: ignore[method-assign]
    method = _own(destination, "log_images")
    is_composers = "channels_last" in inspect.signature(method).parameters
    show = _show if is_composers else _capture
    destination.log_images = functools.partial(show, method, run)  # type: ignore[method-assign]


def _own(destination: Destination, name: str) -> Callable[..., None]:
    """Return a method without the adapter that an earlier run put around it."""
    method: Callable[..., None] = getattr(destination, name)
    if isinstance(method, functools.partial):
        method = method.args[0]
    return method


def _upload(wrapped: Callable[..., None], run: weakref.ref[State], *args: Any, **arguments: Any) -> None:
    if args and isinstance(args[0], (str, Path)) and "state" not in arguments:
        args = (run(), *args)
    wrapped(*args, **arguments)


def _show(wrapped: Callable[..., None], _: Any, images: Any, *args: Any, **arguments: Any) -> None:
    if not isinstance(images, ImageBatch):
        wrapped(images, *args, **arguments)
        return
    name, step = args
    wrapped(
        images.images,
        name,
        channels_last=True,
        step=step,
        masks=images.masks or None,
        mask_class_labels=images.mask_class_labels or None,
        use_table=images.use_table,
    )


def _capture(
    wrapped: Callable[..., None], run: weakref.ref[State], images: Any, *args: Any, **arguments: Any
) -> None:
    if isinstance(images, ImageBatch):
        wrapped(images, *args, **arguments)
    else:
        wrapped(*_captured(run(), images, *args, **arguments))


def _captured(
    state: Any,
    images: Any,
    name: str = "Images",
    channels_last: bool = False,
    step: int | None = None,
    masks: Any = None,
    mask_class_labels: Any = None,
    use_table: bool = True,
) -> tuple[ImageBatch, str, int]:
    """Return the arguments of Hocket's destinations for those of Composer's."""
    read = capture_images(
        images,
        channels_last=channels_last,
        masks=masks,
        mask_class_labels=mask_class_labels,
        use_table=use_table,
    )
    return read(), name, state.timestamp.counts.batch if step is None else step


__all__ = ["accept_calls"]

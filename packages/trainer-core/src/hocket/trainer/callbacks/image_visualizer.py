"""A callback that logs input images."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.trainer.callback import Callback
from hocket.trainer.checks import check_count
from hocket.trainer.data.batch_access import get_item
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.log.logger import Logger
from hocket.trainer.time import TimeInput, TimeUnit, ensure_time

if TYPE_CHECKING:
    from hocket.trainer.state import State

Key = str | int | Callable[[Any], Any]


class ImageVisualizer(Callback):
    """Logs images of a training batch at intervals, and of the first batch of each evaluation.

    The images are logged as `Images/Train` and `Images/<evaluator's label>`, as the model gets them:
    augmented and normalized. With `mode="segmentation"` the targets, and the class of the largest output in
    each pixel, are logged as masks. If a batch is split into microbatches, the first microbatch is shown.

    Args:
        interval: Batches or epochs between two training batches that are shown, such as `"100ba"`; 0 for
            none.
        mode: `"input"` or `"segmentation"`.
        num_images: Number of images of a batch, at least 1.
        channels_last: Whether the channels are the last dim.
        input_key: Place of the images in a batch: a key, an index, or a function of the batch.
        target_key: Place of the `(N, H, W)` class numbers in a batch, for `"segmentation"`.

    Raises:
        TrainerConfigError: If an argument is out of range.
    """

    #: Whether images without masks are logged as a table too.
    uses_table = False

    def __init__(
        self,
        interval: TimeInput = "100ba",
        mode: str = "input",
        num_images: int = 8,
        channels_last: bool = False,
        input_key: Key = 0,
        target_key: Key = 1,
    ) -> None:
        if mode not in ("input", "segmentation"):
            raise TrainerConfigError(f"`mode` is `{mode}`; expected `input` or `segmentation`")
        given = ensure_time(interval, TimeUnit.BATCH)
        if given.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH):
            raise TrainerConfigError(
                f"`interval` is `{given}`; expected batches or epochs, such as `100ba` or `1ep`"
            )
        if given.value < 0:
            raise TrainerConfigError(f"`interval` is `{given}`; expected at least 1, or 0 for no images")
        check_count("num_images", num_images)
        self.interval = given
        self.mode = mode
        self.num_images = num_images
        self.channels_last = channels_last
        self.input_key = input_key
        self.target_key = target_key
        self._shown: tuple[str, int] | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Forget which batch was shown, since the batch count may start again."""
        self._shown = None

    def eval_start(self, state: State, logger: Logger) -> None:
        """Forget which batch was shown, since two evaluations may follow one training batch."""
        self._shown = None

    def before_forward(self, state: State, logger: Logger) -> None:
        """Log the inputs, if it is time."""
        if self.mode == "input" and self._is_due(state):
            self._log(state, logger, "Images/Train")

    def before_loss(self, state: State, logger: Logger) -> None:
        """Log inputs, targets and outputs, if it is time."""
        if self.mode == "segmentation" and self._is_due(state):
            self._log(state, logger, "Images/Train")

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        """Log the first batch of an evaluation."""
        if state.eval_timestamp.counts.batch == 0:
            self._log(state, logger, f"Images/{state.dataloader_label or 'eval'}")

    def _is_due(self, state: State) -> bool:
        counts, interval = state.timestamp.counts, int(self.interval.value)
        if interval == 0:
            return False
        if self.interval.unit is TimeUnit.BATCH:
            return counts.batch % interval == 0
        return counts.batch_in_epoch == 0 and counts.epoch % interval == 0

    def _log(self, state: State, logger: Logger, name: str) -> None:
        batch_key = (name, state.timestamp.counts.batch)
        if not logger.destinations or batch_key == self._shown:
            return
        self._shown = batch_key
        images = get_item(state.batch, self.input_key)[: self.num_images]
        masks: dict[str, Tensor] | None = None
        if self.mode == "segmentation":
            masks = {"ground truth": get_item(state.batch, self.target_key)[: self.num_images]}
            if isinstance(state.outputs, Tensor):
                masks["prediction"] = state.outputs.detach()[: self.num_images].argmax(1)
        logger.log_images(
            images.detach() if isinstance(images, torch.Tensor) else images,
            name,
            channels_last=self.channels_last,
            masks=masks,
            use_table=self.uses_table or masks is not None,
        )

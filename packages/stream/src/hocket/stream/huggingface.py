"""`StreamingCallback`: Hugging Face's Trainer resumes within an epoch of a `StreamingDataLoader`."""

from __future__ import annotations

from typing import Any

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ImportError("StreamingCallback needs transformers: pip install transformers accelerate") from error

from hocket.stream.errors import ConfigError
from hocket.stream.torch import StreamingDataLoader


class StreamingCallback(TrainerCallback, ExportableState):
    """A callback that keeps the loader's position in the Trainer's checkpoints and goes on from it.

    The Trainer's own way of resuming fetches batches from a loader that it makes itself, so this callback
    sets `ignore_data_skip`. The position is in `trainer_state.json`; it is the same on all ranks, and
    continues on any number of them. The Trainer's `get_train_dataloader` returns a `StreamingDataLoader`.

    Raises:
        ConfigError: When the training starts, if the loader is another one, or if a run is resumed from a
            checkpoint without a position, or in an epoch whose last accumulation of gradients the Trainer
            would leave out.

    Example:
        >>> trainer = StreamingTrainer(model, args=arguments, callbacks=[StreamingCallback()])
        >>> trainer.train(resume_from_checkpoint=True)
    """

    def __init__(self) -> None:
        self.loader_state: dict[str, Any] | None = None
        """The position in the checkpoint that the run was resumed from."""
        self._loader: StreamingDataLoader | None = None

    def state(self) -> dict[str, Any]:
        """Return the position for `trainer_state.json`; called by the Trainer for each checkpoint."""
        state = self.loader_state if self._loader is None else self._loader.state_dict()
        return {"args": {}, "attributes": {"loader_state": state}}

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Turn off the Trainer's own way of resuming."""
        args.ignore_data_skip = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the loader to the position of the checkpoint.

        Raises:
            ConfigError: See the class.
        """
        loader = kwargs.get("train_dataloader")
        if not isinstance(loader, StreamingDataLoader):
            raise ConfigError(
                f"the Trainer reads a `{type(loader).__name__}`: expected a `StreamingDataLoader` with "
                "`StreamingCallback`; return one from `get_train_dataloader`"
            )
        self._loader = loader
        if not state.global_step:
            return
        saved = state.stateful_callbacks.get(type(self).__name__)
        saved = saved[0] if isinstance(saved, list) else saved
        position = None if saved is None else saved["attributes"]["loader_state"]
        if position is None:
            raise ConfigError(
                f"the checkpoint of step {state.global_step} was saved without `{type(self).__name__}`, so "
                "it has no position in the data: resume from a checkpoint that was saved with it"
            )
        if not args.ignore_data_skip:
            raise ConfigError(
                "`ignore_data_skip` is False, so the Trainer would skip batches that the loader does not "
                "yield again: set it to True, or give the callback to the Trainer's `callbacks`"
            )
        loader.load_state_dict(position)
        cursor, num_batches = loader.dataset.cursor, len(loader)
        if cursor.batch >= num_batches:
            # The Trainer counts this epoch as over.
            loader.end_epoch()
        elif cursor.batch and num_batches % args.gradient_accumulation_steps:
            raise ConfigError(
                f"the checkpoint is within an epoch of {num_batches} batches, and "
                f"`gradient_accumulation_steps` is {args.gradient_accumulation_steps}: after a resume, the "
                "Trainer makes no step with the last batches of an epoch that it does not divide; resume "
                "from a checkpoint at the end of an epoch"
            )

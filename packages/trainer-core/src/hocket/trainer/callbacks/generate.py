"""A callback that logs what a language model generates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hocket.trainer.callback import Callback
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.event import Event
from hocket.trainer.interval import IsTime, every
from hocket.trainer.logger import Logger
from hocket.trainer.time import TimeInput

if TYPE_CHECKING:
    from hocket.trainer.state import State


class Generate(Callback):
    """Generates from prompts at intervals and at the end of training, and logs the texts as a table.

    For models with a `tokenizer` and a `generate` method, such as `HuggingFaceModel`. Every rank generates,
    since the parameters may be sharded; rank 0 logs. The model's mode and the random state of training are
    left as they were.

    Args:
        prompts: The prompts.
        interval: How often, such as `"1ep"`; or `(state, event) -> bool`.
        batch_size: Prompts at a time, at least 1; all of them if None.
        **kwargs: Arguments of the model's `generate`, such as `max_new_tokens`.

    Raises:
        TrainerConfigError: If there are no prompts, or `batch_size` is below 1; at the start of training, if
            the model cannot generate.
    """

    reads_outputs = False

    def __init__(
        self,
        prompts: Sequence[str],
        interval: TimeInput | IsTime = "1ep",
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(prompts, str) or not prompts:
            raise TrainerConfigError("`prompts` is a text or empty; expected a list of at least one text")
        if batch_size is not None and batch_size < 1:
            raise TrainerConfigError(f"`batch_size` is {batch_size}; expected at least 1, or None for all")
        self.prompts = list(prompts)
        self.batch_size = batch_size or len(self.prompts)
        self.generate_kwargs = kwargs
        self._is_time = every(interval, include_end_of_training=True)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Check the model."""
        model: Any = state.model
        if not hasattr(model, "generate") or getattr(model, "tokenizer", None) is None:
            raise TrainerConfigError(
                f"`Generate` needs a model with `tokenizer` and `generate`, such as `HuggingFaceModel(model, "
                f"tokenizer=…)`; `{type(model).__name__}` lacks them"
            )

    def batch_end(self, state: State, logger: Logger) -> None:
        """Generate, if it is time."""
        if self._is_time(state, Event.BATCH_END):
            self._generate(state, logger)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Generate, if it is time."""
        if self._is_time(state, Event.EPOCH_END):
            self._generate(state, logger)

    def _generate(self, state: State, logger: Logger) -> None:
        model: Any = state.model
        was_training = model.training
        model.eval()
        devices = [state.device] if state.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices), torch.no_grad():
                rows = [
                    [prompt, text]
                    for start in range(0, len(self.prompts), self.batch_size)
                    for prompt, text in self._texts(
                        model, self.prompts[start : start + self.batch_size], state
                    )
                ]
        finally:
            model.train(was_training)
        logger.log_table(["prompt", "generation"], rows, name="generations")

    def _texts(self, model: Any, prompts: list[str], state: State) -> list[tuple[str, str]]:
        tokenizer = model.tokenizer
        side, tokenizer.padding_side = tokenizer.padding_side, "left"
        pad_token = tokenizer.pad_token
        if pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        try:
            tokens = tokenizer(prompts, return_tensors="pt", padding=True)
            pad_token_id = tokenizer.pad_token_id
        finally:
            tokenizer.padding_side = side
            if pad_token is None:
                tokenizer.pad_token = None
        options = {"pad_token_id": pad_token_id, **self.generate_kwargs}
        if state.parallelism.data_parallel[1] > 1:
            # Sharded ranks gather parameters together, so none may stop generating before the others.
            options.setdefault("synced_gpus", True)
        ids, mask = (tokens[name].to(state.device) for name in ("input_ids", "attention_mask"))
        produced = model.generate(ids, attention_mask=mask, **options)
        texts = tokenizer.batch_decode(produced[:, ids.shape[1] :], skip_special_tokens=True)
        return list(zip(prompts, texts, strict=True))

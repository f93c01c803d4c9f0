"""A callback that logs inputs and outputs of evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.trainer.callback import Callback
from hocket.trainer.checks import check_count
from hocket.trainer.log.deferred_value import capture_tensor
from hocket.trainer.log.logger import Logger

if TYPE_CHECKING:
    from hocket.trainer.state import State


class EvalOutputLogging(Callback):
    """Logs the first samples of each evaluation as a table `eval_outputs/<label>`.

    With a model that has a `tokenizer`, token ids are shown as text and outputs as the most likely tokens;
    else inputs, outputs and targets are shown as numbers, outputs with several classes as the likeliest one.

    Args:
        num_samples: Samples of rank 0's first batch to log.
        max_values: Number of values of a sample to show.
    """

    reads_outputs = False

    def __init__(self, num_samples: int = 8, max_values: int = 16) -> None:
        check_count("num_samples", num_samples)
        check_count("max_values", max_values)
        self.num_samples = num_samples
        self.max_values = max_values
        self._captured: dict[str, Any] = {}

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        """Capture the first batch."""
        if state.eval_timestamp.counts.batch or self._captured or not logger.destinations:
            return
        inputs, targets = _inputs_and_targets(state.batch)
        for name, value in (("input", inputs), ("output", _outputs(state.outputs)), ("target", targets)):
            if isinstance(value, Tensor) and value.dim() > 0:
                self._captured[name] = capture_tensor(value[: self.num_samples])

    def eval_end(self, state: State, logger: Logger) -> None:
        """Log the captured samples."""
        captured, self._captured = self._captured, {}
        if not captured:
            return
        columns = list(captured)
        cells = [self._show(name, captured[name](), state) for name in columns]
        logger.log_table(columns, list(zip(*cells, strict=False)), f"eval_outputs/{state.dataloader_label}")

    def _show(self, name: str, value: Tensor, state: State) -> list[str]:
        tokenizer: Any = getattr(state.model, "tokenizer", None)
        if name == "output" and value.is_floating_point() and value.dim() > 1 and value.shape[-1] > 1:
            value = value.argmax(-1)
        if tokenizer is not None and value.dim() == 2 and not value.is_floating_point():
            rows = [[token for token in row if token >= 0] for row in value.tolist()]
            return [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
        return [self._numbers(sample) for sample in value]

    def _numbers(self, sample: Tensor) -> str:
        flat = sample.flatten()[: self.max_values].tolist()
        text = ", ".join(f"{number:.4g}" if isinstance(number, float) else str(number) for number in flat)
        return text + (", …" if sample.numel() > self.max_values else "")


def _inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, dict):
        inputs = batch.get("input_ids", next(iter(batch.values()), None))
        return inputs, batch.get("labels")
    if isinstance(batch, tuple | list) and batch:
        return batch[0], batch[1] if len(batch) > 1 else None
    return batch, None


def _outputs(outputs: Any) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs
    return getattr(outputs, "logits", outputs.get("logits") if isinstance(outputs, dict) else None)

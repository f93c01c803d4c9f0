"""The entries of a batch that a `transformers` model takes, and labels under the names of data sets."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hocket.trainer.errors import DataError

LABEL_NAMES = ("label", "label_ids")
"""The columns that the collators of `transformers` rename to `labels`."""

_PADDING_FREE = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
"""The entries of a batch without padding that models of `transformers` pass on to their layers."""


class BatchArguments:
    """The arguments of a transformers model's `forward`, taken from a batch.

    A batch with `label` or `label_ids` and no `labels` is taken as the collators of `transformers` give it:
    renamed, integers as int64 and doubles as float32. No cache of keys and values is kept, because a model
    that keeps one attends across the sequences of a batch without padding. A model that computes its loss
    only when `return_loss` is set is told so.

    Args:
        model: The model, without an adapter around it.
    """

    def __init__(self, model: Any) -> None:
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        can_generate = getattr(model, "can_generate", None)
        self.names = frozenset(parameters) - {"args", "kwargs"} | (
            _PADDING_FREE if takes_any else frozenset()
        )
        self.label_names = tuple(name for name in parameters if _is_label(name, model))
        self._model_name = type(model).__name__
        # A model that generates passes the argument on to its decoder.
        self._takes_cache = "use_cache" in self.names or (
            takes_any and callable(can_generate) and can_generate()
        )
        self._defaults = {"return_loss": True} if "return_loss" in self.names else {}

    @property
    def can_return_loss(self) -> bool:
        """Whether the model can compute a loss: it takes labels, or `return_loss`."""
        return bool(self.label_names) or "return_loss" in self.names

    def take(self, batch: Any) -> dict[str, Any]:
        """Return the entries of a batch that the model's `forward` takes.

        Raises:
            DataError: If the batch is not a mapping, or has no entry that the model takes.
        """
        if not isinstance(batch, Mapping):
            raise DataError(
                f"the batch is a `{type(batch).__name__}`; `HuggingFaceModel` expects a mapping with the "
                f"names that `{self._model_name}.forward` takes. Make one in the loader's `collate_fn`, or "
                "with `DataSpec(dataloader=…, batch_transforms=function)`"
            )
        arguments = {name: value for name, value in batch.items() if name in self.names}
        if not arguments:
            raise DataError(
                f"the batch has the keys {listed(batch)}, and `{self._model_name}.forward` takes none of "
                f"them; it takes {listed(self.names)}"
            )
        return self.completed(arguments, batch)

    def completed(self, arguments: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments with those that a batch has under another name, and with the fixed ones."""
        completed = {**self._defaults, **arguments}
        # Without a mask and without a cache, the model looks for several sequences in a row, and reads the
        # device for it. Only positions can tell them apart.
        if self._takes_cache and ("position_ids" in completed or "attention_mask" in completed):
            completed.setdefault("use_cache", False)
        if "labels" in self.names and "labels" not in batch and (labels := self.labels(batch)) is not None:
            completed["labels"] = labels
            for name in LABEL_NAMES:
                completed.pop(name, None)
        return completed

    def labels(self, batch: Any) -> Any:
        """Return the labels of a batch; None if it has none, or is not a mapping."""
        if not isinstance(batch, Mapping):
            return None
        if "labels" in batch:
            return batch["labels"]
        for name in LABEL_NAMES:
            if name not in self.names and isinstance(labels := batch.get(name), Tensor):
                return _as_collated(labels)
        return None

    def describe_absence(self, batch: Mapping[str, Any]) -> str:
        """Say for an error message why the model computed no loss for a batch, and what to do."""
        wanted = " or ".join(f"`{name}`" for name in self.label_names) or "labels"
        return (
            f"`{self._model_name}` computed no loss, because the batch has no {wanted}; its keys are "
            f"{listed(batch)}; {_advice(batch, wanted)}"
        )


def is_of_transformers(module: nn.Module) -> bool:
    """Return whether a module is a model of `transformers`, without importing that package."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__)


def listed(names: Any) -> str:
    """Return names in backticks, sorted, for a message."""
    return ", ".join(f"`{name}`" for name in sorted(map(str, names))) or "none"


def _is_label(name: str, model: nn.Module) -> bool:
    is_position = name in ("start_positions", "end_positions")
    return "label" in name or (is_position and "QuestionAnswering" in type(model).__name__)


def _as_collated(labels: Tensor) -> Tensor:
    if labels.dtype is torch.float64:
        return labels.float()
    return labels if labels.is_floating_point() else labels.long()


def _advice(batch: Mapping[str, Any], wanted: str) -> str:
    for name in (*LABEL_NAMES, "targets", "target"):
        if name in batch and "`labels`" in wanted:
            return (
                f"rename `{name}` to `labels`, in the loader's `collate_fn` or with `DataSpec(dataloader=…, "
                f"batch_transforms=lambda batch: {{**batch, 'labels': batch['{name}']}})`"
            )
    return f"add {wanted} to the batch"

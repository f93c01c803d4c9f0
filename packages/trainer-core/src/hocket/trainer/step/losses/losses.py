"""Conversions from the forms in which a model may give its loss to the form that the loop uses."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hocket.trainer.checks import refuse_class
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.models.base import ComposerModel, LossSum
from hocket.trainer.models.huggingface_batch import BatchArguments, is_of_transformers
from hocket.trainer.process.rng import capture_rng, restore_rng
from hocket.trainer.protocols import Pipelined

Loss: TypeAlias = torch.Tensor | LossSum

_TARGET_NAMES = ("labels", "label", "targets", "target")


def total_of(loss: Any) -> Loss:
    """Return the total of a loss with parts: the `total` of a dict, else the sum of its parts.

    Raises:
        TrainerConfigError: If it is no scalar tensor, `LossSum`, dict or sequence of them.
    """
    if isinstance(loss, LossSum):
        return loss
    if isinstance(loss, torch.Tensor):
        if loss.numel() == 1:
            return loss.reshape(()) if loss.ndim else loss
        raise TrainerConfigError(
            f"the loss has the shape {list(loss.shape)}; expected a scalar: return its mean, or a `LossSum`"
        )
    if isinstance(loss, Mapping) and loss:
        return total_of(loss["total"] if "total" in loss else list(loss.values()))
    if isinstance(loss, Sequence) and loss:
        return torch.stack([part.reshape(()) for part in map(_tensor, loss)]).sum()
    raise TrainerConfigError(
        f"the loss is a `{type(loss).__name__}`; expected a scalar tensor, a `LossSum`, or a dict or list of "
        "tensors"
    )


def of_last_stage(loss: Loss, parallelism: Any) -> Loss:
    """Return a loss without gradients as the last stage of a pipeline, which has the head, computes it.

    Collective with stages. With any other parallelism the result is `loss`.
    """
    if not isinstance(parallelism, Pipelined):
        return loss
    if isinstance(loss, torch.Tensor):
        return parallelism.tell_from_last(loss)
    total, weight = (
        parallelism.tell_from_last(torch.as_tensor(one, device=loss.total.device))
        for one in (loss.total, loss.weight)
    )
    return LossSum(total, weight)


def _tensor(part: Any) -> torch.Tensor:
    total = total_of(part)
    if isinstance(total, torch.Tensor):
        return total
    raise TrainerConfigError(
        "a `LossSum` is one part of several; return one `LossSum` with the sum of all parts"
    )


class ModuleWithLoss(ComposerModel):
    """A plain module as a model of the trainer: calls the module with a batch, and computes the loss.

    A pair (inputs, targets) calls `module(inputs)`; a mapping calls `module(**entries)` with the entries that
    its `forward` names; any other batch is passed whole. A model of `transformers` gets the labels of a data
    set's batch under its own name, as in `HuggingFaceModel`.

    Args:
        module: The user's module; its `state_dict` names get the prefix `module.`.
        loss_fn: `(outputs, targets) -> loss`; or `(outputs, batch) -> loss` if its second parameter is named
            `batch`; None for the module's own `loss`, or that of its outputs.
    """

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.module = module
        refuse_class("loss_fn", loss_fn)
        self._loss_fn = loss_fn
        self._takes_batch = loss_fn is not None and _parameters(loss_fn)[1:2] == ["batch"]
        self._takes_entries = self._takes_batch and _takes_any_name(loss_fn)
        self._own_loss = getattr(module, "loss", None)
        self._names = _parameters(module)
        self._takes_any_name = _takes_any_name(module)
        self._adapted = BatchArguments(module) if is_of_transformers(module) else None

    def _get_name(self) -> str:
        return type(self.module).__name__

    def forward(self, batch: Any) -> Any:
        """Return the module's outputs."""
        if callable(self._own_loss):
            return self.module(batch)
        if isinstance(batch, Mapping):
            # Of `forward(**batch)`, the batch is the entries.
            if self._names[:1] == ["batch"] and not (len(self._names) == 1 and self._takes_any_name):
                return self.module(batch)
            names = batch if self._takes_any_name else [name for name in self._names if name in batch]
            arguments = {name: batch[name] for name in names}
            if self._adapted is not None:
                arguments = self._adapted.completed(arguments, batch)
            return self.module(**arguments)
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return self.module(batch[0])
        return self.module(batch)

    @property
    def has_loss_in_outputs(self) -> bool:
        """Whether `forward` computes the loss."""
        return self._loss_fn is None and not callable(self._own_loss)

    def loss(self, outputs: Any, batch: Any) -> Any:
        """Return the loss: from `loss_fn`, from the module's own method, or from the outputs."""
        if self._takes_entries and isinstance(batch, Mapping):
            return self._loss_fn(outputs, **batch)  # type: ignore[misc]  # it takes the batch
        if self._loss_fn is not None:
            return self._loss_fn(outputs, batch if self._takes_batch else targets_of(batch))
        if callable(self._own_loss):
            return self._own_loss(batch, outputs)
        output_loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if output_loss is None:
            raise TrainerConfigError(
                f"the model has no `loss(outputs, batch)`, and its output, a `{type(outputs).__name__}`, "
                f"has no `loss`; define the method, pass `loss_fn=`, or {_labels_advice(self.module, batch)}"
            )
        return output_loss

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """Return the outputs that metrics are updated with: from the module's own method if it has one."""
        method = getattr(self.module, "eval_forward", None)
        return super().eval_forward(batch, outputs) if method is None else method(batch, outputs)

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        """Return the metrics of the module, if it states any."""
        method = getattr(self.module, "get_metrics", None)
        return {} if method is None else method(is_train=is_train)

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        """Add a batch to a metric: by the module's own method, else with outputs and targets."""
        method = getattr(self.module, "update_metric", None)
        if method is None:
            metric.update(outputs, targets_of(batch))
        else:
            method(batch, outputs, metric)


def as_model(model: Any, loss_fn: Any = None) -> nn.Module:
    """Return a model with `forward(batch)` and `loss(outputs, batch)`: itself if it has them, else wrapped.

    A model in `DistributedDataParallel` is taken out of it, since the trainer averages the gradients.

    Raises:
        TrainerConfigError: If it is not a module, or has no loss that can be computed.
    """
    if isinstance(model, DistributedDataParallel):
        model = _without_ddp(model)
    if not isinstance(model, nn.Module):
        raise TrainerConfigError(
            f"`model` is a `{type(model).__name__}`; expected a `torch.nn.Module` with `forward(batch)` and "
            "`loss(outputs, batch)`, such as a `hocket.trainer.models.ComposerModel`, or any module and "
            "`loss_fn=`"
        )
    if loss_fn is not None:
        if not callable(loss_fn):
            raise TrainerConfigError(
                f"`loss_fn` is a `{type(loss_fn).__name__}`; expected a function or a module"
            )
        return ModuleWithLoss(model, loss_fn)
    own_loss = getattr(model, "loss", None)
    if callable(own_loss):
        return ModuleWithLoss(model) if _parameters(own_loss)[:2] == ["batch", "outputs"] else model
    takes_labels = {*_TARGET_NAMES, "batch"} & set(_parameters(model))
    if not (takes_labels or _takes_any_name(model)):
        raise TrainerConfigError(
            f"`model`, a `{type(model).__name__}`, has no `loss(outputs, batch)`, and its `forward` takes no "
            "labels to compute one from; pass `loss_fn=`, such as `torch.nn.functional.cross_entropy`, or a "
            "`hocket.trainer.models.ComposerModel`"
        )
    return ModuleWithLoss(model)


def name_of(model: nn.Module) -> str:
    """Return the name of a model's class, which is the user's where the trainer wrapped a module."""
    return type(model.module if isinstance(model, ModuleWithLoss) else model).__name__


def is_compiled(model: nn.Module) -> bool:
    """Return whether a part of a model is called through `torch.compile`."""
    return any(
        module._compiled_call_impl is not None
        or type(module).__name__ == "OptimizedModule"
        or _is_compiled_function(getattr(module, "forward", None))  # scripted lists have none
        for module in model.modules()
    )


def _is_compiled_function(function: Any) -> bool:
    # `torch.compiler.disable` sets both attributes.
    is_wrapped = hasattr(function, "_torchdynamo_orig_callable")
    return is_wrapped and not getattr(function, "_torchdynamo_disable", False)


def eagerly() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which compiled functions run without their compilation."""
    if "torch._dynamo" not in sys.modules:  # nothing can be compiled
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextlib.contextmanager
def trying(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within the context, run a model without gradients and compilation; afterwards restore what it changed.

    Restored are the random generators of this process and the model's buffers.
    """
    generators = capture_rng(device)
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        with torch.no_grad(), eagerly():
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        restore_rng(generators, device)


def _without_ddp(model: DistributedDataParallel) -> nn.Module:
    """Return the module in a `DistributedDataParallel`, whose reducer would race with the trainer's.

    Raises:
        TrainerConfigError: If it has a communication hook, which would be lost.
    """
    if model._comm_hooks:
        raise TrainerConfigError(
            "`model` is in `DistributedDataParallel` with a communication hook, and the trainer averages "
            "gradients itself, without the hook; pass `model.module`"
        )
    module: nn.Module = model.module
    return module


def _labels_advice(module: nn.Module, batch: Any) -> str:
    """Describe how to put labels into a batch, or how to rename those that it has."""
    if isinstance(batch, Mapping):
        wanted = [name for name in _TARGET_NAMES if name in _parameters(module) and name not in batch]
        present = [name for name in (*_TARGET_NAMES, "label_ids") if name in batch]
        if wanted and present:
            return (
                f"rename `{present[0]}` to `{wanted[0]}`, which `forward` takes: in the loader's "
                "`collate_fn`, or with `DataSpec(dataloader=…, batch_transforms=…)`"
            )
    return "put labels into the batch"


def _signature(function: Any) -> Mapping[str, inspect.Parameter]:
    target = function.forward if isinstance(function, nn.Module) else function
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}


def _parameters(function: Any) -> list[str]:
    return list(_signature(function))


def _takes_any_name(function: Any) -> bool:
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in _signature(function).values())


def targets_of(batch: Any) -> Any:
    """Return the targets of a batch: the second item, or the entry `labels`, `label`, `target(s)`.

    Raises:
        TrainerConfigError: If it has none of them.
    """
    if isinstance(batch, Mapping):
        for name in _TARGET_NAMES:
            if name in batch:
                return batch[name]
        raise TrainerConfigError(
            f"`loss_fn` takes targets, and the batch has the keys {sorted(map(str, batch))}; expected "
            "`labels`, or a `loss_fn(outputs, batch)`"
        )
    if isinstance(batch, Sequence) and len(batch) > 1:
        return batch[1]
    raise TrainerConfigError(
        f"`loss_fn` takes targets, and a batch is a `{type(batch).__name__}`; expected a pair (inputs, "
        "targets), or a `loss_fn(outputs, batch)`"
    )

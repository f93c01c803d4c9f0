"""Models, as `composer.models`."""

from __future__ import annotations

import copy
from abc import ABC
from collections.abc import Mapping
from typing import Any, Self

from torch import nn

import hocket.trainer.models as _models
from hocket.compat.composer.initializers import Initializer
from hocket.compat.composer.pretrained import (
    hf_from_composer_checkpoint,
    metadata_of,
    write_huggingface_pretrained_from_composer_checkpoint,
)
from hocket.compat.composer.utils.nested_values import ensure_tuple
from hocket.trainer import ComposerClassifier as _ComposerClassifier
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.models.named_metrics import named_metrics
from hocket.trainer.process.extras import import_extra


class HasLogger:
    """A model that logs: the trainer sets its `logger`, which copies share and pickles leave out."""

    logger: Any = None

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self.logger)] = self.logger
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "logger"}


class ComposerModel(HasLogger, _models.ComposerModel, ABC):
    """`hocket.trainer.ComposerModel` whose subclasses may leave out `super().__init__()`.

    An older model may define `validate(batch) -> (outputs, targets)` and `metrics(train)`. Every model of
    `hocket.trainer.models` counts as an instance.

    Attributes:
        logger: The trainer's logger, for `self.logger.log_metrics`; None before there is a trainer.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: ARG004 - of `__init__`
        """Initialise the module before the subclass's `__init__` assigns its parts."""
        model = super().__new__(cls)
        nn.Module.__init__(model)
        return model

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """Compute the outputs that metrics are updated with, by an older model's `validate` if it has one."""
        validate = getattr(self, "validate", None)
        return super().eval_forward(batch, outputs) if validate is None else validate(batch)

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        """Return the metrics by name: those of an older model's `metrics(train)`, if it has one."""
        attribute = getattr(self, "metrics", None)
        metrics = attribute(train=is_train) if callable(attribute) else {}
        if isinstance(metrics, Mapping) or hasattr(metrics, "items"):  # a `MetricCollection` is no mapping
            return dict(metrics.items())
        return {type(metrics).__name__: metrics}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        """Add a batch to a metric; an older model's `validate` returned outputs and targets."""
        if getattr(self, "validate", None) is None:
            super().update_metric(batch, outputs, metric)
        else:
            metric.update(*outputs)


class ComposerClassifier(HasLogger, _ComposerClassifier):
    """`hocket.trainer.ComposerClassifier`, which by default measures its accuracy while training too.

    Attributes:
        train_metrics: A metric or a collection, measured while training; may be replaced.
        val_metrics: A metric or a collection, measured in evaluation; may be replaced.
    """

    def __init__(
        self,
        module: nn.Module,
        num_classes: int | None = None,
        train_metrics: Any = None,
        *args: Any,
        **arguments: Any,
    ) -> None:
        if num_classes is None:
            num_classes = getattr(module, "num_classes", None)
        if train_metrics is None and isinstance(num_classes, int) and num_classes > 1:
            # Imported here because torchmetrics takes seconds to import.
            from torchmetrics.classification import MulticlassAccuracy

            # The validation of arguments would read tensors from the device.
            train_metrics = MulticlassAccuracy(num_classes, average="micro", validate_args=False)
        super().__init__(module, num_classes, train_metrics, *args, **arguments)

    def __getattr__(self, name: str) -> Any:
        if name in ("train_metrics", "val_metrics"):
            return _as_given(self.get_metrics(is_train=name == "train_metrics"))
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("train_metrics", "val_metrics"):
            name, value = f"_{name}", None if value is None else named_metrics(value)
        super().__setattr__(name, value)


def _as_given(metrics: dict[str, Any]) -> Any:
    """Return None, one metric, or a collection of several."""
    if len(metrics) < 2:
        return next(iter(metrics.values()), None)
    from torchmetrics import MetricCollection

    return MetricCollection(metrics)


class ComposerResNet(ComposerClassifier):
    """A ResNet of torchvision as a classifier, as Composer's releases before 0.18 had it.

    Args:
        model_name: Name of the model, such as `"resnet50"`.
        num_classes: The number of logits.
        pretrained: Whether to fetch torchvision's weights of ImageNet.
        weights: The name of these weights instead, such as `"IMAGENET1K_V2"`.
        initializers: Names of `Initializer`, applied to every module in this order.
        **options: Options of torchvision's function, such as `groups` and `width_per_group`.
    """

    def __init__(
        self,
        model_name: str,
        num_classes: int = 1000,
        pretrained: bool = False,
        weights: str | None = None,
        *,
        initializers: Any = None,
        **options: Any,
    ) -> None:
        models: Any = import_extra("torchvision.models", "torchvision", needed_by="ComposerResNet")
        names = [name for name in models.list_models(module=models) if "resne" in name]
        if model_name not in names:
            raise TrainerConfigError(
                f"`model_name` is `{model_name}`; expected one of {', '.join(f'`{name}`' for name in names)}"
            )
        chosen = weights or ("DEFAULT" if pretrained else None)
        module = models.get_model(model_name, num_classes=num_classes, weights=chosen, **options)
        for initializer in ensure_tuple(initializers):
            module.apply(Initializer(initializer).get_initializer())
        super().__init__(module, num_classes=num_classes)


class HuggingFaceModel(HasLogger, _models.HuggingFaceModel):
    """`hocket.trainer.models.HuggingFaceModel`, which can be made again from a checkpoint.

    `hf_from_composer_checkpoint` makes the inner model and the tokenizer of a checkpoint; then
    `Trainer(load_path=…)` loads its weights. The types in `peft_config` may be in lower case; they are
    changed to upper case in place.

    Attributes:
        labels: The labels of the last `eval_forward`, which metrics compare with. A subclass that removes the
            labels from the batch sets this attribute.
        model_forward_args: The names of the arguments of the inner model's `forward`.
        dummy_forward_called: False; here sharded models need no pass before they generate.
    """

    labels: Any = None

    def __init__(self, model: Any, tokenizer: Any = None, *args: Any, **arguments: Any) -> None:
        peft_config = arguments.get("peft_config")
        for name in ("peft_type", "task_type"):
            if isinstance(given := getattr(peft_config, name, None), str):
                setattr(peft_config, name, str(getattr(given, "value", given)).upper())
        super().__init__(model, tokenizer, *args, **arguments)
        self.model_forward_args = self._arguments.names
        self.dummy_forward_called = False

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """Return the outputs that metrics are updated with, and keep the labels."""
        labels = self._arguments.labels(batch)
        outputs = super().eval_forward(batch, outputs)
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else outputs
        self.labels = self._compared(labels, logits)
        return outputs

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        """Add a batch to a metric; a batch without labels is compared with those that a subclass has set."""
        if self._arguments.labels(batch) is not None or self.labels is None:
            super().update_metric(batch, outputs, metric)
        else:
            metric.update(outputs, self.labels)

    hf_from_composer_checkpoint = staticmethod(hf_from_composer_checkpoint)

    @property
    def train_metrics(self) -> dict[str, Any]:
        """The metrics measured while training, by name."""
        return self.get_metrics(is_train=True)

    @property
    def val_metrics(self) -> dict[str, Any]:
        """The metrics measured in evaluation, by name."""
        return self.get_metrics(is_train=False)

    def get_metadata(self) -> dict[str, Any]:
        """Return the configuration, class and tokenizer of the model, as checkpoints store them."""
        return metadata_of(self)


#: The function that made a `ComposerResNet`.
composer_resnet = ComposerResNet

ComposerModel.register(_ComposerClassifier)
ComposerModel.register(_models.HuggingFaceModel)

__all__ = [
    "ComposerClassifier",
    "ComposerModel",
    "ComposerResNet",
    "HuggingFaceModel",
    "Initializer",
    "composer_resnet",
    "write_huggingface_pretrained_from_composer_checkpoint",
]

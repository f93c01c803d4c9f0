"""A ready model for classification."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hocket.trainer.checks import refuse_class
from hocket.trainer.errors import DataError, TrainerConfigError
from hocket.trainer.loss import soft_cross_entropy
from hocket.trainer.loss.cross_entropy import is_dense
from hocket.trainer.models.base import ComposerModel
from hocket.trainer.models.named_metrics import named_metrics
from hocket.trainer.process.extras import import_extra

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

    Metrics = Metric | MetricCollection | Mapping[str, Metric] | Sequence[Metric]


class ComposerClassifier(ComposerModel):
    """Wraps a module that maps inputs to logits; a batch is the pair (inputs, targets).

    Args:
        module: A module that maps inputs to logits `(N, C)` or `(N, C, ...)`. Or a name: `"timm/resnet18"` or
            `"torchvision/resnet18"` makes that model, with random weights, for `num_classes`.
        num_classes: C; if None, taken from the module's `num_classes` if it has one.
        train_metrics: Metrics measured while training; none by default.
        val_metrics: Metrics measured in evaluation: one, several, or a dict by name. By default
            `CrossEntropy`, and torchmetrics' `MulticlassAccuracy` where the number of classes is known.
        loss_fn: A function of logits and targets that returns the mean loss.

    Raises:
        MissingExtraError: If `module` is a name of a package that is not installed.
        TrainerConfigError: If it is a name that the package does not have.

    Example:
        >>> ComposerClassifier("torchvision/resnet18", num_classes=10)
        >>> ComposerClassifier(timm.create_model("vit_tiny_patch16_224"), num_classes=1000)
    """

    def __init__(
        self,
        module: nn.Module | str,
        num_classes: int | None = None,
        train_metrics: Metrics | None = None,
        val_metrics: Metrics | None = None,
        loss_fn: Callable[[Tensor, Tensor], Tensor] = soft_cross_entropy,
    ) -> None:
        super().__init__()
        refuse_class("module", module)
        self.module = create_module(module, num_classes) if isinstance(module, str) else module
        if num_classes is None and isinstance(found := getattr(self.module, "num_classes", None), int):
            num_classes = found
        self.num_classes = num_classes
        refuse_class("loss_fn", loss_fn)
        self._loss_fn = loss_fn
        self._train_metrics = None if train_metrics is None else named_metrics(train_metrics)
        self._val_metrics = None if val_metrics is None else named_metrics(val_metrics)

    def forward(self, batch: Any) -> Tensor:
        """Return the logits of the batch's inputs; a batch without targets is a tensor of inputs.

        Raises:
            DataError: If the batch is a mapping.
        """
        if isinstance(batch, Mapping):
            raise DataError(
                f"the batch is a mapping with the keys {sorted(map(str, batch))}; expected a "
                "pair (inputs, targets): return one from the data set, or override `forward` and `loss`"
            )
        inputs = batch if isinstance(batch, Tensor) else batch[0]
        logits: Tensor = self.module(inputs)
        return logits

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return the mean loss of logits against the batch's targets."""
        _, targets = batch
        return self._loss_fn(outputs, targets)

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """Return the metrics by name."""
        if is_train:
            return self._train_metrics or {}
        if self._val_metrics is None:
            self._val_metrics = self._default_metrics()
        return self._val_metrics

    def _default_metrics(self) -> dict[str, Metric]:
        # Here, not above: torchmetrics takes a second to import, and a training may never need it.
        from torchmetrics.classification import MulticlassAccuracy

        from hocket.trainer.metrics import CrossEntropy

        metrics: dict[str, Metric] = {"CrossEntropy": CrossEntropy()}
        if self.num_classes is not None and self.num_classes > 1:
            # The validation of arguments reads the device.
            accuracy = MulticlassAccuracy(self.num_classes, average="micro", validate_args=False)
            metrics["MulticlassAccuracy"] = accuracy
        return metrics

    def update_metric(self, batch: Any, outputs: Tensor, metric: Metric) -> None:
        """Add the batch's logits and targets to a metric; dense targets count as their largest class.

        `CrossEntropy`, losses and metrics of several labels get dense targets as they are.
        """
        _, targets = batch
        if type(metric).__name__.startswith("Multiclass") and is_dense(outputs, targets):
            targets = targets.argmax(dim=1)
        metric.update(outputs, targets)


def create_module(name: str, num_classes: int | None) -> nn.Module:
    """Make a model by name.

    Args:
        name: `"torchvision/<name>"` or `"timm/<name>"`.
        num_classes: The number of logits; the model's own if None.

    Raises:
        TrainerConfigError: If there is no such name.
        MissingExtraError: If the package is not installed.
    """
    package, _, model = name.partition("/")
    create: Callable[..., nn.Module]
    if package == "timm" and model:
        timm: Any = import_extra("timm", "timm", needed_by=name)
        model_names, create = timm.list_models(), timm.create_model
        is_known = timm.is_model(model)
    elif package == "torchvision" and model:
        models: Any = import_extra("torchvision.models", "torchvision", needed_by=name)
        # Classification models alone: those for detection and segmentation take no pair (inputs, targets).
        model_names, create = models.list_models(module=models), models.get_model
        is_known = model in model_names
    else:
        raise TrainerConfigError(
            f"`module` is the text `{name}`; expected a module, or a name such as `torchvision/resnet18` or "
            "`timm/resnet18`"
        )
    if not is_known:
        close_names = difflib.get_close_matches(model, model_names, n=3)
        hint = (
            f"; close to it: {', '.join(f'`{package}/{one}`' for one in close_names)}" if close_names else ""
        )
        raise TrainerConfigError(f"{package} has no model `{model}`{hint}")
    options = {} if num_classes is None else {"num_classes": num_classes}
    return create(model, **options)

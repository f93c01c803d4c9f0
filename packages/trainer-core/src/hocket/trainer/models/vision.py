"""Vision models of torchvision and timm by name, with random weights."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from torch import nn

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.process.extras import import_extra


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

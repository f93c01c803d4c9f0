"""Replacement of modules in a model, as `composer.utils.module_surgery`."""

from __future__ import annotations

from typing import Any

from torch import nn

import hocket.algos.surgery as _surgery
from hocket.algos.surgery import count_module_instances, update_params_in_optimizer
from hocket.algos.surgery.replace import Policy as ReplacementFunction
from hocket.compat.composer.signatures import in_order

_replace = in_order(
    _surgery.replace_module_classes,
    "module policies optimizers recurse_on_replacements indices",
    module="model",
)


def replace_module_classes(*args: Any, **arguments: Any) -> dict[nn.Module, nn.Module]:
    """Replace modules, as `hocket.algos.surgery.replace_module_classes` does.

    Returns:
        The new modules by the old ones.
    """
    replaced: dict[nn.Module, nn.Module] = _replace(*args, **arguments).replaced_pairs
    return replaced


__all__ = [
    "ReplacementFunction",
    "count_module_instances",
    "replace_module_classes",
    "update_params_in_optimizer",
]

"""Replacement of modules in a model, as `composer.utils.module_surgery`."""

from __future__ import annotations

import hocket.algos.surgery as _surgery
from hocket.algos.surgery import count_module_instances, update_params_in_optimizer
from hocket.algos.surgery.replace import Policy as ReplacementFunction
from hocket.compat.composer.signatures import in_order

replace_module_classes = in_order(
    _surgery.replace_module_classes,
    "module policies optimizers recurse_on_replacements indices",
    module="model",
)

__all__ = [
    "ReplacementFunction",
    "count_module_instances",
    "replace_module_classes",
    "update_params_in_optimizer",
]

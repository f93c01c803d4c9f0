"""Replacement of modules in a model, as `composer.utils.module_surgery`."""

from __future__ import annotations

from hocket.algos.surgery import count_module_instances, replace_module_classes, update_params_in_optimizer
from hocket.algos.surgery.replace import Policy as ReplacementFunction

__all__ = [
    "ReplacementFunction",
    "count_module_instances",
    "replace_module_classes",
    "update_params_in_optimizer",
]

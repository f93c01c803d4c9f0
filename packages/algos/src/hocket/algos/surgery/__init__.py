"""Module surgery: replacement of modules by class, with a report and with repair of the optimizers."""

from hocket.algos.surgery.algorithm import SurgeryAlgorithm
from hocket.algos.surgery.checks import check_memory, is_plain, is_plain_linear
from hocket.algos.surgery.library import replace_by_library
from hocket.algos.surgery.optimizers import drop_frozen, repair_optimizers, update_params_in_optimizer
from hocket.algos.surgery.replace import count_module_instances, parts_of, replace_module_classes
from hocket.algos.surgery.report import OptimizerChange, Replacement, SurgeryReport
from hocket.algos.surgery.watch import SurgeryWatch

__all__ = [
    "OptimizerChange",
    "Replacement",
    "SurgeryAlgorithm",
    "SurgeryReport",
    "SurgeryWatch",
    "check_memory",
    "count_module_instances",
    "drop_frozen",
    "is_plain",
    "is_plain_linear",
    "parts_of",
    "repair_optimizers",
    "replace_by_library",
    "replace_module_classes",
    "update_params_in_optimizer",
]

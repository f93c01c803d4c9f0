"""Surgery by a library, whose replacements are found by comparing the model before and after."""

from collections.abc import Callable

from torch import nn

from hocket.algos.surgery.checks import check_operable, default_with_values, device_of
from hocket.algos.surgery.optimizers import Optimizers, named_parameters, repair_optimizers
from hocket.algos.surgery.report import Replacement, SurgeryReport


def replace_by_library(
    model: nn.Module, change: Callable[[], object], optimizers: Optimizers | None = None, *, title: str
) -> SurgeryReport:
    """Have a library replace modules inside `model`, and report the replacements.

    Args:
        model: Changed in place by `change`; itself never replaced.
        change: A function that calls the library.
        optimizers: Built over the model's parameters; repaired by name, with their state.
        title: The name of the method, for messages.

    Returns:
        The report; of nested replaced modules it lists only the outermost.

    Raises:
        SurgeryError: The model is wrapped, sharded or without values.
    """
    check_operable(model, title)
    modules, parameters = dict(model.named_modules(remove_duplicate=False)), named_parameters(model)
    with default_with_values(device_of(model)):
        change()
    report = SurgeryReport(title)
    names_by_pair: dict[tuple[nn.Module, nn.Module], list[str]] = {}
    for name, new in model.named_modules(remove_duplicate=False):
        old = modules.get(name)
        if old is not None and old is not new:
            names_by_pair.setdefault((old, new), []).append(name)
    seen: set[nn.Module] = set()
    for (old, new), names in names_by_pair.items():
        if new not in seen:
            report.replacements.append(Replacement(tuple(names), old, new))
        seen |= set(new.modules())
    report.optimizer_changes = repair_optimizers(optimizers, parameters, named_parameters(model))
    return report

"""Detection of modules that were added or swapped after a surgery."""

import weakref
from collections.abc import Iterable

from torch import nn

from hocket.algos.surgery.report import SurgeryReport


class SurgeryWatch:
    """A record of the modules of a model after a surgery, which finds later changes.

    Modules are compared by identity, so that sharding, which changes a module's class in place, does not
    count as a change.

    Args:
        report: The report of the surgery.
        targets: The classes that the surgery treats.
    """

    def __init__(self, report: SurgeryReport, targets: Iterable[type[nn.Module]]) -> None:
        self._treated = {
            one.names[0]: (weakref.ref(one.new), type(one.new).__name__) for one in report.replacements
        }
        self._targets = tuple(targets)
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def fingerprint(self) -> dict[str, str]:
        """The treated modules: the class of each by its name at the surgery."""
        return {name: kind for name, (_, kind) in self._treated.items()}

    def settle(self, model: nn.Module) -> None:
        """Record the modules that `model` has now as known, also those that other surgeries put in."""
        self._known = weakref.WeakSet(model.modules())

    def changes(self, model: nn.Module) -> list[str]:
        """Name the treated modules that are gone, and the modules of target classes that are new."""
        modules = set(model.modules())
        removed = [
            f"`{name}` is no longer the {kind} that was put there"
            for name, (reference, kind) in self._treated.items()
            if reference() not in modules
        ]
        new = [
            f"`{name}`, a {type(module).__name__}, is new and was not treated"
            for name, module in model.named_modules()
            if module not in self._known and isinstance(module, self._targets)
        ]
        return removed + new

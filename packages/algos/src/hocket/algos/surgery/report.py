"""The report of a surgery: the modules replaced, the modules left, and the changes in optimizers."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True, slots=True)
class Replacement:
    """One module that was replaced.

    Attributes:
        names: Every name that the module has in the model; more than one where it is shared.
        old: The module before.
        new: The module in its place; `old` itself where the policy changed it in place.
    """

    names: tuple[str, ...]
    old: nn.Module
    new: nn.Module

    def __str__(self) -> str:
        kind = type(self.new)
        name = (
            kind.__name__
            if kind.__name__ != type(self.old).__name__
            else f"{kind.__module__}.{kind.__name__}"
        )
        how = "changed in place" if self.new is self.old else f"is now a {name}"
        return f"`{'`, `'.join(self.names)}`: {type(self.old).__name__} {how}"


@dataclass(frozen=True, slots=True)
class OptimizerChange:
    """One parameter whose place in an optimizer changed.

    Attributes:
        optimizer: The optimizer's class and position, such as `AdamW 0`.
        action: `"added"`, `"removed"`, `"renamed"` or `"not optimized"` (a new parameter in place of ones
            that the optimizer did not have).
        name: The parameter's name in the model; for `"removed"`, before the surgery.
        group: The parameter group's index; None for `"not optimized"`.
        had_state: Whether state was dropped (`"removed"`) or carried over (`"renamed"`).
    """

    optimizer: str
    action: str
    name: str
    group: int | None
    had_state: bool = False

    def __str__(self) -> str:
        if self.action == "not optimized":
            return f"`{self.name}` is not optimized, as the parameters it replaces were not"
        state = {"removed": ", its state dropped", "renamed": ", its state kept"}.get(self.action, "")
        return f"{self.optimizer}, group {self.group}: {self.action} `{self.name}`{state * self.had_state}"


@dataclass(slots=True)
class SurgeryReport:
    """The results of a surgery. Its length is the number of modules replaced; it prints as a table.

    Attributes:
        title: The name of the method, for messages.
        replacements: The replaced modules, in the order of the model.
        skipped: Names of the modules that a policy left as they are, with the reason if it is known.
        optimizer_changes: The repairs of the optimizers.
    """

    title: str
    replacements: list[Replacement] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    optimizer_changes: list[OptimizerChange] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.replacements)

    def __bool__(self) -> bool:
        return bool(self.replacements)

    def __iter__(self) -> Iterator[Replacement]:
        return iter(self.replacements)

    @property
    def replaced_pairs(self) -> dict[nn.Module, nn.Module]:
        """The modules before and after, as Composer's `replace_module_classes` returns them."""
        return {one.old: one.new for one in self.replacements}

    @property
    def counts(self) -> dict[str, int]:
        """The number of modules of each class that the surgery put in."""
        return dict(Counter(type(one.new).__name__ for one in self.replacements))

    def merge(self, other: "SurgeryReport") -> None:
        """Add the results of another surgery of the same method."""
        self.replacements += other.replacements
        self.skipped |= other.skipped
        self.optimizer_changes += other.optimizer_changes

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        lines = [f"{self.title}: {len(self)} modules replaced{f' ({counts})' * bool(counts)}"]
        lines += [f"  {one}" for one in self.replacements]
        lines += [f"  left `{name}`{f': {why}' * bool(why)}" for name, why in self.skipped.items()]
        lines += [f"  {one}" for one in self.optimizer_changes]
        return "\n".join(lines)

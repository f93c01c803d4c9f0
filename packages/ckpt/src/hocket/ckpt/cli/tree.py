"""Names as the lines of a tree, in which layers that are alike stand once."""

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

__all__ = ["Row", "rows_of"]

_FOLDED_FROM = 3
"""So many numbered branches, all alike, become one."""


class Row(NamedTuple):
    """A line of the tree."""

    guides: str
    """What stands before the label: `│  ├─ `."""
    label: str
    name: str | None
    """The tensor, where the line stands for one."""
    inside: tuple[str, ...]
    """Names of the tensors below it, of all that it stands for."""


class _Node:
    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.name: str | None = None

    def names(self) -> tuple[str, ...]:
        below = [name for child in self.children.values() for name in child.names()]
        return (*([self.name] if self.name is not None else []), *below)

    def shape(self, kind: Callable[[str], Hashable]) -> Hashable:
        """Equal for branches that would look alike."""
        own = None if self.name is None else kind(self.name)
        return own, tuple((label, child.shape(kind)) for label, child in self.children.items())


class _Branch(NamedTuple):
    """A child, or several that are alike."""

    label: str
    node: _Node
    inside: tuple[str, ...]


def rows_of(names: Iterable[str], kind: Callable[[str], Hashable] | None = None) -> list[Row]:
    """Lines for tensors, cut at the dots of their names; a branch with one child is joined to it.

    Args:
        names: In the order in which they are to stand.
        kind: What makes two tensors look alike. Where given, numbered branches in a row that are alike
            become one line, `0…11`, with what is below the first of them.
    """
    root = _Node()
    for name in names:
        node = root
        for part in name.split("."):
            node = node.children.setdefault(part, _Node())
        node.name = name
    rows: list[Row] = []
    for branch in _branches(root, kind):
        _add(rows, branch, "", "", kind)
    return rows


def _branches(node: _Node, kind: Callable[[str], Hashable] | None) -> list[_Branch]:
    single = [_Branch(label, child, child.names()) for label, child in node.children.items()]
    if kind is None or len(single) < _FOLDED_FROM or not all(branch.label.isdigit() for branch in single):
        return single
    runs: list[list[_Branch]] = []
    shape: Hashable = None
    for branch in single:
        if runs and shape == (shape := branch.node.shape(kind)):
            runs[-1].append(branch)
        else:
            shape = branch.node.shape(kind)
            runs.append([branch])
    folded: list[_Branch] = []
    for run in runs:
        if len(run) < _FOLDED_FROM:
            folded += run
        else:
            inside = tuple(name for branch in run for name in branch.inside)
            folded.append(_Branch(f"{run[0].label}…{run[-1].label}", run[0].node, inside))
    return folded


def _add(
    rows: list[Row], branch: _Branch, before: str, below: str, kind: Callable[[str], Hashable] | None
) -> None:
    label, node, inside = branch
    while node.name is None and len(children := _branches(node, kind)) == 1 and "…" not in label:
        [(part, node, _)] = children
        label = f"{label}.{part}"
    rows.append(Row(before, label, node.name, inside))
    children = _branches(node, kind)
    for i, child in enumerate(children):
        step, rest = ("└─ ", "   ") if i == len(children) - 1 else ("├─ ", "│  ")
        _add(rows, child, below + step, below + rest, kind)

"""Tensor names as the lines of a tree, with similar layers folded into one line."""

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

__all__ = ["Row", "rows_of"]

_FOLDED_FROM = 3
"""The number of similar consecutive branches from which they are folded into one."""


class Row(NamedTuple):
    """A line of the tree."""

    guides: str
    """The tree characters before the label: `│  ├─ `."""
    label: str
    name: str | None
    """The tensor's name, if the line is a tensor."""
    inside: list[str]
    """Names of the tensors below it, including those of folded branches."""


class _Node:
    __slots__ = ("below", "children", "name")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.name: str | None = None
        self.below: list[str] = []
        """Names of the tensors at this node and below it, in the order given."""

    def shape(self, kind: Callable[[str], Hashable]) -> Hashable:
        """Return a key that is equal for branches that look the same."""
        own_kind = None if self.name is None else kind(self.name)
        if not self.children:
            return own_kind, ()
        return own_kind, tuple((label, child.shape(kind)) for label, child in self.children.items())


class _Branch(NamedTuple):
    """A child, or several similar children."""

    label: str
    node: _Node
    inside: list[str]


def rows_of(names: Iterable[str], kind: Callable[[str], Hashable] | None = None) -> list[Row]:
    """Return tree lines for tensor names, split at dots; a branch with one child is joined with it.

    Args:
        names: The names, in display order.
        kind: Return a key that is equal for similar tensors. If given, similar consecutive numbered branches
            become one line, `0…11`, followed by the contents of the first.
    """
    root = _Node()
    for name in names:
        node = root
        for part in name.split("."):
            child = node.children.get(part)
            if child is None:
                child = node.children[part] = _Node()
            node = child
            node.below.append(name)
        node.name = name
    rows: list[Row] = []
    for branch in _branches(root, kind):
        _add(rows, branch, "", "", kind)
    return rows


def _branches(node: _Node, kind: Callable[[str], Hashable] | None) -> list[_Branch]:
    if not node.children:
        return []
    single = [_Branch(label, child, child.below) for label, child in node.children.items()]
    if kind is None or len(single) < _FOLDED_FROM or not all(branch.label.isdigit() for branch in single):
        return single
    runs: list[list[_Branch]] = []
    shape: Hashable = None
    for branch in single:
        previous_shape, shape = shape, branch.node.shape(kind)
        if runs and shape == previous_shape:
            runs[-1].append(branch)
        else:
            runs.append([branch])
    folded: list[_Branch] = []
    for run in runs:
        if len(run) < _FOLDED_FROM:
            folded += run
        else:
            names = [name for branch in run for name in branch.inside]
            folded.append(_Branch(f"{run[0].label}…{run[-1].label}", run[0].node, names))
    return folded


def _add(
    rows: list[Row], branch: _Branch, prefix: str, child_prefix: str, kind: Callable[[str], Hashable] | None
) -> None:
    label, node, names = branch
    children = _branches(node, kind)
    while node.name is None and len(children) == 1 and "…" not in label:
        [(part, node, _)] = children
        label = f"{label}.{part}"
        children = _branches(node, kind)
    rows.append(Row(prefix, label, node.name, names))
    for i, child in enumerate(children):
        step, rest = ("└─ ", "   ") if i == len(children) - 1 else ("├─ ", "│  ")
        _add(rows, child, child_prefix + step, child_prefix + rest, kind)

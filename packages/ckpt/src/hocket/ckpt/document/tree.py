"""State trees: nested dicts and lists, flattened into named leaves and rebuilt from them."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from hocket.ckpt.errors import CheckpointStateError

__all__ = ["FlatTree", "Path", "TreeLeaf", "clean_key", "flatten", "join", "renamed", "unflatten"]

Path = tuple[str | int, ...]

# Prefixes that `torch.compile`, activation checkpointing and DDP add to the names of a wrapped model.
# `module.` is also a common submodule name, so it is removed only at the start of a key.
_ANYWHERE = ("_orig_mod.", "_checkpoint_wrapped_module.")
_LEADING = (*_ANYWHERE, "module.")
_DEEPEST = 64


_SCALARS = (bool, int, float, str, bytes, type(None))


class TreeLeaf(NamedTuple):
    """A leaf: its name, its path without wrapper prefixes, and its value."""

    name: str
    path: Path
    value: object


class FlatTree(NamedTuple):
    """A flattened tree: the leaves by name, in tree order."""

    tensors: dict[str, TreeLeaf]
    values: dict[str, TreeLeaf]
    integer_keyed: set[Path]
    """Paths of the mappings with integer keys, which would otherwise be read as lists."""


def clean_key(key: str) -> str:
    """Remove wrapper prefixes from a key: `module._orig_mod.fc.weight` becomes `fc.weight`."""
    while key.startswith(_LEADING):
        key = key.partition(".")[2]
    for wrapper in _ANYWHERE:
        key = key.replace("." + wrapper, ".")
    return key


def join(path: Iterable[str | int]) -> str:
    """Return the name of a path: its parts joined by `.`."""
    return ".".join(map(str, path))


def renamed(path: Path, rename: Mapping[str, str]) -> Path:
    """Return a path with a prefix of its name replaced; the prefix becomes a single key if it changes."""
    name = join(path)
    for old, new in rename.items():
        if name != old and not name.startswith(old.removesuffix(".") + "."):
            continue
        for length in range(1, len(path) + 1):
            # The rest of the path is kept if the renamed prefix ends at a path step.
            if join(path[:length]) == old.removesuffix("."):
                return (*([new.removesuffix(".")] if new else []), *path[length:]) or (new,)
        tail = name[len(old.removesuffix(".")) + 1 :]
        return (f"{new.removesuffix('.')}.{tail}" if new else tail,)
    return path


def flatten(state: object, *, tensor_type: type) -> FlatTree:
    """Flatten a tree into named leaves.

    Leaves are tensors, single values, tuples, empty dicts and lists, lists of single values only, and dicts
    with non-string keys and no tensors. An optimizer node with `slots_like`, which has no state yet, is
    treated as an empty dict. Wrapper prefixes are removed from the keys of nodes that hold tensors; all other
    keys are kept unchanged.

    Args:
        state: Nested dicts and lists.
        tensor_type: The class of tensors.

    Raises:
        CheckpointStateError: A leaf has an unsupported type; a name is not valid Unicode; a tensor has an
            empty name or the name `__metadata__`, which data files reserve; or two paths have the same name.
    """
    flat = FlatTree({}, {}, set())
    keyed: set[Path] = set()
    leaves = [
        (path, value, isinstance(value, tensor_type))
        for path, value in _leaves(state, (), tensor_type, keyed)
    ]
    nodes = {path[:depth] for path, _, is_one in leaves if is_one for depth in range(len(path))}
    for path, value, is_one in leaves:
        cleaned = _cleaned(path, nodes)
        leaf = TreeLeaf(join(cleaned), cleaned, value)
        check_encodable(leaf.name)
        if is_one and leaf.name in ("", "__metadata__"):
            problem = f"a tensor has the name `{leaf.name}`" if path else "the state is a single tensor"
            raise CheckpointStateError(
                f'{problem}; expected a tree that names it, such as {{"weight": tensor}}'
            )
        for other in (flat.tensors.get(leaf.name), flat.values.get(leaf.name)):
            if other is not None:
                raise CheckpointStateError(
                    f"two places of the state have the name `{leaf.name}`: {list(other.path)} and "
                    f"{list(cleaned)} (as given: {list(path)}). Rename one of them"
                )
        (flat.tensors if is_one else flat.values)[leaf.name] = leaf
    flat.integer_keyed.update(_cleaned(path, nodes) for path in keyed)
    return flat


def check_encodable(name: str) -> None:
    """Raise if a name cannot be encoded as UTF-8.

    Raises:
        CheckpointStateError: The name holds a lone surrogate.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise CheckpointStateError(
            f"the name {name!a} is not valid Unicode: it has a lone surrogate. Use another key for it"
        ) from error


def _cleaned(path: Path, nodes: Collection[Path]) -> Path:
    """Return a path with `clean_key` applied to the keys of `nodes`."""
    return tuple(
        clean_key(part) if isinstance(part, str) and path[:depth] in nodes else part
        for depth, part in enumerate(path)
    )


def _leaves(node: object, path: Path, tensor_type: type, keyed: set[Path]) -> Iterator[tuple[Path, object]]:
    if isinstance(node, (tensor_type, *_SCALARS)):
        yield path, node
        return
    if len(path) > _DEEPEST:
        raise CheckpointStateError(
            f"`{join(path):.200}…` is nested more than {_DEEPEST} deep, or holds itself"
        )
    if hasattr(node, "slots_like"):
        yield path, {}
        return
    if isinstance(node, tuple):
        _refuse_tensors(node, path, tensor_type)
        yield path, node
        return
    if isinstance(node, list):
        if all(isinstance(item, _SCALARS) for item in node):
            yield path, node
            return
        for position, item in enumerate(node):
            yield from _leaves(item, (*path, position), tensor_type, keyed)
        return
    if isinstance(node, Mapping):
        if not node or not (all(isinstance(key, str) for key in node) or _holds_tensor(node, tensor_type)):
            yield path, node
            return
        for key, item in node.items():
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise CheckpointStateError(
                    f"`{join(path)}` holds tensors under the key {key!r}: expected keys that are strings or "
                    f"integers"
                )
            if isinstance(key, int) and not -(2**63) <= key < 2**63:
                raise CheckpointStateError(
                    f"`{join(path)}` holds tensors under an integer of {key.bit_length()} bits: expected at "
                    "most 63. Make it a string"
                )
            if isinstance(key, int):
                keyed.add(path)
            yield from _leaves(item, (*path, key), tensor_type, keyed)
        return
    kind = type(node)
    raise CheckpointStateError(
        f"`{join(path)}` is a `{kind.__module__}.{kind.__qualname__}`, which a checkpoint cannot store: "
        "expected a tensor, None, bool, int, float, str, bytes, or a tuple, list or dict of these. Turn it "
        "into them in `state_dict()`"
    )


def _holds_tensor(node: object, tensor_type: type, depth: int = 0) -> bool:
    if isinstance(node, tensor_type):
        return True
    if depth > _DEEPEST:
        return False
    children = node.values() if isinstance(node, Mapping) else node if isinstance(node, list | tuple) else ()
    return any(_holds_tensor(child, tensor_type, depth + 1) for child in children)


def _refuse_tensors(node: object, path: Path, tensor_type: type) -> None:
    if _holds_tensor(node, tensor_type):
        raise CheckpointStateError(
            f"`{join(path)}` is a tuple with a tensor in it; tuples are saved as one value. Make it a list"
        )


def unflatten(leaves: Iterable[tuple[Path, object]], integer_keyed: Collection[Path] = ()) -> object:
    """Build a tree from paths and leaves.

    A node whose keys are the integers from 0 on becomes a list, unless its path is in `integer_keyed`; any
    other node becomes a dict. Without leaves the result is an empty dict; a leaf with an empty path is the
    whole tree.

    Raises:
        CheckpointStateError: One leaf's path is a prefix of another's.
    """
    root: dict[str | int, object] = {}
    for path, value in leaves:
        if not path:
            return value
        node = root
        for part in path[:-1]:
            child = node.setdefault(part, _Node())
            if not isinstance(child, _Node):
                raise CheckpointStateError(f"`{join(path)}` is a child of a leaf of the same tree")
            node = child
        if path[-1] in node:
            raise CheckpointStateError(f"`{join(path)}` occurs twice, or is the parent of other leaves")
        node[path[-1]] = value
    return _finished(root, (), integer_keyed)


class _Node(dict[str | int, object]):
    """An inner node under construction; a separate type, to distinguish it from a leaf that is a dict."""


def _finished(node: dict[str | int, object], path: Path, integer_keyed: Collection[Path]) -> object:
    children = {
        key: _finished(child, (*path, key), integer_keyed) if isinstance(child, _Node) else child
        for key, child in node.items()
    }
    if children and set(children) == set(range(len(children))) and path not in integer_keyed:
        return [children[position] for position in range(len(children))]
    return children

"""Leaving parts out of a state tree, by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator
from glob import escape
from typing import Any, TypeAlias

from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.model_state import AsStored

IgnoreKeys: TypeAlias = "list[str] | Callable[[dict[str, Any]], object] | None"
"""Globs over names joined with `/`, such as `model/head.*`, or a function that changes the tree in place."""

RNG_KEY = "rng"
"""The key of the states of the random generators, which each rank has for itself, outside the shared tree."""


class LenientGlobs:
    """Globs over names joined with `/`, some of which may match nothing in the run, or nothing at all.

    Args:
        globs: As `without` takes them.
        unmatched: A function that is called once with each glob that matches nothing in the first tree.
    """

    def __init__(self, globs: Iterable[str], unmatched: Callable[[str], object]) -> None:
        self.globs = list(globs)
        self._unmatched: Callable[[str], object] | None = unmatched

    def with_globs(self, globs: Iterable[str]) -> LenientGlobs:
        """Return the same with other globs."""
        return LenientGlobs(globs, self._unmatched or (lambda _: None))

    def __call__(self, tree: dict[str, Any]) -> None:
        """Delete the entries that the globs match, in place."""
        report_unmatched, self._unmatched = self._unmatched, None
        for glob in self.globs:
            if not _drop_named(tree, glob) and report_unmatched is not None:
                report_unmatched(glob)


def without(tree: dict[str, Any], ignore_keys: Any) -> dict[str, Any]:
    """Return a tree without the ignored parts; its tensors are not copied.

    Args:
        tree: Nested dicts.
        ignore_keys: Globs over names joined with `/`, of which a leading `state/` is dropped; or a function
            that gets the tree and deletes entries.

    Raises:
        TrainerConfigError: If `ignore_keys` is neither, or a glob matches nothing.
    """
    if ignore_keys is None:
        return tree
    copy: dict[str, Any] = _copy_dicts(tree)
    if callable(ignore_keys):
        ignore_keys(copy)
        return copy
    if isinstance(ignore_keys, str) or not all(isinstance(one, str) for one in ignore_keys):
        raise TrainerConfigError(
            f"`{ignore_keys!r}` are no keys to ignore; expected a list of globs such as `model/head.*`, or "
            f"a function"
        )
    for glob in ignore_keys:
        if not _drop_named(copy, glob):
            raise TrainerConfigError(
                f"the key `{glob}` to ignore matches nothing; the parts are {sorted(tree)}, with names "
                f"such as "
                f"`model/{next(iter(tree.get('model', {'layer.weight': 0})), '…')}`"
            )
    return copy


def without_loaded(tree: Any, ignore_keys: Any) -> Any:
    """Return a loaded tree without the entries that globs match, such as the state of a callback.

    Args:
        tree: Nested dicts, or None.
        ignore_keys: As `without` takes them. A function is only for the run's own tree and is not called.
    """
    globs = ignore_keys.globs if isinstance(ignore_keys, LenientGlobs) else ignore_keys
    if not isinstance(tree, dict) or globs is None or callable(globs):
        return tree
    copy: dict[str, Any] = _copy_dicts(tree)
    for glob in globs:
        _drop(copy, glob.removeprefix("state/"), "")
    return copy


def split_rng(ignore_keys: Any) -> tuple[Any, bool]:
    """Return the keys to ignore without that of the random generators, and whether it was among them."""
    globs = ignore_keys.globs if isinstance(ignore_keys, LenientGlobs) else ignore_keys
    if globs is None or isinstance(globs, str) or callable(globs):
        return ignore_keys, False
    rest = [one for one in globs if not isinstance(one, str) or one.removeprefix("state/") != RNG_KEY]
    if len(rest) == len(globs):
        return ignore_keys, False
    if isinstance(ignore_keys, LenientGlobs):
        return ignore_keys.with_globs(rest), True
    return rest, True


def ignored_names(tree: dict[str, Any], ignore_keys: Any) -> list[str]:
    """Return globs over a checkpoint's names, joined with `.`, for the parts that `without` leaves out.

    Args:
        tree: The tree that `without` is given.
        ignore_keys: As `without` takes them.
    """
    if ignore_keys is None:
        return []
    if isinstance(ignore_keys, LenientGlobs):
        ignore_keys = ignore_keys.globs  # a checkpoint may have names that the run does not
    if not callable(ignore_keys):
        return [".".join(map(_stored_key, one.removeprefix("state/").split("/"))) for one in ignore_keys]
    return [escape(name) for name in _removed(tree, without(tree, ignore_keys), "")]


def _removed(tree: dict[str, Any], remaining: dict[str, Any], path: str) -> Iterator[str]:
    for name, value in tree.items():
        if name not in remaining:
            yield f"{path}{_stored_key(name)}"
        elif type(value) in (dict, AsStored) and type(remaining[name]) in (dict, AsStored):
            yield from _removed(value, remaining[name], f"{path}{_stored_key(name)}.")


def _stored_key(key: str) -> str:
    """Return a key as checkpoints store it: without the `module.` that wrappers put before all names."""
    while key.startswith("module."):
        key = key.removeprefix("module.")
    return key


def _copy_dicts(node: Any) -> Any:
    if type(node) not in (dict, AsStored):
        return node
    copy = {name: _copy_dicts(value) for name, value in node.items()}
    return node.like(copy) if isinstance(node, AsStored) else copy


def _drop_named(tree: dict[str, Any], glob: str) -> bool:
    """Delete the matches of a glob; return whether there are any, or may be in a part that is still empty.

    A part without tensors, as that of most callbacks, is empty before a load and takes any saved entries; a
    model takes those of buffers that are None so far.
    """
    glob = glob.removeprefix("state/")
    part, _, name = glob.partition("/")
    node = tree.get(part)
    absent = node.open_names if isinstance(node, AsStored) and isinstance(node.open_names, set) else ()
    is_absent = any(fnmatch.fnmatchcase(f"{part}/{one}", glob) for one in absent)
    return _drop(tree, glob, "") or is_absent or (name != "" and node == {})


def _drop(node: dict[str, Any], glob: str, path: str) -> bool:
    found = False
    for name in list(node):
        item_path = f"{path}{name}"
        if fnmatch.fnmatchcase(item_path, glob) or _is_list_of(node[name], item_path, glob):
            del node[name]
            found = True
        elif type(node[name]) in (dict, AsStored):
            found |= _drop(node[name], glob, f"{item_path}/")
    return found


def _is_list_of(value: Any, path: str, glob: str) -> bool:
    """Return whether a glob such as `optimizers/*` matches each entry of a list."""
    numbers = range(len(value)) if type(value) is list else ()
    return bool(numbers) and all(fnmatch.fnmatchcase(f"{path}/{number}", glob) for number in numbers)

"""Leaving parts out of a state tree, by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Iterator
from glob import escape
from typing import Any, TypeAlias

from hocket.trainer.checkpoint.model_state import AsStored
from hocket.trainer.errors import TrainerConfigError

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


def check_ignore_keys(ignore_keys: Any) -> None:
    """Refuse what is neither None, a function nor globs.

    Raises:
        TrainerConfigError: If it is something else, such as one text.
    """
    if ignore_keys is None or callable(ignore_keys):
        return
    is_list = isinstance(ignore_keys, Collection) and not isinstance(ignore_keys, str)
    if not is_list or not all(isinstance(one, str) for one in ignore_keys):
        raise TrainerConfigError(
            f"`{ignore_keys!r}` are no keys to ignore; expected a list of globs such as `model/head.*`, or "
            "a function"
        )


def without(
    tree: dict[str, Any],
    ignore_keys: Any,
    *,
    absent: Iterable[tuple[str, ...]] = (),
    elsewhere: Collection[str] = (),
) -> dict[str, Any]:
    """Return a tree without the ignored parts; its tensors are not copied.

    Args:
        tree: Nested dicts.
        ignore_keys: Globs over names joined with `/`, of which a leading `state/` is dropped; or a function
            that gets the tree and deletes entries.
        absent: The places of parts that the tree lacks and that `ignore_keys` leave out; a function gets them
            with the value None.
        elsewhere: Names of the model that other ranks have, which globs and functions may leave out there.

    Raises:
        TrainerConfigError: If `ignore_keys` is neither, or a glob matches nothing.
    """
    if ignore_keys is None:
        return tree
    copy: dict[str, Any] = _copy_dicts(tree)
    if callable(ignore_keys):
        if not isinstance(ignore_keys, LenientGlobs):
            _place(copy, (*absent, *(("model", name) for name in elsewhere)))
        ignore_keys(copy)
        if elsewhere and isinstance(model := copy.get("model"), dict):
            for name in elsewhere:
                model.pop(name, None)
        return copy
    check_ignore_keys(ignore_keys)
    absent = (*absent, *(("model", name) for name in elsewhere))
    for glob in ignore_keys:
        if not _drop_named(copy, glob) and not any(_is_named(place, glob) for place in absent):
            raise TrainerConfigError(
                f"the key `{glob}` to ignore matches nothing; the parts are {sorted(tree)}, with names such "
                f"as `model/{next(iter(tree.get('model', {'layer.weight': 0})), '…')}`"
            )
    return copy


def unlisted(
    tree: dict[str, Any], places: Iterable[tuple[str, ...]], ignore_keys: Any
) -> list[tuple[str, ...]]:
    """Return the places of a tree that `ignore_keys` do not leave out.

    Args:
        tree: The tree, which lacks the places; a function gets a copy that has them, with the value None.
        places: The keys of each place.
        ignore_keys: As `without` takes them.
    """
    if callable(ignore_keys) and not isinstance(ignore_keys, LenientGlobs):
        copy = _copy_containers(tree)
        _place(copy, places)
        ignore_keys(copy)
        return [place for place in places if place[-1] in _node_at(copy, place[:-1], make=False)]
    globs = ignore_keys.globs if isinstance(ignore_keys, LenientGlobs) else ignore_keys or ()
    return [place for place in places if not any(_is_named(place, glob) for glob in globs)]


def _copy_containers(node: Any) -> Any:
    if isinstance(node, list):
        return [_copy_containers(child) for child in node]
    return {key: _copy_containers(child) for key, child in node.items()} if type(node) is dict else node


def _place(tree: dict[str, Any], places: Iterable[tuple[str, ...]]) -> None:
    for place in places:
        _node_at(tree, place[:-1], make=True).setdefault(place[-1], None)


def _node_at(node: Any, place: tuple[str, ...], *, make: bool) -> Any:
    for key in place:
        if isinstance(node, list):
            node = node[int(key)] if int(key) < len(node) else {}
        else:
            node = node.setdefault(key, {}) if make else node.get(key, {})
    return node if isinstance(node, dict) else {}


def _is_named(place: tuple[str, ...], glob: str) -> bool:
    """Return whether a glob matches a place or a node above it."""
    names = ["/".join(place[:depth]) for depth in range(1, len(place) + 1)]
    return any(fnmatch.fnmatchcase(name, glob.removeprefix("state/")) for name in names)


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


def ignored_names(tree: dict[str, Any], ignore_keys: Any, *, elsewhere: Collection[str] = ()) -> list[str]:
    """Return globs over a checkpoint's names, joined with `.`, for the parts that `without` leaves out.

    Args:
        tree: The tree that `without` is given.
        ignore_keys: As `without` takes them.
        elsewhere: As `without` takes them.
    """
    if ignore_keys is None:
        return []
    if isinstance(ignore_keys, LenientGlobs):
        ignore_keys = ignore_keys.globs  # a checkpoint may have names that the run does not
    if not callable(ignore_keys):
        return [_stored_glob(one) for one in ignore_keys]
    return [escape(name) for name in _removed(tree, without(tree, ignore_keys, elsewhere=elsewhere), "")]


def _stored_glob(glob: str) -> str:
    """Return a glob over names joined with `.`; a `/` below the part may also be of a key itself."""
    part, *keys = map(_stored_key, glob.removeprefix("state/").split("/"))
    return ".".join([part, "[./]".join(keys)] if keys else [part])


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

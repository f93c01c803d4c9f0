"""Load planning: matches a state tree with a checkpoint's manifest by name."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch

from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.document.records import TensorRecord, state_names
from hocket.ckpt.document.tree import Path, join, unflatten
from hocket.ckpt.errors import CheckpointIncompatibleError
from hocket.ckpt.globs import check_globs, unmatched
from hocket.ckpt.torch.layout import DTYPES, refuse_shapeless, slot_as
from hocket.ckpt.torch.loading.key_pairing import cleaned, paired, with_own_names
from hocket.ckpt.torch.loading.tensor_reads import TensorFill

__all__ = ["LoadSelection", "select"]

_LISTED = 20
_GROUPS = ("param_groups",)


@dataclass(slots=True)
class LoadSelection:
    """The parts of a checkpoint that a tree loads."""

    state: Any = None
    fills: list[TensorFill] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Names that only the checkpoint has."""


def select(
    manifest: Manifest,
    into: object,
    *,
    strict: bool,
    cast: bool,
    include: Sequence[str] | None,
    source: str,
    ignore: Sequence[str] | None = None,
    is_part: bool = False,
) -> LoadSelection:
    """Match a tree with a checkpoint by name; read no data and change no tensor.

    Args:
        manifest: The checkpoint's manifest.
        into: Nested dicts and lists. A subtree without tensors is replaced by the checkpoint's: lists and
            empty dicts as a whole, a dict with entries key by key, so that a key that the checkpoint does not
            have counts as missing. An object with `slots_like` (name → parameter) becomes
            {name: {slot: tensor}}, or {name: tensor} where the checkpoint has a tensor at a name. Each slot
            tensor has its parameter's layout if the shapes are equal, and is a plain tensor otherwise. If the
            checkpoint has nothing at that path, the object counts as missing. A mapping with `open_names` (a
            container of keys) takes what the checkpoint has at these keys: a new tensor where the shape, the
            dtype or the kind of value differs, or where it has no such key. New tensors below a key of its
            `layouts` (key → tensor) have that tensor's layout if the shapes are equal. An empty one may be
            absent from the checkpoint.
        strict: Refuse names that only one side has. Otherwise missing leaves keep their values. Values that
            only the checkpoint has are returned if their dict holds no tensors.
        cast: Convert between dtypes instead of refusing a difference.
        include: Globs over names; leaves that match none keep their values.
        source: The checkpoint's URI, for error messages.
        ignore: Globs over names that only the checkpoint may have.
        is_part: Whether other ranks load other trees; names that only the checkpoint has are then returned in
            `left` and not refused here.

    Raises:
        CheckpointIncompatibleError: Keys, shapes or dtypes differ (the message lists all differences), or a
            glob matches nothing.
        ValueError: `include` or `ignore` is a string.
        CheckpointStateError: A tensor of the tree has no shape: it is nested or uninitialised.
    """
    if include is not None or ignore is not None:
        check_globs(include=include, ignore=ignore)
    matcher = _Matcher(manifest, cast=cast, include=include, ignore=ignore)
    state = matcher.take(into, matcher.root, ())
    matcher.refuse_idle_globs(source)
    matcher.unexpected = [name for name in matcher.unexpected if not _matches(name, matcher.ignore)]
    unexpected = list(matcher.unexpected)
    if is_part:
        matcher.unexpected.clear()
    matcher.refuse(source, strict=strict)
    return LoadSelection(state, matcher.fills, unexpected)


class _Stored(str):
    """The name of a checkpoint's tensor, used as the leaf of its tree."""

    __slots__ = ()


_ABSENT = object()


class _Matcher:
    def __init__(
        self,
        manifest: Manifest,
        *,
        cast: bool,
        include: Sequence[str] | None,
        ignore: Sequence[str] | None = None,
    ):
        self.manifest = manifest
        self.cast = cast
        self.include = include
        self.ignore = ignore or ()
        self.idle_globs = dict.fromkeys(include or ())
        """Globs that have matched nothing so far."""
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.different: list[str] = []
        self.fills: list[TensorFill] = []
        names = (name for name in state_names(manifest.tensors) if self._wanted(name))
        leaves: list[tuple[Path, object]] = [(manifest.tensors[name].path, _Stored(name)) for name in names]
        leaves += [
            (record.path, record.value) for name, record in manifest.values.items() if self._wanted(name)
        ]
        self.root = unflatten(leaves, manifest.integer_keyed)

    def _wanted(self, name: str) -> bool:
        """Return whether `include` selects a name or one of its parent nodes."""
        if self.include is None:
            return True
        globs = [glob for glob in self.include if _matches(name, (glob,))]
        for glob in globs:
            self.idle_globs.pop(glob, None)
        return bool(globs)

    def take(self, into: Any, stored: object, path: Path) -> Any:
        """Return the tree's node as it will be loaded; `stored` is the checkpoint's node at its path."""
        if isinstance(into, torch.Tensor):
            self._take_tensor(into, stored, path)
            return into
        if hasattr(into, "slots_like"):
            if stored is _ABSENT:
                if self._wanted(join(path)):
                    self.missing.append(join(path))
                return into
            return self._take_slots(into.slots_like, stored, path)
        if isinstance(into, Mapping) and hasattr(into, "open_names"):
            return self._take_open(into, stored, path)
        if path[-1:] == _GROUPS and isinstance(into, list) and _stored_names(stored):
            return self._take_groups(into, stored)
        if not _has_tensors(into):
            return self._take_value(into, stored, path)
        pairs = list(into.items()) if isinstance(into, Mapping) else list(enumerate(into))
        stored_children = _children(stored)
        if stored_children is None:
            if stored is not _ABSENT:
                self._unexpected(stored, path)
            stored_children = {}
        pairing = paired([key for key, _ in pairs], stored_children)
        result = {}
        for key, child in pairs:
            stored_key = pairing[key] if key in pairing else cleaned(key)
            result[key] = self.take(
                child, stored_children.pop(stored_key) if key in pairing else _ABSENT, (*path, stored_key)
            )
        for key, rest in stored_children.items():
            self._unexpected(rest, (*path, key))
        return result if isinstance(into, Mapping) else list(result.values())

    def _take_tensor(self, tensor: torch.Tensor, stored: object, path: Path) -> None:
        name = stored if isinstance(stored, _Stored) else join(path)
        if not isinstance(stored, _Stored):
            if self._wanted(name):
                self.missing.append(name)
            if stored is not _ABSENT:
                self._unexpected(stored, path)
            return
        refuse_shapeless(name, tensor)
        record = self.manifest.tensors[stored]
        problems = []
        if tuple(tensor.shape) != record.shape:
            problems.append(f"shape {list(record.shape)} in the checkpoint, {list(tensor.shape)} here")
        dtype = DTYPES.get(tensor.dtype, str(tensor.dtype))
        if dtype != record.dtype and not self.cast:
            problems.append(f"dtype {record.dtype} in the checkpoint, {dtype} here")
        if problems:
            self.different.append(f"`{name}`: {', '.join(problems)}")
        else:
            self.fills.append(self._fill(name, record, tensor))

    def _fill(self, name: str, record: TensorRecord, tensor: torch.Tensor) -> TensorFill:
        original = record if record.same_as is None else self.manifest.tensors[record.same_as]
        return TensorFill(name=name, origin=record.same_as or name, record=original, tensor=tensor)

    def _take_slots(
        self, parameters: Mapping[str, torch.Tensor], stored: object, path: Path
    ) -> dict[str, Any]:
        stored_children = _children(stored) or {}
        state: dict[str, Any] = {}
        pairing = paired(parameters, stored_children)
        for key, parameter in parameters.items():
            if key not in pairing:
                continue
            state[key] = self._made(stored_children.pop(pairing[key]), parameter)
        for key, rest in stored_children.items():
            self._unexpected(rest, (*path, key))
        return state

    def _made(
        self,
        stored: Any,
        like: torch.Tensor | None,
        layouts: Mapping[Any, torch.Tensor] = MappingProxyType({}),
        *,
        is_step: bool = False,
    ) -> Any:
        """Return a node of the checkpoint with new tensors, laid out as `like` or as those in `layouts`."""
        if isinstance(stored, _Stored):
            record = self.manifest.tensors[stored]
            tensor = slot_as(like, record, stored, is_step=is_step)
            self.fills.append(self._fill(stored, record, tensor))
            return tensor
        if not _stored_names(stored):
            return stored
        children = {
            key: self._made(child, layouts.get(key, like), layouts, is_step=key == "step")
            for key, child in (_children(stored) or {}).items()
        }
        return list(children.values()) if isinstance(stored, list) else children

    def _take_groups(self, into: list[Any], stored: Any) -> Any:
        """Return the checkpoint's parameter groups, with new tensors on the devices of the tree's."""
        own_tensors = {
            position: {key: value for key, value in group.items() if isinstance(value, torch.Tensor)}
            for position, group in enumerate(into)
        }
        children = _children(stored) or {}
        groups = [self._made(group, None, own_tensors.get(key, {})) for key, group in children.items()]
        return with_own_names(into, groups)

    def _take_open(self, into: Any, stored: object, path: Path) -> Any:
        """Return a mapping of which some keys take what the checkpoint has; see `select`."""
        if stored is _ABSENT and not into:
            return into
        stored_children = _children(stored) or {}
        if stored is not _ABSENT and _children(stored) is None:
            self._unexpected(stored, path)
        like = next((child for child in into.values() if isinstance(child, torch.Tensor)), None)
        pairing = paired(into, stored_children)
        result = {}
        for key, child in into.items():
            stored_key = pairing[key] if key in pairing else cleaned(key)
            found = stored_children.pop(stored_key) if key in pairing else _ABSENT
            if found is not _ABSENT and key in into.open_names and not self._fits(child, found):
                child_like = child if isinstance(child, torch.Tensor) else like
                result[key] = self._made(found, child_like, into.layouts)
            else:
                result[key] = self.take(child, found, (*path, stored_key))
        for key, rest in stored_children.items():
            if key in into.open_names and not _matches(join((*path, key)), self.ignore):
                result[key] = self._made(rest, into.layouts.get(key, like), into.layouts)
            else:
                self._unexpected(rest, (*path, key))
        return result

    def _fits(self, into: Any, stored: object) -> bool:
        """Return whether a node can be loaded into as it is, or has nodes below it that say so themselves."""
        if not isinstance(into, torch.Tensor):
            return _has_tensors(into) == bool(_stored_names(stored))
        if not isinstance(stored, _Stored):
            return False
        record = self.manifest.tensors[stored]
        return tuple(into.shape) == record.shape and DTYPES.get(into.dtype) == record.dtype

    def _take_value(self, into: Any, stored: object, path: Path) -> Any:
        if stored is _ABSENT:
            if self.include is None and path:
                self.missing.append(join(path))
            return into
        tensors = _stored_names(stored)
        if tensors:
            self.unexpected.extend(tensors)
            return into
        is_all = self.include is None
        return self._replaced(into, stored, path) if is_all else self._merged(into, stored, path)

    def _replaced(self, into: Any, stored: Any, path: Path) -> Any:
        """Return the checkpoint's value; keys that only the tree's dict has count as missing and are kept."""
        if not (_is_node(into) and _is_node(stored)):
            return with_own_names(into, stored) if path[-1:] == _GROUPS else stored
        pairing = paired(into, stored)
        own_keys = {stored_key: key for key, stored_key in pairing.items()}
        result = {own_keys.get(key, key): child for key, child in stored.items()}
        for key, child in into.items():
            if key in pairing:
                result[key] = self._replaced(child, stored[pairing[key]], (*path, pairing[key]))
            else:
                self.missing.append(join((*path, key)))
                result[key] = child
        return result

    def _merged(self, into: Any, stored: Any, path: Path) -> Any:
        """Return the tree's value with only the selected leaves replaced."""
        if path[-1:] == _GROUPS:
            stored = with_own_names(into, stored)
        stored_children = _children(stored)
        if stored_children is None:
            return stored
        if isinstance(into, Mapping):
            own_keys = {stored_key: key for key, stored_key in paired(into, stored_children).items()}
            merged = {
                own_keys.get(key, key): self._merged(into.get(own_keys.get(key, key)), child, (*path, key))
                for key, child in stored_children.items()
            }
            return {**into, **merged}
        if isinstance(into, list) and set(stored_children) <= set(range(len(into))):
            return [
                self._merged(child, stored_children.get(position, child), (*path, position))
                for position, child in enumerate(into)
            ]
        is_whole = isinstance(stored, list) or join(path) in self.manifest.values
        if isinstance(into, list) and not is_whole and all(type(key) is int for key in stored_children):
            self.different.append(
                f"`{join(path)}`: its items {list(stored_children)} are chosen, "
                f"and the list here has {len(into)}"
            )
        return stored

    def _unexpected(self, stored: object, path: Path) -> None:
        names = list(_stored_names(stored))
        self.unexpected.extend(names or [join(path)])

    def refuse_idle_globs(self, source: str) -> None:
        """Raise for a glob that matches neither a name of the checkpoint nor a missing name."""
        for glob in self.idle_globs:
            problem = unmatched(glob, [*self.manifest.tensors, *self.manifest.values])
            raise CheckpointIncompatibleError(f"`{source}`: {problem}. Nothing was loaded")

    def refuse(self, source: str, *, strict: bool) -> None:
        """Raise one error that lists all mismatches."""
        self.manifest.refuse_dropped(self.missing, source)
        lines = []
        if self.different:
            lines.append(_listed("different", self.different))
        if strict and self.missing:
            names = [*self.manifest.tensors, *self.manifest.values]
            lines.append(_listed("not in the checkpoint", [_nearest(name, names) for name in self.missing]))
        if strict and self.unexpected:
            names = [*self.missing, *(fill.name for fill in self.fills)]
            lines.append(
                _listed("only in the checkpoint", [_nearest(name, names) for name in self.unexpected])
            )
        if lines:
            advice = "Load it into the model that it was saved from"
            advice += (
                ", or pass `strict=False` or `include=`"
                if strict and (self.missing or self.unexpected)
                else ""
            )
            advice += ", or `cast=True` for dtypes" if any("dtype" in line for line in self.different) else ""
            raise CheckpointIncompatibleError(f"`{source}` does not fit. {' '.join(lines)} {advice}")


def _matches(name: str, globs: Sequence[str]) -> bool:
    """Return whether a glob matches a name or one of its parent nodes."""
    return any(fnmatchcase(name, glob) or fnmatchcase(name, f"{glob}.*") for glob in globs)


def _has_tensors(node: object) -> bool:
    if isinstance(node, torch.Tensor) or hasattr(node, "slots_like") or hasattr(node, "open_names"):
        return True
    if isinstance(node, Mapping):
        return any(map(_has_tensors, node.values()))
    return isinstance(node, list) and any(map(_has_tensors, node))


def _is_node(node: object) -> bool:
    """Return whether a save splits this value into leaves: a non-empty dict with string keys."""
    return isinstance(node, Mapping) and bool(node) and all(isinstance(key, str) for key in node)


def _children(stored: object) -> dict[Any, object] | None:
    if isinstance(stored, Mapping):
        return dict(stored)
    return dict(enumerate(stored)) if isinstance(stored, list) else None


def _stored_names(node: object) -> list[str]:
    if isinstance(node, _Stored):
        return [str(node)]
    return [name for child in (_children(node) or {}).values() for name in _stored_names(child)]


def _nearest(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, [other for other in names if other != name], n=1, cutoff=0.7)
    return f"`{name}`" + (f" (near: `{near[0]}`)" if near else "")


def _listed(title: str, lines: Sequence[str]) -> str:
    suffix = f", and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    return f"{title.capitalize()}: {', '.join(lines[:_LISTED])}{suffix}."

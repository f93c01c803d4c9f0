"""A checkpoint in another format: streamed from store to store, in memory that is bounded."""

import contextlib
import fnmatch
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from hocket.ckpt.datafiles import compression_level, stored_bytes
from hocket.ckpt.errors import (
    CheckpointExistsError,
    CheckpointIncompatibleError,
    CheckpointNotFoundError,
)
from hocket.ckpt.formats.parts import OutFile, Payload, Tensor
from hocket.ckpt.formats.targets import (
    Content,
    Plan,
    plan_dcp,
    plan_hocket,
    plan_safetensors,
    plan_torch,
)
from hocket.ckpt.globs import check_globs, unmatched
from hocket.ckpt.manifest import Manifest, PathItem, ValueRecord, join_path
from hocket.ckpt.payloads import PayloadReader
from hocket.ckpt.reader import Checkpoint
from hocket.ckpt.reader import open as open_checkpoint
from hocket.ckpt.resuming import check_sizes, identity_of, is_whole, spared
from hocket.native import _native

__all__ = ["MEMORY_BYTES", "SHARD_BYTES", "Conversion", "Format", "convert"]

Format = Literal["hocket", "dcp", "safetensors", "torch"]

MEMORY_BYTES = 256 << 20
"""What a conversion uses for tensors at most, unless told otherwise."""

SHARD_BYTES = 5 * 10**9
"""Bytes of tensors in a file at most, unless told otherwise or one tensor is larger."""

_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
# What tells readers that a folder is a checkpoint, by format.
_MARKERS = ("checkpoint.json.zst", ".metadata", "model.safetensors", "model.safetensors.index.json")
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What a conversion did."""

    source: str
    destination: str
    format: str
    """The source's."""
    to: str
    tensors: int
    values: int
    files: int
    files_found: int
    """How many of them an earlier run had finished."""
    num_bytes: int
    """Bytes of all files, before they are compressed."""
    left_out: tuple[str, ...]
    """Names of what the destination has no place for: values in safetensors; `(step)`, `(user)` and
    `(per rank)` in all formats but Hocket's; opaque things everywhere."""
    text_keyed: tuple[str, ...] = ()
    """Names of mappings whose keys look like integers and are text, in a source that has no other keys."""


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: Format,
    dtype: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    memory_bytes: int = MEMORY_BYTES,
    compression: str | None = None,
    unfenced: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Writes a checkpoint in another format; the source's is recognised.

    Tensors pass through in pieces, several at a time; none is ever whole in memory. (An item that the source
    compressed in another order than C's is unpacked to a temporary file, where `TMPDIR` says.) What tells
    readers that the destination is complete is written last. After a kill or an error, files that were
    finished stay, and the same call goes on: one that stands there is compared with what it would become,
    byte by byte, and not written again. Nothing is taken back, since another run of the same conversion may
    have found it there and relied on it.

    Args:
        source: What `open` takes.
        destination: A folder or prefix; a file for `torch`, and for `safetensors` where it ends so. Nothing
            there is replaced, and nothing but what an earlier run left may be there.
        to: The format.
        dtype: safetensors' name of the dtype that floating-point tensors become, such as `BF16`.
        include: Globs of names; where there are some, only what one of them matches is taken.
        exclude: Globs of names that are left out.
        rename: Beginnings of names to replace, up to a dot or the end.
        max_shard_bytes: Bytes of tensors in a file. `hocket` and `dcp` cut a larger tensor in chunks.
        memory_bytes: Bytes that tensors may take in memory.
        compression: `zstd:N` for compressed data files; for `hocket` only.
        unfenced: Save also to a store that ignores conditions, where of two savers under one name both may
            believe that they won: only where nothing else ever writes. Such a store is refused otherwise, for
            `hocket`; the other formats do without conditions everywhere.
        on_progress: Called with the bytes written and the bytes of all files.

    Raises:
        CheckpointExistsError: Something else stands at the destination.
        CheckpointNotFoundError: A glob of `include` matches nothing.
        CheckpointIncompatibleError: Two names become one, or a dtype that cannot be cast.
        CheckpointUnfencedError: The store cannot keep two savers apart, and `unfenced` was not given.
        ValueError: An argument that makes no sense.
        CheckpointError: What opening and reading the source raise.
    """
    _check_arguments(to, dtype, memory_bytes, max_shard_bytes, compression)
    source, destination = os.fspath(source), os.fspath(destination)
    check_globs("include", include)
    check_globs("exclude", exclude)
    opened = open_checkpoint(source, follow=False)
    _refuse_idle_globs(opened, include)
    content = _content(opened, dtype, _Selection(include, exclude), dict(rename or {}))
    arguments = [to, dtype, include, exclude, dict(rename or {}), max_shard_bytes, compression]
    save_id = _save_id(opened, arguments)
    level = compression_level(compression)
    plan = _plan(destination, to, content, max_shard_bytes, save_id, level, unfenced=unfenced)
    if _is_committed(plan, destination):
        num_found = len(plan.files)
    else:
        num_found = _write(opened, plan, memory_bytes, on_progress)
    opaque = getattr(opened.contents, "opaque", {})
    files = [*plan.files, *([plan.last] if plan.last else [])]
    return Conversion(
        source=source,
        destination=destination,
        format=opened.format,
        to=to,
        tensors=len(content.tensors),
        values=len(content.values.keys() - plan.left_out),
        files=len(files) + (plan.commit is not None),
        files_found=num_found,
        num_bytes=sum(file.size for file in files),
        left_out=(*plan.left_out, *opaque),
        text_keyed=_text_keyed(content) if to == "torch" else (),
    )


def _check_arguments(
    to: str, dtype: str | None, memory_bytes: int, max_shard_bytes: int, compression: str | None
) -> None:
    if to not in get_args(Format):
        raise ValueError(f"`to` is {to!r}; expected one of {', '.join(get_args(Format))}")
    if dtype is not None and dtype not in _FLOATS:
        raise ValueError(f"`dtype` is {dtype!r}; expected one of {', '.join(_FLOATS)}")
    if memory_bytes < 16 << 20 or max_shard_bytes < 1:
        raise ValueError(
            f"`memory_bytes` is {memory_bytes}, `max_shard_bytes` {max_shard_bytes}; expected at least "
            f"{16 << 20} and 1"
        )
    if compression is not None and to != "hocket":
        raise ValueError(
            f"`compression` is {compression!r}, and only `hocket` has a place for it, not {to!r}"
        )


def _refuse_idle_globs(opened: Checkpoint, include: Sequence[str]) -> None:
    names = [*opened.contents.tensors, *opened.contents.values]
    for glob in include:
        if not fnmatch.filter(names, glob):
            raise CheckpointNotFoundError(f"`{opened.uri}`: {unmatched(glob, names)}. Nothing was written.")


def _text_keyed(content: Content) -> tuple[str, ...]:
    """Where integers were made text before: torch's planner of distributed checkpoints does it."""
    origin = content.origin
    writer = origin.writer if isinstance(origin, Manifest) else origin.format
    if writer not in ("dcp", "hocket.ckpt.dcp"):
        return ()
    paths = [tensor.path for tensor in content.tensors] + [record.path for record in content.values.values()]
    steps = [(path[:depth], step) for path in paths for depth, step in enumerate(path)]
    return tuple(
        sorted({join_path(node) for node, step in steps if isinstance(step, str) and step.isdecimal()})
    )


@dataclass(frozen=True, slots=True)
class _Selection:
    include: Sequence[str]
    exclude: Sequence[str]

    def takes(self, name: str) -> bool:
        is_in = not self.include or any(fnmatch.fnmatchcase(name, glob) for glob in self.include)
        return is_in and not any(fnmatch.fnmatchcase(name, glob) for glob in self.exclude)


def _content(
    opened: Checkpoint, dtype: str | None, selection: _Selection, rename: Mapping[str, str]
) -> Content:
    contents = opened.contents
    tensors: list[Tensor] = []
    first: dict[tuple[str, str], str] = {}
    taken: set[str] = set()
    keyed: set[tuple[PathItem, ...]] = set()

    def name_of(path: tuple[PathItem, ...], old: str) -> tuple[str, tuple[PathItem, ...]]:
        new = _renamed(path, rename)
        name = join_path(new)
        if name in taken:
            raise CheckpointIncompatibleError(
                f"`{old}` becomes `{name}`, and so does another. Rename it apart."
            )
        taken.add(name)
        # Of what was renamed, the end of the path is what it was.
        shift = len(new) - len(path)
        for depth in range(max(0, -shift), len(path)):
            if path[:depth] in contents.integer_keyed and new[depth + shift :] == path[depth:]:
                keyed.add(new[: depth + shift])
        return name, new

    for old, record in contents.tensors.items():
        if not selection.takes(old):
            continue
        name, path = name_of(record.path, old)
        owner = record.same_as or old
        becomes = dtype if dtype is not None and record.dtype in _FLOATS else record.dtype
        same_as = first.setdefault((owner, becomes), name)
        tensors.append(
            Tensor(
                source=old,
                name=name,
                path=path,
                dtype=becomes,
                shape=record.shape,
                same_as=None if same_as == name else same_as,
            )
        )
    values = {}
    for old, value in contents.values.items():
        if selection.takes(old):
            name, path = name_of(value.path, old)
            values[name] = ValueRecord(path=path, value=value.value)
    return Content(tensors=tensors, values=values, origin=contents, integer_keyed=frozenset(keyed))


def _renamed(path: tuple[PathItem, ...], rename: Mapping[str, str]) -> tuple[PathItem, ...]:
    """A path after renaming; where its name changes, what was renamed is one key of it."""
    name = join_path(path)
    for old, new in rename.items():
        if name != old and not name.startswith(old.removesuffix(".") + "."):
            continue
        for length in range(1, len(path) + 1):
            # The rest of the path stays as it is where the renamed part ends with a step of it.
            if join_path(path[:length]) == old.removesuffix("."):
                return (*([new.removesuffix(".")] if new else []), *path[length:]) or (new,)
        tail = name[len(old.removesuffix(".")) + 1 :]
        return (f"{new.removesuffix('.')}.{tail}" if new else tail,)
    return path


def _save_id(source: Checkpoint, arguments: Sequence[object]) -> str:
    """The same for the same source and arguments, so that a rerun finds its files by their names."""
    contents = source.contents
    identity = identity_of(source.uri, contents) if isinstance(contents, Manifest) else [contents.digest]
    # What the files say of their writer is part of them.
    text = json.dumps(["convert", 1, _native.__version__, *identity, *arguments])
    return _native.xxh3_128(text.encode()).hex()


def _plan(
    destination: str,
    to: Format,
    content: Content,
    limit: int,
    save_id: str,
    level: int | None,
    *,
    unfenced: bool,
) -> Plan:
    folder = destination.rstrip("/")
    root, _, name = folder.rpartition("/")
    if to == "hocket":
        return plan_hocket(folder, content, limit, save_id=save_id, level=level, unfenced=unfenced)
    if to == "dcp":
        return plan_dcp(folder, content, limit)
    if to == "torch":
        if not name.endswith(_TORCH_SUFFIXES):
            raise ValueError(
                f"`{destination}`: expected a file's name that ends in one of {', '.join(_TORCH_SUFFIXES)}"
            )
        return plan_torch(root or ("/" if folder.startswith("/") else "."), name, content)
    if name.endswith(".safetensors"):
        return plan_safetensors(root or ("/" if folder.startswith("/") else "."), name, content, limit)
    return plan_safetensors(folder, None, content, limit)


def _is_committed(plan: Plan, destination: str) -> bool:
    """Whether an earlier run came to its end; looks, before a byte is written, for what is not ours.

    A checkpoint that has lost files since is written once more, as far as they are gone.

    Raises:
        CheckpointExistsError: Something else stands there.
    """
    foreign = CheckpointExistsError(
        f"`{destination}` holds another checkpoint already, or a part of one, and was not touched. Name "
        "another destination, or delete it first."
    )
    if plan.save_id is not None:
        with contextlib.suppress(CheckpointNotFoundError):
            if json.loads(_native.ckpt_manifest_head(plan.root))["save_id"] != plan.save_id:
                raise foreign
            manifest = Manifest.from_document(_native.ckpt_manifest_read(plan.root))
            return is_whole(plan.root, manifest.files)
    own = {file.path: file for file in plan.files} | ({plan.last.path: plan.last} if plan.last else {})
    # In a folder of its own; a file may stand beside others.
    others = [path for path in _MARKERS if path not in own] if plan.root == destination.rstrip("/") else []
    sizes = _native.ckpt_sizes(plan.root, [*own, *others])
    for path, size in zip([*own, *others], sizes, strict=True):
        is_possible = path in own and (own[path].level is not None or own[path].size == size)
        if size is not None and not is_possible:
            raise foreign
    if plan.last is not None and _native.ckpt_sizes(plan.root, [plan.last.path])[0] is not None:
        _write_file(plan.root, plan.last, None, lambda _: None)  # only compares
    return False


def _write(
    source: Checkpoint, plan: Plan, memory_bytes: int, on_progress: Callable[[int, int], None] | None
) -> int:
    """Has all files at the destination; returns how many stood there."""
    total = sum(file.size for file in plan.files)
    done, num_found = 0, 0

    def passed(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if on_progress is not None:
            on_progress(done, total)

    records, sizes = [], {}
    with contextlib.ExitStack() as stack:
        if plan.save_id is not None:
            stack.enter_context(spared(plan.root, plan.save_id, [file.path for file in plan.files]))
        reader = stack.enter_context(PayloadReader(source, plan.files, memory_bytes))
        for file in plan.files:
            was_there, record = _write_file(plan.root, file, reader, passed)
            num_found += was_there
            sizes[file.path] = file.size
            if record is not None:
                records.append(record)
                sizes[file.path] = stored_bytes(record)
        check_sizes(plan.root, sizes)
        if plan.last is not None:
            num_found += _write_file(plan.root, plan.last, None, lambda _: None)[0]
        if plan.commit is not None:
            plan.commit(records)
    return num_found


def _write_file(
    root: str, file: OutFile, reader: PayloadReader | None, passed: Callable[[int], None]
) -> tuple[bool, "_native.CkptFile | None"]:
    """Writes a file, or compares it with the one that stands there; whether one does, and its record."""
    sink = _native.CkptSink(root, file.path, size=file.size, data_start=file.data_start, level=file.level)
    try:
        for part in file.parts:
            if isinstance(part, Payload):
                assert reader is not None
                for array in reader.take(part):
                    part.crc = _native.crc32(array.ctypes.data, array.nbytes, part.crc)
                    sink.write_from(array.ctypes.data, array.nbytes)
                    passed(array.nbytes)
            else:
                data = part if isinstance(part, bytes) else part.make()
                sink.write(data)
                passed(len(data))
        return sink.found, sink.finish()
    finally:
        sink.close()

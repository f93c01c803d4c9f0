"""Conversion of a checkpoint to another format, streamed between stores in bounded memory."""

import fnmatch
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hocket.ckpt.document.boxes import whole
from hocket.ckpt.document.contents import CheckpointContents
from hocket.ckpt.document.dtypes import FLOATS, float_dtype
from hocket.ckpt.document.file_names import Compression, parse_compression
from hocket.ckpt.document.records import PathItem, ValueRecord
from hocket.ckpt.document.tree import join as join_path
from hocket.ckpt.document.tree import renamed
from hocket.ckpt.document.values import encode_value
from hocket.ckpt.errors import CheckpointIncompatibleError, CheckpointNotFoundError
from hocket.ckpt.formats.companions import check_whole
from hocket.ckpt.formats.output_file import ConvertedTensor
from hocket.ckpt.formats.table import FORMATS, ConversionTarget, Format
from hocket.ckpt.formats.writers import ConversionContent, FilePlan
from hocket.ckpt.globs import check_globs, taken, unmatched, unmatched_prefix
from hocket.ckpt.read.opener import open as open_checkpoint
from hocket.ckpt.read.reader import Checkpoint
from hocket.ckpt.read.source import TensorSource
from hocket.ckpt.uris import local_path
from hocket.ckpt.verbs.destination import check_destination, is_finished
from hocket.ckpt.verbs.rewrite import rewrite
from hocket.native import _native

__all__ = [
    "MEMORY_BYTES",
    "SHARD_BYTES",
    "ConvertReport",
    "ConvertRequest",
    "Format",
    "check_request",
    "content_of",
    "convert",
    "idle_globs",
    "refuse_idle_globs",
    "write_content",
]

MEMORY_BYTES = 256 << 20
"""Default memory limit for tensor data."""

SHARD_BYTES = 5 * 10**9
"""Default limit of tensor bytes per file; a larger tensor gets a file of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertReport:
    """The result of a conversion."""

    source: str
    destination: str
    format: str
    """The source's format."""
    to: str
    tensors: int
    values: int
    files: int
    files_found: int
    """Number of files that an earlier run had finished."""
    num_bytes: int
    """Size of all files in bytes, before compression."""
    left_out: tuple[str, ...]
    """Names that the destination format cannot store.

    Values in safetensors; `(step)`, `(user)` and `(per rank)` in all formats except Hocket's; opaque objects
    in every format.
    """
    step: int | None = None
    """The step that was recorded; None if the format records none."""
    step_from: str | None = None
    """The value or entry of the source that the step is from; None if there is none, or `step` was given."""
    text_keyed: tuple[str, ...] = ()
    """Names of mappings with string keys that look like integers, from a format that has only string keys."""
    beyond_range: Mapping[str, int] = field(default_factory=dict)
    """Number of items beyond the range of `dtype`, by tensor, for tensors that this run wrote or compared.

    As in torch, they became the largest number of F8_E4M3, infinity in F16, BF16 and F8_E5M2, and NaN in the
    others.
    """
    idle_exclude: tuple[str, ...] = ()
    """For each glob of `exclude` that matches no name, a sentence with the nearest names."""


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
    step: int | None = None,
    user: object = None,
    allow_expand: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> ConvertReport:
    """Convert a checkpoint to another format; the source's format is detected.

    Tensors are streamed in pieces, several at a time, and never held whole in memory. (An item that the
    source compressed in another order than C order is decompressed to a temporary file in `TMPDIR`.) The file
    that marks the destination as complete is written last. After a kill or an error, finished files remain,
    and the same call resumes: a finished file is compared byte by byte with its expected contents and not
    written again. A file that differs is an error, except from a Hocket checkpoint to another: there it was
    damaged, as its name follows from the contents of the source, and is replaced. Files are not removed on
    failure, because another run of the same conversion may rely on them. What can be refused without the
    source, is refused before it is opened.

    Args:
        source: A checkpoint, as for `open`.
        destination: A folder or prefix; a file for `torch`, and for `safetensors` if it has that suffix. It
            may hold nothing but the files of an earlier run of this conversion; nothing is replaced.
        to: The destination format.
        dtype: The dtype that floating-point tensors are cast to, by safetensors or torch name in any case:
            `BF16`, `bfloat16`. Items beyond its range become what torch makes of them, and are counted.
        include: Globs of names to convert; if empty, all names.
        exclude: Globs of names to leave out.
        rename: Name prefixes to replace; a prefix ends at a dot or at the end of the name.
        max_shard_bytes: Limit of tensor bytes per file. `hocket` and `dcp` split a larger tensor into chunks.
        memory_bytes: Memory limit for tensor data.
        compression: `zstd:N` or `planes+zstd:N` for compressed data files; for `hocket` only.
        unfenced: For `hocket`, also write to a store that ignores or rejects conditional writes. Two savers
            of one name may then both succeed, so set it only if there is no other writer. Such a store is
            refused otherwise. The other formats never use conditional writes.
        step: The step to record, for `hocket`. If None, the step that the source records, in its manifest or
            as a count of a trainer's (`STEP_NAMES`), or 0.
        user: The `user` value to record, for `hocket`: a JSON value. If None, the source's value.
        allow_expand: Write every item of tensors that are far larger in memory than in their file, because a
            stride is 0. Otherwise `torch` keeps the stride, and the other formats, which have none, refuse.
        on_progress: Called with the bytes written so far and the bytes of all files.

    Raises:
        CheckpointExistsError: The destination holds something else.
        CheckpointNotFoundError: A glob of `include` or a prefix of `rename` matches nothing.
        CheckpointIncompatibleError: Two names become equal, a dtype cannot be cast, or the source is one of
            several files of a model.
        CheckpointUnfencedError: The store ignores conditional writes, and `unfenced` is False.
        StoreError: The destination cannot be written to.
        ValueError: An argument is invalid.
        CheckpointError: The source cannot be opened or read.
    """
    destination = local_path(destination)
    request = ConvertRequest(
        to=to,
        dtype=None if dtype is None else float_dtype(dtype),
        include=include,
        exclude=exclude,
        rename=dict(rename or {}),
        max_shard_bytes=max_shard_bytes,
        compression=compression,
        unfenced=unfenced,
        step=step,
        user=user,
    )
    check_request(request, memory_bytes)
    check_destination(destination, to, unfenced=unfenced)
    opened = open_checkpoint(source, follow=False, allow_expand=allow_expand)
    source, contents = opened.uri, opened.contents
    if FORMATS[contents.format].has_companions:
        check_whole(source, contents)
    refuse_idle_globs(source, contents, include)
    if (problem := unmatched_prefix(request.rename, [*contents.tensors, *contents.values])) is not None:
        raise CheckpointNotFoundError(f"`{source}`: {problem}. Nothing was written")
    content = content_of(contents, request)
    if not opened.allow_expand:
        content = _limit_expansion(opened, content, to)
    return write_content(
        opened,
        content,
        request,
        source=source,
        destination=destination,
        identity=lambda: ["convert", 1, _native.__version__, *opened.identity(), *request.identity],
        memory_bytes=memory_bytes,
        on_progress=on_progress,
    )


def write_content(
    opened: TensorSource,
    content: ConversionContent,
    request: "ConvertRequest",
    *,
    source: str,
    destination: str,
    identity: Callable[[], list[object]],
    memory_bytes: int,
    on_progress: Callable[[int, int], None] | None,
) -> ConvertReport:
    """Write tensors and values as a checkpoint, or finish what an earlier run began.

    Args:
        opened: The reader of the tensors.
        content: The tensors and values.
        request: The arguments of the conversion.
        source: The name of the source in the report.
        destination: A folder, prefix or file.
        identity: Returns all that determines the contents, so that a rerun finds its files by name.
        memory_bytes: Memory limit for tensor data.
        on_progress: Called with the bytes written so far and the bytes of all files.

    Raises:
        CheckpointError: As for `convert`.
    """
    contents = content.origin
    target = ConversionTarget(
        destination=destination,
        limit=request.max_shard_bytes,
        # Files hold the writer's version, so it is part of the identity.
        save_id=lambda: _native.xxh3_128(json.dumps(identity()).encode()).hex(),
        compression=request.encoding,
        unfenced=request.unfenced,
        model_root=contents.root if FORMATS[contents.format].has_companions else None,
    )
    plan = FORMATS[request.to].plan(target, content)
    if is_finished(plan, destination):
        num_found = len(plan.files)
    else:
        on_bytes = _progress_of(plan, on_progress)
        num_found = rewrite(opened, plan, memory_bytes=memory_bytes, on_bytes=on_bytes).num_found
    return _conversion(source, destination, content, plan, request, num_found=num_found)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertRequest:
    """The arguments that determine what is written."""

    to: Format
    dtype: str | None
    include: Sequence[str]
    exclude: Sequence[str]
    rename: Mapping[str, str]
    max_shard_bytes: int
    compression: str | None
    unfenced: bool
    step: int | None
    user: object
    encoding: Compression | None = field(init=False)
    """The encoding that `compression` names; a `compression` of another form is refused."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "encoding", parse_compression(self.compression))

    @property
    def identity(self) -> list[object]:
        """The arguments as JSON values; a rerun with equal ones finds the files of an earlier run."""
        arguments: list[object] = [self.to, self.dtype, self.include, self.exclude, self.rename]
        arguments += [self.max_shard_bytes, self.compression]
        if self.step is not None or self.user is not None:
            arguments += [self.step, encode_value(self.user)]
        return arguments

    def taken(self, names: Iterable[str]) -> list[str]:
        """Return the names of the leaves that are converted."""
        return taken(names, include=self.include, exclude=self.exclude)


def _conversion(
    source: str,
    destination: str,
    content: ConversionContent,
    plan: FilePlan,
    request: ConvertRequest,
    *,
    num_found: int,
) -> ConvertReport:
    origin, to = content.origin, request.to
    names = [*origin.tensors, *origin.values]
    files = [*plan.files, *([plan.last] if plan.last else [])]
    return ConvertReport(
        source=source,
        destination=destination,
        format=origin.format,
        to=to,
        tensors=len(content.tensors),
        values=len(content.values.keys() - plan.left_out),
        files=len(files) + (plan.commit is not None),
        files_found=num_found,
        num_bytes=sum(file.size for file in files),
        left_out=(*plan.left_out, *origin.opaque),
        step=_step_of(content) if FORMATS[to].has_manifest else None,
        step_from=origin.step_from if content.step is None else None,
        text_keyed=_text_keyed(content) if to == "torch" else (),
        beyond_range=plan.beyond_range(),
        idle_exclude=idle_globs(request.exclude, names),
    )


def _step_of(content: ConversionContent) -> int:
    return content.origin.step if content.step is None else content.step


def check_request(request: ConvertRequest, memory_bytes: int) -> None:
    """Raise `ValueError` for an argument that no source can make valid."""
    to, compression, step = request.to, request.compression, request.step
    if to not in FORMATS:
        raise ValueError(f"`to` is {to!r}; expected one of {', '.join(FORMATS)}")
    if memory_bytes < 16 << 20 or request.max_shard_bytes < 1:
        raise ValueError(
            f"`memory_bytes` is {memory_bytes}, `max_shard_bytes` {request.max_shard_bytes}; expected at "
            f"least {16 << 20} and 1"
        )
    if compression is not None and not FORMATS[to].has_manifest:
        raise ValueError(
            f"`compression` is {compression!r}, but `to` is {to!r}; only `hocket` compresses its data"
        )
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**64):
        raise ValueError(f"`step` is {step!r:.80}; expected an integer from 0 to 2^64 - 1")
    if not FORMATS[to].has_manifest and (step is not None or request.user is not None):
        raise ValueError(f"`step` and `user` are recorded by `hocket` only; `to` is {to!r}")
    check_globs(include=request.include, exclude=request.exclude)
    if request.user is not None:
        encode_value(request.user)


def refuse_idle_globs(source: str, contents: CheckpointContents, include: Sequence[str]) -> None:
    """Raise `CheckpointNotFoundError` if a glob matches no name of a checkpoint."""
    names = [*contents.tensors, *contents.values]
    for glob in include:
        if not fnmatch.filter(names, glob):
            raise CheckpointNotFoundError(f"`{source}`: {unmatched(glob, names)}. Nothing was written")


def idle_globs(exclude: Sequence[str], names: Collection[str]) -> tuple[str, ...]:
    """Return for each glob of `exclude` that matches none of the names a sentence with the nearest ones."""
    return tuple(unmatched(glob, names, "exclude") for glob in exclude if not fnmatch.filter(names, glob))


def _text_keyed(content: ConversionContent) -> tuple[str, ...]:
    """Return the mappings whose integer keys torch's planner may have turned into strings."""
    if content.origin.writer not in ("dcp", "hocket.ckpt.dcp"):
        return ()
    paths = [tensor.path for tensor in content.tensors] + [record.path for record in content.values.values()]
    steps = [(path[:depth], step) for path in paths for depth, step in enumerate(path)]
    return tuple(
        sorted({join_path(node) for node, step in steps if isinstance(step, str) and step.isdecimal()})
    )


def content_of(contents: CheckpointContents, request: ConvertRequest) -> ConversionContent:
    """Return the tensors and values of a checkpoint that a request takes, under their new names.

    Raises:
        CheckpointIncompatibleError: Two names become equal.
    """
    dtype = request.dtype
    tensors: list[ConvertedTensor] = []
    first: dict[tuple[str, str], str] = {}
    used_names: set[str] = set()
    keyed: set[tuple[PathItem, ...]] = set()

    def name_of(path: tuple[PathItem, ...], old_name: str) -> tuple[str, tuple[PathItem, ...]]:
        name, new_path = old_name, path
        if request.rename:
            new_path = renamed(path, request.rename)
            name = join_path(new_path)
        if name in used_names:
            raise CheckpointIncompatibleError(
                f"`{old_name}` becomes `{name}`, and another tensor has that name. Choose another new name"
            )
        used_names.add(name)
        # Renaming keeps the end of the path.
        shift = len(new_path) - len(path)
        for depth in range(max(0, -shift), len(path)):
            if path[:depth] in contents.integer_keyed and new_path[depth + shift :] == path[depth:]:
                keyed.add(new_path[: depth + shift])
        return name, new_path

    wanted = set(request.taken([*contents.tensors, *contents.values]))
    for old_name, record in contents.tensors.items():
        if old_name not in wanted:
            continue
        name, path = name_of(record.path, old_name)
        owner = record.same_as or old_name
        target_dtype = dtype if dtype is not None and record.dtype in FLOATS else record.dtype
        same_as = first.setdefault((owner, target_dtype), name)
        tensors.append(
            ConvertedTensor(
                source=old_name,
                name=name,
                path=path,
                dtype=target_dtype,
                shape=record.shape,
                same_as=None if same_as == name else same_as,
            )
        )
    values = {}
    for old_name, value in contents.values.items():
        if old_name in wanted:
            name, path = name_of(value.path, old_name)
            values[name] = ValueRecord(path=path, value=value.value)
    return ConversionContent(
        tensors=tensors,
        values=values,
        origin=contents,
        integer_keyed=frozenset(keyed),
        step=request.step,
        user=request.user,
    )


def _limit_expansion(opened: Checkpoint, content: ConversionContent, to: Format) -> ConversionContent:
    """Return the content with expanded views kept as views, if the destination format has strides.

    Raises:
        CheckpointIncompatibleError: A tensor is far larger in memory than in its file.
    """
    opened.locate(tensor.source for tensor in content.tensors)
    tensors = list(content.tensors)
    if FORMATS[to].has_strides:
        tensors = [_unexpanded(opened, tensor) for tensor in tensors]
    opened.check_expansion([(tensor.source, whole(tensor.shape)) for tensor in tensors])
    return replace(content, tensors=tensors)


def _unexpanded(opened: Checkpoint, tensor: ConvertedTensor) -> ConvertedTensor:
    """Return a tensor whose repeated items are stored once."""
    repeated = opened.repeated_dims(tensor.source)
    if not repeated:
        return tensor
    stored = tuple(1 if dim in repeated else extent for dim, extent in enumerate(tensor.shape))
    return replace(tensor, shape=stored, expanded_to=tensor.shape)


def _progress_of(
    plan: FilePlan, on_progress: Callable[[int, int], None] | None
) -> Callable[[int], None] | None:
    """Return a function that adds the bytes it is called with, and reports the sum and the total."""
    if on_progress is None:
        return None
    total, done = sum(file.size for file in plan.files), 0

    def passed(num_bytes: int) -> None:
        nonlocal done
        # A damaged file is passed twice.
        done = min(done + num_bytes, total)
        on_progress(done, total)

    return passed

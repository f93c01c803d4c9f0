"""Rewriting of a checkpoint's tensors into planned files: the pipeline of `convert` and `reshard`.

Tensors are prefetched and written in pieces, so memory is bounded for tensors and files of any size. A rerun
after a kill compares the finished files with the data that belongs there and writes only the others.
"""

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.ckpt.document.file_names import file_metadata, stored_bytes
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError
from hocket.ckpt.formats.output_file import ComputedPart, OutFile, TensorPayload
from hocket.ckpt.formats.writers import FilePlan
from hocket.ckpt.read.prefetch import PayloadReader
from hocket.ckpt.read.source import TensorSource
from hocket.native import _native
from hocket.native.paths import is_uri

if TYPE_CHECKING:
    from hocket.native._native import CkptFile

__all__ = ["Rewritten", "committed", "rewrite", "write_file"]

OnBytes = Callable[[int], None]
OnFile = Callable[[str, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewritten:
    """The result of a rewrite."""

    num_found: int
    """Number of files that an earlier run had finished."""
    manifest: Manifest | None
    """The committed manifest, of a Hocket checkpoint."""


def committed(uri: str, save_id: str, *, replaces: str | None = None) -> tuple[Manifest, bool] | None:
    """Return the manifest that an earlier run of a rewrite committed, and whether all its files exist.

    None also if the save is there that the rewrite replaces.

    Raises:
        CheckpointExistsError: Another save's checkpoint is there.
    """
    try:
        head = json.loads(_native.ckpt_manifest_head(uri))
    except CheckpointNotFoundError:
        return None
    if head["save_id"] == replaces:
        return None
    if head["save_id"] != save_id:
        raise CheckpointExistsError(
            f"`{uri}` holds another checkpoint already, of step {head['step']}, and was not touched. Name "
            "another destination, or delete it first"
        )
    manifest = Manifest.read(uri)
    return manifest, _is_whole(uri, manifest.files)


def rewrite(
    source: TensorSource,
    plan: FilePlan,
    *,
    memory_bytes: int,
    num_writers: int = 1,
    on_bytes: OnBytes | None = None,
    on_file: OnFile | None = None,
) -> Rewritten:
    """Write all files of a plan that the destination lacks, and commit.

    Args:
        source: The reader that the plan's tensors are read from.
        plan: The files to write.
        memory_bytes: Memory limit for tensor data.
        num_writers: The number of files that are written at a time.
        on_bytes: Called with the number of bytes of each piece of a tensor and each header; with more than
            one writer, from several threads.
        on_file: Called after each file with its path and its tensor bytes; with more than one
            writer, from several threads.

    Raises:
        CheckpointExistsError: The destination holds something else, or another run is writing to it.
        CheckpointError: The source cannot be read, or a file disappears meanwhile. Nothing was committed.
    """
    # All runs write the same bytes only if the source's identity covers its data.
    may_replace = plan.save_id is not None and source.identifies_data
    job = _Job(source, plan, memory_bytes // num_writers, on_bytes, on_file, may_replace=may_replace)
    with _no_empty_folders(plan.root), contextlib.ExitStack() as stack:
        if plan.save_id is not None:
            stack.enter_context(_spared(plan.root, plan.save_id, [file.path for file in plan.files]))
        written = job.run(num_writers)
        records = [record for _, record in written if record is not None]
        sizes = {file.path: file.size for file in plan.files}
        sizes.update((record["path"], stored_bytes(record)) for record in records)
        _check_sizes(plan.root, sizes)
        num_found = sum(is_found for is_found, _ in written)
        if plan.last is not None:
            num_found += write_file(plan.root, plan.last)[0]
        if plan.save_id is not None:
            _check_committed(plan.root, plan.save_id, records, plan.replaces)
        manifest = None if plan.commit is None else plan.commit(records)
    return Rewritten(num_found=num_found, manifest=manifest)


def _check_committed(root: str, save_id: str, records: Sequence["CkptFile"], replaces: str | None) -> None:
    """Check that a manifest which an earlier run committed describes these files.

    Raises:
        CheckpointExistsError: It does not.
    """
    found = committed(root, save_id, replaces=replaces)
    if found is None:
        return
    digests = {file["path"]: (file["header"], file["digests"]) for file in found[0].files}
    for record in records:
        if digests.get(record["path"]) != (record["header"], record["digests"]):
            raise CheckpointExistsError(
                f"`{root}` was committed by an earlier run, and `{record['path']}` has other contents now: "
                "the source has changed since. Name another destination, or delete it first"
            )


Written = tuple[bool, "CkptFile | None"]
"""Whether the file existed, and its record if it has one."""


class _Job:
    """A rewrite in progress."""

    def __init__(
        self,
        source: TensorSource,
        plan: FilePlan,
        writer_bytes: int,
        on_bytes: OnBytes | None,
        on_file: OnFile | None,
        *,
        may_replace: bool,
    ) -> None:
        self._source = source
        self._plan = plan
        self._writer_bytes = writer_bytes
        self._on_bytes = on_bytes
        self._on_file = on_file
        self._may_replace = may_replace
        self._stop = threading.Event()

    def run(self, num_writers: int) -> list[Written]:
        """Write the files, each writer every `num_writers`-th; return the results in the plan's order."""
        files = self._plan.files
        if num_writers == 1:
            # In this thread, where a signal such as Ctrl-C also ends a wait for a store.
            return self._write(files)
        with ThreadPoolExecutor(num_writers, thread_name_prefix="hocket-rewrite") as pool:
            writers = [pool.submit(self._write, files[first::num_writers]) for first in range(num_writers)]
            try:
                wait(writers, return_when=FIRST_EXCEPTION)
            finally:
                self._stop.set()
        errors = [error for error in (writer.exception() for writer in writers) if error is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, CancelledError)), errors[0])
        written = [writer.result() for writer in writers]
        return [written[number % num_writers][number // num_writers] for number in range(len(files))]

    def _write(self, files: Sequence[OutFile]) -> list[Written]:
        written: list[Written] = []
        failures: Counter[str] = Counter()
        while len(written) < len(files):
            rest = files[len(written) :]
            with PayloadReader(self._source, rest, self._writer_bytes) as reader:
                for file in rest:
                    # Another run of this rewrite may just have finished a file that differs, as the second
                    # attempt finds out. Otherwise the file is unfinished or damaged. Since all runs write the
                    # same bytes under this name, it is replaced in one step.
                    replaces = failures[file.path] == 2
                    try:
                        written.append(
                            write_file(self._plan.root, file, reader, self._passed, replaces=replaces)
                        )
                    except CheckpointExistsError:
                        if not self._may_replace or replaces:
                            raise
                        failures[file.path] += 1
                        break
                    if self._on_file is not None:
                        self._on_file(file.path, file.size - (file.data_start or 0))
                    file.release()
        return written

    def _passed(self, num_bytes: int) -> None:
        if self._on_bytes is not None:
            self._on_bytes(num_bytes)
        if self._stop.is_set():
            raise CancelledError


def write_file(
    root: str,
    file: OutFile,
    reader: PayloadReader | None = None,
    passed: OnBytes = lambda _: None,
    *,
    replaces: bool = False,
) -> Written:
    """Write a file, or compare it with the existing one, or replace that."""
    has_crc = any(isinstance(part, ComputedPart) for part in file.parts)
    writer = _native.CkptStreamWriter(
        root,
        file.path,
        size=file.size,
        data_start=file.data_start,
        compression=file.compression,
        replaces=replaces,
    )
    try:
        for part in file.parts:
            if isinstance(part, TensorPayload):
                assert reader is not None
                for array in reader.take(part):
                    if has_crc:
                        part.crc = _native.crc32(array.ctypes.data, array.nbytes, part.crc)
                    writer.write_from(array.ctypes.data, array.nbytes)
                    passed(array.nbytes)
            else:
                data = part if isinstance(part, bytes) else part.make()
                writer.write(data)
                passed(len(data))
        return writer.found, writer.finish()
    finally:
        writer.close()


@contextlib.contextmanager
def _spared(uri: str, save_id: str, paths: Sequence[str]) -> Iterator[None]:
    """Keep `gc` from removing the data files of an earlier, unfinished run while this run works.

    `gc` keeps all files of a save if one of them is young. If some of `paths` exist, an empty file is
    therefore written beside them and removed at the end; one that a killed run left is removed first. Setting
    modification times instead would not work on object stores.
    """
    if all(size is None for size in _native.ckpt_sizes(uri, paths)):
        yield
        return
    marker = f"data/{save_id[:8]}-r0-running.safetensors"
    _native.ckpt_delete_files(uri, [marker])
    # Another run of the same rewrite may write it at the same time; one marker protects both.
    with contextlib.suppress(CheckpointExistsError):
        _native.ckpt_write_file(uri, marker, entries=[], metadata=file_metadata(save_id))
    try:
        yield
    finally:
        # If it is left behind, `gc` removes it.
        with contextlib.suppress(Exception):
            _native.ckpt_delete_files(uri, [marker])


@contextlib.contextmanager
def _no_empty_folders(place: str) -> Iterator[None]:
    """Remove the empty folders of a local checkpoint that a failed or interrupted run created.

    Folders with files stay, because a rerun reuses the files that are finished.
    """
    created: list[Path] = []
    if not is_uri(place):
        root = Path(place)
        created = [folder for folder in (root / "data", root, *root.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in created:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _check_sizes(uri: str, sizes: Mapping[str, int]) -> None:
    """Check that all files still exist with their sizes, immediately before the commit.

    Raises:
        CheckpointError: A file is missing or has another size.
    """
    for (path, size), actual_size in zip(sizes.items(), _native.ckpt_sizes(uri, list(sizes)), strict=True):
        if actual_size != size:
            raise CheckpointError(
                f"`{path}` under `{uri}`, which was finished with {size} bytes, "
                f"{'is gone' if actual_size is None else f'has {actual_size}'}: another process removes or "
                "writes files there. Nothing was committed; run it again"
            )


def _is_whole(uri: str, files: Sequence["CkptFile"]) -> bool:
    """Return whether every data file of a manifest exists with its size."""
    return _native.ckpt_sizes(uri, [file["path"] for file in files]) == list(map(stored_bytes, files))

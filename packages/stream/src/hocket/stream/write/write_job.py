"""Writing of one data set by many tasks: each writes a part, and one commit writes the index over all."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from hocket.native import Store
from hocket.native.errors import HocketError, StoreChangedError, StoreExistsError, StoreTransientError
from hocket.stream.errors import ConfigError, DatasetExistsError
from hocket.stream.settings.places import find_folder
from hocket.stream.write.output import (
    INDEX_NAME,
    DatasetOutput,
    Place,
    below,
    move_files,
    read_object,
    split_place,
)
from hocket.stream.write.writer import MDSWriter

logger = logging.getLogger("hocket.stream")

#: The object that says which job writes to a place; it is deleted by the commit.
JOB_NAME = "_write_job.json"

_PART_FOLDER = re.compile(r"part-\d{5,}-(?P<job>[0-9a-f]{8})-[0-9a-f]{8}")
_MAX_DELETES = 16
_MAX_TRIES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenPart:
    """A part of a data set whose files are stored, as a task returns it to the job's driver."""

    number: int
    folder: str
    num_samples: int
    columns: dict[str, str]
    shards: list[dict[str, Any]]
    """Entries of the index, with names of files within `folder`."""


class WriteJob:
    """A data set that tasks on several machines write, in parts, to one place.

    The driver calls `start`, then the tasks write parts by `PartWriter`, then the driver calls `commit` with
    the parts that the tasks returned, or `abort`. Each attempt at a part has a folder of its own, so attempts
    at the same part cannot disturb each other. Nothing is readable before the commit has written the index.

    Jobs are pickled and sent to the tasks. The place and its credentials have to be the same everywhere: an
    object store, or a folder that all machines share.

    Args:
        out: A path, a URI, or both as `(local, remote)`.
        settings: Arguments of `MDSWriter` other than `columns` and `out`. `exist_ok` replaces a data set, and
            what a killed job has left.

    Raises:
        ConfigError: `append` is among the settings.
    """

    def __init__(self, out: Place, settings: Mapping[str, Any]) -> None:
        if settings.get("append"):
            raise ConfigError(
                "`append` is given: expected a new data set from a job of several tasks; write it to a "
                "folder of its own and merge the two by `merge_index`"
            )
        # Tasks may run in another working directory than the driver.
        sides = [Store(side).uri for side in split_place(out) if side is not None]
        self.out: Place = sides[0] if len(sides) == 1 else (sides[0], sides[1])
        self.exist_ok = bool(settings.get("exist_ok", False))
        self.settings = {**settings, "exist_ok": False, "append": False, "progress_bar": False}
        self.job_id = os.urandom(4).hex()
        self._has_ended = False

    def __repr__(self) -> str:
        return f"<WriteJob {self.job_id} to {self._output().uri!r}>"

    def check(self) -> None:
        """Raise if another job writes to the place, or has been killed while it did, without `exist_ok`.

        Raises:
            DatasetExistsError: There is such a job.
        """
        if not self.exist_ok and self._owner() is not None:
            raise self._taken()

    def start(self) -> None:
        """Claim the place. With `exist_ok`, delete what is there: the index, its shards, and all parts.

        Raises:
            DatasetExistsError: The place is in use, and `exist_ok` is false.
        """
        self._has_ended = True  # until the place is claimed
        output = self._output()
        self.check()
        output.make_room(exist_ok=self.exist_ok, dry_run=True)
        claim = json.dumps({"job": self.job_id}).encode()
        try:
            output.sides()[0].put(JOB_NAME, claim, if_absent=not self.exist_ok)
        except StoreExistsError:
            raise self._taken() from None
        except StoreTransientError:
            if self._owner() != self.job_id:
                raise
        self._has_ended = False
        if self.exist_ok:
            output.make_room(exist_ok=True)
            self._remove(lambda _: True)

    def agree_on_columns(self, columns: Mapping[str, str]) -> None:
        """Compare a part's columns with those of the first part that called this. Called by tasks.

        Raises:
            ConfigError: They differ.
            DatasetExistsError: The job has ended.
        """
        main = self._output().sides()[0]
        for attempt in range(_MAX_TRIES):
            self.check_current()
            etag = main.head(JOB_NAME).etag
            claim = json.loads(main.get(JOB_NAME))
            if claim.get("columns") is not None:
                check_same_columns(claim["columns"], columns)
                return
            claim["columns"] = dict(columns)
            try:
                main.put(JOB_NAME, json.dumps(claim).encode(), if_match=etag)
                return
            except (StoreChangedError, StoreTransientError):
                if attempt == _MAX_TRIES - 1:
                    raise

    def check_current(self) -> None:
        """Raise if the job has been committed or aborted, or another one has replaced it. Called by tasks.

        Raises:
            DatasetExistsError: The job has ended.
        """
        if self._owner() != self.job_id:
            raise DatasetExistsError(
                f"the job {self.job_id} no longer writes to `{self._output().uri}`: it has ended, another "
                "job with `exist_ok=True` has replaced it, or this machine does not share its folder; "
                "give a folder that all machines share, or the URI of a store"
            )

    def part_folder(self, number: int) -> str:
        """Return a new name for the folder of an attempt at a part."""
        return f"part-{number:05d}-{self.job_id}-{os.urandom(4).hex()}"

    def commit(self, parts: Iterable[WrittenPart], *, one_index: bool = True) -> int:
        """Write the index over the parts, in the order of their numbers; delete the job's other parts.

        With `exist_ok`, also those of other jobs.

        Args:
            parts: What the tasks returned.
            one_index: Write one index over all parts; otherwise one in the folder of each.

        Returns:
            The number of samples.

        Raises:
            ConfigError: There are no samples, two parts have the same number or other columns, or the files
                of a part are not there.
            DatasetExistsError: Another job has replaced this one.
        """
        chosen = sorted(parts, key=lambda part: part.number)
        if not chosen:
            raise ConfigError(f"there are no rows to write to `{self._output().uri}`: expected at least one")
        for part, following in itertools.pairwise(chosen):
            if part.number == following.number:
                raise ConfigError(f"part {part.number} was returned by two tasks: expected each part once")
            check_same_columns(chosen[0].columns, following.columns, number=following.number)
        self.check_current()
        output = self._output()
        self._check_files(output.sides()[0], chosen)
        kept = {part.folder for part in chosen}
        self._remove(lambda folder: folder not in kept and (self.exist_ok or self._is_own(folder)))
        if one_index:
            output.publish([shard for part in chosen for shard in move_files(part.shards, part.folder)])
        else:
            for part in chosen:
                self._output(below(self.out, part.folder)).publish(part.shards)
        self._end(output)
        try:
            # Attempts that were still running when the others were deleted may have ended before the job.
            self._remove(lambda folder: folder not in kept and self._is_own(folder))
        except (HocketError, OSError) as error:
            logger.warning("parts that no index lists may be left in `%s`: %s", output.uri, error)
        return sum(part.num_samples for part in chosen)

    def abort(self) -> None:
        """Delete the index and the parts of this job and give the place up. What other jobs wrote is left.

        A failure to do so is logged and not raised, because a job is aborted for another error. Nothing is
        deleted after a commit, or where `start` was refused: an earlier run of this job may have written it.
        """
        if self._has_ended:
            return
        output = self._output()
        try:
            self._take_index_back(output)
            # Before the parts, so that attempts that are still running delete theirs.
            if self._owner() == self.job_id:
                output.sides()[0].delete(JOB_NAME)
            self._remove(self._is_own)
        except (HocketError, OSError) as error:
            logger.warning(
                "parts of an aborted job may be left in `%s`: %s; `exist_ok=True` deletes them",
                output.uri,
                error,
            )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start the job and abort it if the block raises; the block commits."""
        self.start()
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def remove_part(self, folder: str) -> None:
        """Delete the files of an attempt, on both sides."""
        for side in self._output().sides():
            _delete_folder(side, folder)

    def _output(self, out: Place | None = None) -> DatasetOutput:
        return DatasetOutput(
            self.out if out is None else out,
            keep_local=self.settings.get("keep_local", False),
            retry=self.settings.get("retry"),
        )

    def _owner(self) -> str | None:
        """Return the id of the job that writes to the place."""
        data = read_object(self._output().sides()[0], JOB_NAME)
        return None if data is None else str(json.loads(data)["job"])

    def _taken(self) -> DatasetExistsError:
        return DatasetExistsError(
            f"another job is writing to `{self._output().uri}`, or was killed while it did: choose another "
            "place, or give `exist_ok=True` to delete what it wrote"
        )

    def _is_own(self, folder: str) -> bool:
        return _job_of(folder) == self.job_id

    def _remove(self, is_unwanted: Callable[[str], bool]) -> None:
        """Delete the folders of parts that are not wanted."""
        for side in self._output().sides():
            for folder in side.list_dirs()[0]:
                if _job_of(folder) is not None and is_unwanted(folder):
                    _delete_folder(side, folder)

    def _check_files(self, main: Store, parts: list[WrittenPart]) -> None:
        sizes = {meta.key: meta.size for meta in main.list()}
        for part in parts:
            for shard in move_files(part.shards, part.folder):
                file = shard.get("zip_data") or shard["raw_data"]
                if sizes.get(file["basename"]) != file["bytes"]:
                    raise ConfigError(
                        f"part {part.number} was written, and `{main.uri}` does not have its file "
                        f"`{file['basename']}`: expected a folder that all machines share, or the URI of a "
                        "store"
                    )

    def _end(self, output: DatasetOutput) -> None:
        """Give the place up after the index is written; take the index back if the place was lost before."""
        if self._owner() == self.job_id:
            output.sides()[0].delete(JOB_NAME)
            self._has_ended = True
            return
        self._take_index_back(output)
        self.check_current()

    def _take_index_back(self, output: DatasetOutput) -> None:
        """Delete the index if it is of this job."""
        for side in output.sides():
            if f"-{self.job_id}-".encode() in (read_object(side, INDEX_NAME) or b""):
                side.delete(INDEX_NAME)


class PartWriter(MDSWriter):
    """A writer of one attempt at a part of a job; use it as a context manager.

    `part` is set when the block has ended. If the block raises, or the job has ended by then, the files are
    deleted.

    Args:
        job: The job.
        number: The number of the part, by which parts are ordered.
        columns: Encoding by column name.
    """

    part: WrittenPart

    def __init__(self, job: WriteJob, number: int, columns: Mapping[str, str]) -> None:
        self._job = job
        self._number = number
        self._folder = job.part_folder(number)
        super().__init__(columns=columns, out=below(job.out, self._folder), **job.settings)

    def _flush(self, *, keep: int = 0) -> None:
        self._job.check_current()
        super()._flush(keep=keep)

    def _publish(self, shards: list[dict[str, Any]]) -> None:
        self._job.check_current()
        self.part = WrittenPart(
            number=self._number,
            folder=self._folder,
            num_samples=sum(self._counts),
            columns=dict(self._columns),
            shards=shards,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, traceback)
        finally:
            if not hasattr(self, "part"):
                self._job.remove_part(self._folder)


def check_same_columns(
    first: Mapping[str, str], columns: Mapping[str, str], *, number: int | None = None
) -> None:
    """Raise if two parts of a data set have other columns.

    Raises:
        ConfigError: They have; the message has the columns that differ.
    """
    names = sorted(set(first) | set(columns))
    for name in names:
        if first.get(name) != columns.get(name):
            part = "this part" if number is None else f"part {number}"
            raise ConfigError(
                f"column `{name}` is {columns.get(name, 'missing')} in {part} and "
                f"{first.get(name, 'missing')} in another: expected the same in all parts; give its encoding "
                "in `columns`, or cast the column"
            )


def _job_of(folder: str) -> str | None:
    """Return the id of the job whose part is in a folder; None for other folders."""
    match = _PART_FOLDER.fullmatch(folder)
    return None if match is None else match["job"]


def _delete_folder(side: Store, folder: str) -> None:
    local = find_folder(side.uri)
    if local is not None:
        shutil.rmtree(local / folder, ignore_errors=True)
        return
    with ThreadPoolExecutor(_MAX_DELETES, thread_name_prefix="hocket-delete") as threads:
        list(threads.map(side.delete, [meta.key for meta in side.list(folder)]))

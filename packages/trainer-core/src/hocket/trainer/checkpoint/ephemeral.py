"""Copies of a run's state in the memory of its machines, between the checkpoints in `save_folder`.

A copy outlives the ranks. If one of them fails, the launcher starts all of them again, and they go on from
the newest copy instead of the last checkpoint. A copy is a checkpoint like any other: written, committed,
listed and loaded by a checkpoint store, which verifies its digests. In a job of several machines each has the
parts of its own ranks and those of one other machine, so that any one machine may be lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.trainer.checkpoint.checkpoint_source import newest_of
from hocket.trainer.checkpoint.checkpoint_state import CheckpointState
from hocket.trainer.checkpoint.checkpointing import Checkpointer
from hocket.trainer.checkpoint.save_times import SaveTimes
from hocket.trainer.data.batch_tree import tensors
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.interval import IsTime
from hocket.trainer.log.notices import print_notices
from hocket.trainer.protocols import CheckpointStore, Entry, Loaded, SaveHandle, StateTree
from hocket.trainer.ranks.step_sync import StepSync
from hocket.trainer.time import TimeInput

if TYPE_CHECKING:
    from hocket.trainer.state import State

MEMORY_FOLDERS = "HOCKET_MEMORY_FOLDERS"
"""The variable of the launcher with the folders for copies, divided by `os.pathsep`, the fastest first.

The launcher makes them where it can start the ranks again on the same machine, and removes them at its end.
"""

_PER_RANK_BYTES = 1 << 20
"""Room for what a rank saves beside its tensors, such as random generators."""


class UnusableCopyError(Exception):
    """A copy in memory that cannot be loaded, such as a damaged one; the cause is the store's error."""


class MemoryCopies:
    """The copies of one run: a checkpoint store that keeps the newest checkpoint.

    The previous copy is removed once a new one is committed, so two of them have to fit; on each of several
    machines, two of its own ranks' parts and two of another machine's.

    Args:
        folders: The folders of the launcher of this machine.
        run_uri: The location of the run's checkpoints, by which its copies are told from those of another run
            of the same script.
        open_store: Opens a checkpoint store at a folder. Collective.
        sync: The exchange between the ranks.

    Attributes:
        run_uri: The location of the run's checkpoints.
        newest: The copy that an earlier attempt of the job has left, as `find` has found it.
        notices: Sentences for the user.
    """

    def __init__(
        self,
        folders: Sequence[str],
        run_uri: str,
        *,
        open_store: Callable[[str], CheckpointStore],
        sync: StepSync,
    ) -> None:
        key = hashlib.sha256(run_uri.encode()).hexdigest()[:16]
        self.run_uri = run_uri
        self.newest: Entry | None = None
        self.notices: list[str] = []
        self._folders = [Path(folder) / key for folder in folders]
        self._open_store = open_store
        self._sync = sync
        self._store: CheckpointStore | None = None
        self._folder = self._folders[0]
        self._has_room = self._has_memory = False
        # Every launcher makes folders of its own.
        hosts = sync.gather(_number_of(f"{socket.gethostname()} {self._folder}"))
        numbers = list(dict.fromkeys(hosts))
        self._host_of = [numbers.index(host) for host in hosts]
        self._host = self._host_of[sync.rank]
        self._is_lead = self._host_of.index(self._host) == sync.rank

    @property
    def outlive_a_machine(self) -> bool:
        """Whether each part is on two machines, so that any one of them may be lost."""
        return len(set(self._host_of)) > 1

    def find(self) -> None:
        """Find the newest copy of an earlier attempt; the store removes all others. Collective."""
        # The folder of an attempt whose copies went to another one is left empty.
        filled = [n for n, one in enumerate(self._folders, 1) if one.is_dir() and any(one.iterdir())]
        own = min(filled, default=0)
        used = [int(number) for number in self._sync.gather(own)]
        if not any(used):
            return
        # A machine without copies, such as one that has come new, gets them where another has them.
        store = self._open(own or min(max(used), len(self._folders)))
        self.newest = newest_of(store, self._sync)
        if self.newest is None:
            self._store = None  # the first copy is made where there is room
        if problem := getattr(store, "problem", ""):
            self.notices.append(f"the copies in memory cannot be used, and are removed: {problem}")

    def discard(self) -> None:
        """Remove all copies, since they are of no use. Collective."""
        # A rank that has ended may be why, and the copies are of use to the next attempt then.
        self._sync.from_rank_0(0)
        self.remove()
        self.newest = None
        # A rank that is late must not find them.
        self._sync.from_rank_0(0)

    def remove(self) -> None:
        """Remove all copies, on the first rank of each machine, and free the memory of every rank's files."""
        release: Callable[[], None] | None = getattr(self._store, "release_memory", None)
        if release is not None:
            release()
        if self._is_lead:
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)

    def save(self, state: StateTree, **options: Any) -> SaveHandle:
        """Save a copy. Collective.

        Raises:
            TrainerConfigError: Two copies have no room in memory, nor in the temporary folder.
        """
        if not self._has_room:
            number = self._choose(state, options.get("peers"))
            store = self._open(number) if self._store is None else self._store
            if caution := getattr(store, "caution", ""):
                self.notices.append(caution)
            self._has_room, self._has_memory = True, _is_in_memory(self._folder.parent)
        assert self._store is not None
        # On a disk the store would need a staging buffer, for which there may be no room.
        options["mode"] = "async" if self._has_memory else "sync"
        return self._store.save(state, **options)

    def load(self, source: str, into: StateTree, **options: Any) -> Loaded:
        """Load a copy. Collective.

        Raises:
            UnusableCopyError: It cannot be loaded; the contents of the tensors are undefined then.
        """
        assert self._store is not None, "`find` has found a copy"
        try:
            return self._store.load(source, into, **options)
        except TimeoutError:
            raise  # of a rank that is late or has ended, which says nothing about the copy
        except Exception as error:
            raise UnusableCopyError(str(error)) from error

    def list(self) -> Sequence[Entry]:
        """List the copies."""
        return () if self._store is None else self._store.list()

    def delete(self, step: int) -> None:
        """Delete the copy of a step."""
        if self._store is not None:
            self._store.delete(step)

    def _open(self, number: int) -> CheckpointStore:
        """Open the store at a folder, numbered from 1. Collective."""
        self._folder = self._folders[number - 1]
        self._store = self._open_store(str(self._folder))
        return self._store

    def _choose(self, state: StateTree, peers: Sequence[int] | None) -> int:
        """Return the number of this machine's first folder with room for two copies. Collective.

        If copies of an earlier attempt are in use, they stay in their folder.
        """
        num_ranks = self._sync.num_ranks
        # Ranks that save the same tree share it; each pipeline stage has a tree of its own.
        own_bytes = _count_bytes(state) / (num_ranks if peers is None else len(peers))
        parts = list(zip(self._host_of, self._sync.gather(own_bytes + _PER_RANK_BYTES), strict=True))
        num_hosts = max(self._host_of) + 1
        of_host = [sum(part for host, part in parts if host == one) for one in range(num_hosts)]
        # The store chooses whose parts this machine has beside its own.
        others = [num_bytes for host, num_bytes in enumerate(of_host) if host != self._host]
        num_bytes = of_host[self._host] + max(others, default=0)
        free = [_free_bytes(folder.parent) + _bytes_below(folder) for folder in self._folders]
        fitting = [
            number
            for number, (folder, room) in enumerate(zip(self._folders, free, strict=True), 1)
            if room >= 2 * num_bytes and (self._store is None or folder == self._folder)
        ]
        numbers = [int(number) for number in self._sync.gather(min(fitting, default=0))]
        # The first rank of a machine decides for it, since the free memory changes.
        number = numbers[self._host_of.index(self._host)]
        what = "the state" if num_hosts == 1 else "the parts of two machines"
        needed = f"two copies of {what} take {_in_units(2 * num_bytes)}"
        rooms = [
            f"`{folder.parent.parent}` has {_in_units(room)} left"
            for folder, room in zip(self._folders, free, strict=True)
        ]
        full = [rank for rank in map(self._host_of.index, range(num_hosts)) if not numbers[rank]]
        if full and number:
            raise TrainerConfigError(
                "`checkpointing` asks for `ephemeral` copies, for which the machine of rank "
                f"{full[0]} has no room: the error of that rank says how much they take"
            )
        if not number:
            raise TrainerConfigError(
                f"`checkpointing` asks for `ephemeral` copies, and {needed} on this machine: "
                f"{', '.join(rooms)}. Make `/dev/shm` larger (containers have 64 MB unless `--shm-size` or a "
                "volume in memory says more), set `TMPDIR` to a folder with room, or leave `ephemeral` out"
            )
        if number > 1 and self._store is None:
            place = self._folders[number - 1].parent.parent
            self.notices.append(f"{needed}, and {rooms[0]}: they are kept in `{place}`, which may be slower")
        return number


class CopyCheckpointer(Checkpointer):
    """The series of copies in memory, saved beside that of the run's checkpoints.

    Args:
        copies: The store of the copies.
        run_state: The state to save.
        state: The state of the run.
        interval: The interval of training between two copies.
        ignore_keys: Parts to leave out.
    """

    def __init__(
        self,
        copies: MemoryCopies,
        run_state: CheckpointState,
        state: State,
        *,
        interval: TimeInput | IsTime,
        ignore_keys: Any = None,
    ) -> None:
        super().__init__(
            copies,
            run_state,
            state,
            save_interval=interval,
            save_filename="ba{batch}",
            ignore_keys=ignore_keys,
            mode="async",
            overwrite=True,
        )
        self._copies = copies
        self._times = SaveTimes(copies.run_uri, is_durable=False)

    @property
    def locations(self) -> list[str]:
        """The location of the copies, in words."""
        return ["copies in memory"]

    def check_folder(self, sync: StepSync) -> None:
        """Do nothing: copies of another training are in other folders."""

    def save(self) -> SaveHandle:
        """Save a copy now. Collective."""
        handle = super().save()
        if self._copies.notices:
            print_notices(self._state, self._copies.notices)
            self._copies.notices = []
        return handle

    def save_in_time(self, sync: StepSync, deadline: float) -> None:
        """Do nothing: the run's checkpoints have this batch, or have asked for a copy."""

    def copy_in_time(self, sync: StepSync, deadline: float) -> int | None:
        """Make a copy for the machines that stay. Collective.

        On a single machine nothing goes on from it: its launcher ends, too.
        """
        if not self._copies.outlive_a_machine:
            return None
        self._finish()  # it may be the first copy
        if not self._times.last_name:
            return None
        is_due = self._last_batch != self._state.timestamp.counts.batch
        if is_due and self._times.too_late_for_save(sync, deadline) is None:
            self.save()
        self._finish()
        return self._last_batch

    def save_at_end(self) -> None:
        """Wait for the copy in progress; the run's checkpoints have the end."""
        self._finish()

    def release(self) -> None:
        """Remove the copies, since the run's checkpoints have the end."""
        self._copies.remove()

    def start_from_copy(self, sync: StepSync) -> None:
        """Record that the state was loaded from the newest copy."""
        self.start_from_loaded()


def memory_folders() -> list[str]:
    """Return the launcher's folders for copies; none where it cannot start the ranks again."""
    return list(filter(None, os.environ.get(MEMORY_FOLDERS, "").split(os.pathsep)))


def _number_of(text: str) -> float:
    """Return a number that stands for a text, exact as a float."""
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]))


def _count_bytes(tree: Any) -> int:
    """Return the bytes of the tensors of a state tree; a sharded tensor counts as a whole."""
    return sum(one.numel() * one.element_size() for one in tensors(tree, into_objects=False))


def _bytes_below(folder: Path) -> int:
    """Return the bytes of the files in a folder, each counted once."""
    found = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum({status.st_ino: status.st_size for status in found}.values())


def _free_bytes(folder: Path) -> float:
    """Return the free bytes of a folder's file system; in shared memory, at most the free memory."""
    try:
        status = os.statvfs(folder)
        is_in_memory = _is_in_memory(folder)
    except OSError:
        return 0
    room = float(status.f_bavail * status.f_frsize)
    return min(room, *_free_memory()) if is_in_memory else room


def _is_in_memory(folder: Path) -> bool:
    """Return whether a folder's file system is in memory, as that of `/dev/shm`, and often of `/tmp`, is."""
    number = os.stat(folder).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    with contextlib.suppress(OSError):  # systems without `/proc`, such as macOS, have no such folders
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            place, _, kind = line.partition(" - ")
            if place.split()[2] == device:
                return kind.split()[0] in ("tmpfs", "ramfs")
    return False


def _free_memory() -> Iterator[float]:
    """Yield the free bytes of this machine, and of each control group of this process that has a limit."""
    with contextlib.suppress(OSError, ValueError):
        yield float(_field(Path("/proc/meminfo"), "MemAvailable:") * 1024)
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        group = Path("/sys/fs/cgroup") / next(line[4:] for line in lines if line.startswith("0::/"))
        for one in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):
                limit = int((one / "memory.max").read_text())
                # The kernel drops pages of files when memory is needed, but not those of shared memory.
                cached = _field(one / "memory.stat", "file ") - _field(one / "memory.stat", "shmem ")
                yield float(limit - int((one / "memory.current").read_text()) + cached)


def _field(path: Path, name: str) -> int:
    """Return the number that follows a name at the start of a line.

    Raises:
        ValueError: There is none.
    """
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.removeprefix(name).split()[0])
    raise ValueError(f"`{path}` has no `{name}`")


def _in_units(num_bytes: float) -> str:
    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
    return f"{num_bytes / 1000:.3g} TB"

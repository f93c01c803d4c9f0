"""Membership of a process in its job, and the small exchanges beside training."""

import atexit
import contextlib
import gc
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, and missing from its annotations
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from hocket.dist.errors import AbsentRanksError, CollectiveError, WorldError
from hocket.dist.ranks.diagnosis import (
    ASIDE,
    GRACE_S,
    diagnose_in_time,
    has_timed_out,
    is_collective_failure,
    record_collectives,
)
from hocket.dist.ranks.failures import DIAGNOSIS, install_excepthook
from hocket.dist.ranks.fault_injection import inject_faults
from hocket.dist.ranks.preflight import PREFLIGHT_S, await_listener, call_roll, describe_route
from hocket.dist.ranks.process_end import end_promptly_after_error
from hocket.dist.ranks.rank_command import end_with_wrapper
from hocket.dist.ranks.world import World, export_world, own_gpu, read_world


class ProcessGroup:
    """This process's membership in the job: the default process group, and a gloo group of its own.

    The gloo group carries small CPU tensors (flags, counts) beside training, so that they never queue up
    behind gradients. Use `join` to make a `ProcessGroup`. Not safe to use after a fork.

    Attributes:
        world: Rank and size.
        device: The device of the tensors of training.
        timeout_s: Seconds that a collective may take.
        previous_timeout: The timeout that a group which existed before gets back at `close`.
    """

    def __init__(
        self, world: World, *, device: torch.device, timeout_s: float, owned: bool, store: Store | None = None
    ) -> None:
        self.world = world
        self._store = store
        self._is_diagnosed = False
        self.device = device
        self.timeout_s = timeout_s
        self._owned = owned
        self.previous_timeout: timedelta | None = None
        self._aside: dist.ProcessGroup | None = None
        self._divided: list[dist.ProcessGroup] = []
        if world.world_size > 1:
            gloo_group = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc=ASIDE
            )
            assert isinstance(gloo_group, dist.ProcessGroup), "every rank is a member"
            self._aside = gloo_group
            _first_barrier(gloo_group, world, timeout_s)

    def __repr__(self) -> str:
        return f"<ProcessGroup: rank {self.world.rank} of {self.world.world_size}, {self.device}>"

    def reduce_async(self, values: torch.Tensor) -> "Reduction":
        """Start a sum of `values` over all ranks, and return at once.

        Collective: every rank calls it, in the same order, with the same shape and dtype. `values` itself is
        left as it is.

        Args:
            values: A CPU tensor (any dtype, exact in float64) is reduced over the gloo group, a tensor on the
                job's device over the default group.

        Returns:
            The sum in progress; its `wait()` returns the sum.
        """
        total = values.detach().clone()
        if self.world.world_size == 1:
            return Reduction(total, None, self)
        group = self._aside if total.device.type == "cpu" else None
        return Reduction(total, dist.all_reduce(total, group=group, async_op=True), self)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order. Collective and blocking."""
        return [value] if self.world.world_size == 1 else _gather_objects(value, self._aside)

    def divide(self, rows: Sequence[Sequence[int]]) -> "RankGroup":
        """Return the group of the ranks in this process's row. Collective.

        Args:
            rows: All ranks of the job, each in one row; rows are equally long, and alike on all ranks.
        """
        return RankGroup(self, rows)

    def divide_some(self, rows: Sequence[Sequence[int]]) -> "RankGroup | None":
        """Return the group of the ranks in this process's row, or None if it is in no row. Collective.

        Args:
            rows: Ranks of the job, each in one row at most; rows are equally long, and alike on all ranks.
        """
        group = RankGroup(self, rows)
        return group if group.ranks else None

    def explain(self, error: BaseException) -> None:
        """Add a note to the error of a failed collective that names late ranks; do nothing for other errors.

        Waits a few seconds for the other ranks, once. Needs a store that `join` made.
        """
        if self._store is None or self._is_diagnosed or not is_collective_failure(error):
            return
        self._is_diagnosed, failed_at = True, time.time()
        # With a short deadline, the explanation must not take as long as the wait for it.
        grace_s = min(GRACE_S, max(2.0, self.timeout_s / 10))
        diagnosis = diagnose_in_time(self._store, self.world, grace_s=grace_s)
        if diagnosis is not None:
            error.add_note(
                f"rank {self.world.rank} of {self.world.world_size} after {self.timeout_s:g} s; {diagnosis}"
            )
        found = (
            {}
            if diagnosis is None
            else {
                "late": diagnosis.late,
                "last": diagnosis.lasts.get(self.world.rank, ""),
                "has_diverged": diagnosis.has_diverged and not diagnosis.late,
            }
        )
        waited_s = self.timeout_s if has_timed_out(error) else 0.0
        setattr(error, DIAGNOSIS, {"failed_at": failed_at, "waited_s": waited_s, **found})

    def close(self) -> None:
        """Destroy the groups that `join` made, and none that existed before. Safe to call twice."""
        if (error := sys.exception()) is not None:
            self.explain(error)
        aside = [group for group in (self._aside, *self._divided) if group is not None]
        self._aside, self._divided = None, []
        self._store = None
        if not dist.is_initialized():
            return
        if self._owned:
            self._owned = False
            dist.destroy_process_group()
            return
        for group in aside:
            dist.destroy_process_group(group)
        if self.previous_timeout is not None:
            set_timeout(self.previous_timeout)
            self.previous_timeout = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RankGroup:
    """Some ranks of a job, such as those with data of their own; `ProcessGroup.divide` makes it.

    On a rank in no row, which only takes part in making the others' groups, it is empty.

    Small CPU tensors have a gloo group of their own here, too.

    Attributes:
        ranks: The ranks of the group, in its order.
        index: The place of this process among them.
        aside: The gloo group of small CPU tensors; None for a single rank.
        on_device: The group of tensors on the job's device; None for a single rank.
    """

    def __init__(self, job: ProcessGroup, rows: Sequence[Sequence[int]]) -> None:
        self._job = job
        self.ranks = list(next((row for row in rows if job.world.rank in row), ()))
        self.index = self.ranks.index(job.world.rank) if self.ranks else -1
        self._is_alone = len(rows[0]) == 1
        self.aside: dist.ProcessGroup | None = None
        self.on_device: dist.ProcessGroup | None = None
        if self._is_alone:
            return
        lists, timeout = [list(row) for row in rows], timedelta(seconds=job.timeout_s)
        aside, _ = dist.new_subgroups_by_enumeration(lists, timeout, "gloo", group_desc=ASIDE)
        made = [aside]
        if job.device.type != "cpu":
            made.append(dist.new_subgroups_by_enumeration(lists, timeout)[0])
        groups = [group for group in made if isinstance(group, dist.ProcessGroup)]
        if groups:
            self.aside, self.on_device = groups[0], groups[-1]
        job._divided += groups

    def reduce_async(self, values: torch.Tensor) -> "Reduction":
        """Start a sum of `values` over the ranks of the group, as `ProcessGroup.reduce_async` does."""
        total = values.detach().clone()
        if self._is_alone:
            return Reduction(total, None, self._job)
        group = self.aside if total.device.type == "cpu" else self.on_device
        return Reduction(total, dist.all_reduce(total, group=group, async_op=True), self._job)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks of the group, in its order. Collective and blocking."""
        return [value] if self._is_alone else _gather_objects(value, self.aside)


def _gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


class Reduction:
    """A sum over ranks in progress."""

    def __init__(self, total: torch.Tensor, work: dist.Work | None, group: ProcessGroup) -> None:
        self._total = total
        self._work = work
        self._group = group

    def wait(self) -> torch.Tensor:
        """Return the sum; on the CPU this blocks until it is complete.

        Raises:
            CollectiveError: A rank has ended, or the group's timeout has passed; late ranks are named.
        """
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                failure = CollectiveError(
                    f"a sum of {self._total.numel()} values over {self._group.world.world_size} ranks "
                    f"failed: {error}. Another rank has probably ended; its log says why"
                )
                self._group.explain(failure)
                raise failure from error
            self._work = None
        return self._total


def join(*, device: torch.device, timeout_s: float, needs_group: bool = False) -> ProcessGroup:
    """Join the ranks that the environment names, or use the process group that exists already.

    Collective: returns once every rank is present. The backend is gloo on the CPU and NCCL on CUDA.

    Args:
        device: The device of the tensors of training; `cuda` without an index becomes this rank's GPU.
        timeout_s: Seconds to wait for absent ranks, and later for each collective.
        needs_group: Initialise `torch.distributed` in a job of one process too, as device meshes need.

    Raises:
        WorldError: The environment is incomplete or contradicts itself, and there is no process group.
        AbsentRanksError: Ranks did not appear within `timeout_s`; the error names them.
    """
    world = read_world()
    if not dist.is_initialized():
        export_world()
    install_excepthook()
    end_with_wrapper()
    timeout_s = inject_faults(world.rank, timeout_s)
    if device.type == "cuda":
        device = torch.device("cuda", own_gpu() if device.index is None else device.index)
        torch.cuda.set_device(device)
    global _owner
    if dist.is_initialized():
        # The store of an earlier `join` of this process serves to name late ranks here too.
        store = None if _owner is None else _owner._store
        previous = set_timeout(timedelta(seconds=timeout_s))
        group = ProcessGroup(world, device=device, timeout_s=timeout_s, owned=False, store=store)
        group.previous_timeout = previous
        return group
    if world.world_size == 1 and not needs_group:
        return ProcessGroup(world, device=device, timeout_s=timeout_s, owned=False)
    if _owner is not None:
        # Modules sharded with FSDP2 are cycles, and hold the threads and sockets of an earlier group.
        gc.collect()
    if world.world_size > 1:
        record_collectives()
        end_promptly_after_error()
    # A job of one process needs no address. Any other job calls the roll first, since `init_process_group`
    # does not name absent ranks.
    store = HashStore() if world.world_size == 1 else _meet(world, timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))
    dist.init_process_group(
        # Both backends: with host offload, gradients are on the CPU in a job on GPUs.
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("hocket/torch", store),
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    destroy_at_exit()
    try:
        _owner = ProcessGroup(world, device=device, timeout_s=timeout_s, owned=True, store=store)
        return _owner
    except BaseException:
        dist.destroy_process_group()
        raise


#: The group that `join` made last in this process.
_owner: ProcessGroup | None = None


def destroy_at_exit() -> None:
    """Have the process group destroyed when the interpreter ends without an error. Safe to call again.

    After a collective, gloo's threads release tensors, for which they need the interpreter's lock. A thread
    that requests the lock once the interpreter shuts down ends the process with SIGABRT ("terminate called
    without an active exception", https://github.com/pytorch/pytorch/issues/190489). Destroying the group
    waits for those threads.
    """
    atexit.unregister(_destroy_last)
    atexit.register(_destroy_last, os.getpid())


def _destroy_last(pid: int) -> None:
    # A forked child has none of gloo's threads. After an error other ranks may never answer, so destroying
    # the group would wait for its timeout.
    if os.getpid() == pid and dist.is_initialized() and not hasattr(sys, "last_type"):
        if _owner is not None:
            _owner.close()  # it holds a group of its own
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # modules sharded with FSDP2 are cycles, and hold groups


@dataclass(kw_only=True, slots=True)
class _Rendezvous:
    """The connection to the store that the environment names, kept for the next `join` of this process.

    Rank 0 may be the server, whose port can be taken only once. The keys of an earlier `join` are still in
    the store, so each `join` has its own prefix. All ranks of a job join equally often.
    """

    place: tuple[str | int | None, ...]
    store: Store
    num_joined: int = 0


_rendezvous: _Rendezvous | None = None


def _meet(world: World, timeout_s: float) -> Store:
    """Return a store for this `join` alone, once all ranks have appeared in it. Collective."""
    global _rendezvous
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    place = (os.getpid(), world.rank, world.world_size, *(os.environ.get(name) for name in names))
    if _rendezvous is None or _rendezvous.place != place:
        _rendezvous = None  # an earlier server ends before a new one listens
        rendezvous = _Rendezvous(place=place, store=_connect(world, timeout_s))
    else:
        rendezvous = _rendezvous
    store = call_roll(PrefixStore(f"join/{rendezvous.num_joined}", rendezvous.store), world, timeout_s)
    rendezvous.num_joined += 1
    _rendezvous = rendezvous
    return store


def _connect(world: World, timeout_s: float) -> Store:
    """Connect to the store at MASTER_ADDR:MASTER_PORT, held by rank 0 or by torch's agent."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    missing = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if not value]
    if missing or address is None or port is None:
        raise WorldError(
            f"`WORLD_SIZE` is {world.world_size} but {' and '.join(f'`{name}`' for name in missing)} not "
            "set, so ranks cannot find each other. Start the script with `hocket-launch -n N script.py`, or "
            "set them to the host of rank 0 and a free port there, alike on all ranks"
        )
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise WorldError(f"`MASTER_PORT` is {port!r}, expected a port number, 1 to 65535")
    timeout_s = min(timeout_s, PREFLIGHT_S)
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_server = world.rank == 0 and not agent_has_it
    try:
        if not is_server:
            await_listener(address, int(port), timeout_s)
        store = TCPStore(
            address,
            int(port),
            world.world_size,
            is_master=is_server,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (OSError, RuntimeError) as error:
        absent = () if agent_has_it or world.rank == 0 else (0,)
        server = "the launcher" if agent_has_it else "rank 0"
        raise AbsentRanksError(
            f"rank {world.rank} of {world.world_size} could not use {address}:{port}, where {server} should "
            f"listen, within {timeout_s:g} s ({describe_route(address)}): {error}. On machines "
            "with several networks, set `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME`",
            absent,
        ) from error
    # After a restart the agent's store still has the keys of the attempt before. A store of rank 0 is new;
    # hosts that came at different times have counted different numbers of attempts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if agent_has_it else "0"
    return PrefixStore(f"hocket/attempt/{attempt}", store)


def set_timeout(timeout: timedelta) -> timedelta | None:
    """Set the timeout of the default group's collectives; return the one before, where torch tells it."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup), "the default group is initialised"
    previous: timedelta | None = None
    with contextlib.suppress(AttributeError, RuntimeError):
        backends: Any = [group._get_backend(device) for device in group._device_types]
        previous = max(backend.options._timeout for backend in backends)
    # torch 2.9 has it under another name.
    setter: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    setter(timeout, group)
    return previous


def _first_barrier(group: dist.ProcessGroup, world: World, timeout_s: float) -> None:
    try:
        dist.monitored_barrier(group, timeout=timedelta(seconds=timeout_s), wait_all_ranks=True)
    except RuntimeError as error:
        raise AbsentRanksError(
            f"rank {world.rank} of {world.world_size}: the first barrier of the job failed within "
            f"{timeout_s:g} s: {error}"
        ) from error

"""Joining the other ranks, finding out who is absent, and the small exchanges beside training."""

import os
import socket
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, and missing from its annotations
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from hocket.dist.errors import AbsentRanksError, CollectiveError, WorldError
from hocket.dist.world import World, read_world

_ROLL_CALL = "hocket/present"


class ProcessGroup:
    """This process's membership in the job: the default process group, and a gloo group of its own.

    The second carries small CPU tensors (flags, counts) beside training, so that they never queue up behind
    gradients. Use `join` to make one. Not safe to use after a fork.

    Attributes:
        world: Rank and size.
        device: Where the tensors of training are.
        timeout_s: Seconds that a collective may take.
    """

    def __init__(self, world: World, *, device: torch.device, timeout_s: float, owned: bool) -> None:
        self.world = world
        self.device = device
        self.timeout_s = timeout_s
        self._owned = owned
        self._aside: dist.ProcessGroup | None = None
        if world.world_size > 1:
            aside = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            assert isinstance(aside, dist.ProcessGroup), "every rank is a member"
            self._aside = aside
            _first_barrier(aside, world, timeout_s)

    def reduce_async(self, values: torch.Tensor) -> "Reduction":
        """Start a sum of `values` over all ranks, and return at once.

        Collective: every rank calls it, in the same order, with the same shape and dtype. `values` itself is
        left as it is.

        Args:
            values: On the CPU (any dtype, exact in float64) it goes over the gloo group aside; on the job's
                device over the default group.

        Returns:
            The sum, once `wait()` is called on it.
        """
        total = values.detach().clone()
        if self.world.world_size == 1:
            return Reduction(total, None, "")
        group = self._aside if total.device.type == "cpu" else None
        work = dist.all_reduce(total, group=group, async_op=True)
        return Reduction(total, work, f"a sum of {total.numel()} values over {self.world.world_size} ranks")

    def close(self) -> None:
        """Destroy what `join` made, and nothing that was there before. Safe to call twice."""
        aside, self._aside = self._aside, None
        if not dist.is_initialized():
            return
        if self._owned:
            self._owned = False
            dist.destroy_process_group()
        elif aside is not None:
            dist.destroy_process_group(aside)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Reduction:
    """A sum over ranks that is under way."""

    def __init__(self, total: torch.Tensor, work: dist.Work | None, what: str) -> None:
        self._total = total
        self._work = work
        self._what = what

    def wait(self) -> torch.Tensor:
        """Return the sum; on the CPU this blocks until it is there.

        Raises:
            CollectiveError: A rank went away, or the group's time is over.
        """
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise CollectiveError(
                    f"{self._what} failed: {error}. A rank has probably ended: its log says why."
                ) from error
            self._work = None
        return self._total


def join(*, device: torch.device, timeout_s: float, needs_group: bool = False) -> ProcessGroup:
    """Join the ranks that the environment names, or accept the process group that is there already.

    Collective: returns once every rank is present. The backend is gloo on the CPU and NCCL on CUDA.

    Args:
        device: Where the tensors of training are; `cuda` without an index becomes `cuda:LOCAL_RANK`.
        timeout_s: Seconds to wait for absent ranks, and later for each collective.
        needs_group: Initialise `torch.distributed` in a job of one process too, as device meshes need.

    Raises:
        WorldError: The environment is incomplete or contradicts itself or the existing process group.
        AbsentRanksError: Ranks did not appear within `timeout_s`; it names them.
    """
    world = read_world()
    if device.type == "cuda":
        index: int | None = device.index
        if index is None:
            # Who initialised the group has chosen the device too.
            index = torch.cuda.current_device() if dist.is_initialized() else world.local_rank
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    if dist.is_initialized():
        world = _agree_with_existing(world)
        return ProcessGroup(world, device=device, timeout_s=timeout_s, owned=False)
    if world.world_size == 1 and not needs_group:
        return ProcessGroup(world, device=device, timeout_s=timeout_s, owned=False)
    # A job of one needs no address; any other first calls the roll, since init_process_group cannot say who
    # is absent.
    store = HashStore() if world.world_size == 1 else call_roll(_connect(world, timeout_s), world, timeout_s)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        return ProcessGroup(world, device=device, timeout_s=timeout_s, owned=True)
    except BaseException:
        dist.destroy_process_group()
        raise


def call_roll(store: Store, world: World, timeout_s: float) -> Store:
    """Wait until every rank has signed in at `store`.

    Args:
        store: A store that all ranks share.
        world: The place of this process.
        timeout_s: Seconds to wait.

    Returns:
        The same store, for the process group to go on with.

    Raises:
        AbsentRanksError: Some ranks have not signed in; every rank that has is told which.
    """
    names = [f"{_ROLL_CALL}/{rank}" for rank in range(world.world_size)]
    store.set(names[world.rank], f"{socket.gethostname()} pid {os.getpid()}")
    try:
        store.wait(names, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        absent = tuple(rank for rank, name in enumerate(names) if not store.check([name]))
        if not absent:  # the last one came just after the deadline
            return store
        raise AbsentRanksError(
            f"After {timeout_s:g} s {_ranks(absent)} of {world.world_size} had not appeared (this is rank "
            f"{world.rank} on {socket.gethostname()}). Look at their logs, and whether their machines reach "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}.",
            absent,
        ) from error
    return store


def _connect(world: World, timeout_s: float) -> Store:
    """Reach the store at MASTER_ADDR:MASTER_PORT; rank 0 holds it, or torchrun's agent where that has one."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    missing = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if not value]
    if missing or address is None or port is None:
        raise WorldError(
            f"`WORLD_SIZE` is {world.world_size} but {' and '.join(f'`{name}`' for name in missing)} not "
            "set: ranks cannot find each other. Start the script with `hocket-launch -n N script.py`."
        )
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise WorldError(f"`MASTER_PORT` is {port!r}, expected a port number, 1 to 65535.")
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            address,
            int(port),
            world.world_size,
            is_master=world.rank == 0 and not agent_has_it,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        absent = () if agent_has_it or world.rank == 0 else (0,)
        who = "the launcher" if agent_has_it else "rank 0"
        raise AbsentRanksError(
            f"Rank {world.rank} of {world.world_size} could not use {address}:{port}, where {who} should "
            f"listen, within {timeout_s:g} s: {error}",
            absent,
        ) from error
    # After a restart the agent's store still has the keys of the attempt before.
    return PrefixStore(f"hocket/attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _agree_with_existing(world: World) -> World:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world.world_size == 1:  # nothing said in the environment: the group's own word holds
        return World(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    if (rank, world_size) != (world.rank, world.world_size):
        raise WorldError(
            f"`torch.distributed` was initialised as rank {rank} of {world_size}, but the environment says "
            f"rank {world.rank} of {world.world_size}. Unset `RANK` and `WORLD_SIZE`, or initialise it from "
            "them."
        )
    return world


def _first_barrier(group: dist.ProcessGroup, world: World, timeout_s: float) -> None:
    try:
        dist.monitored_barrier(group, timeout=timedelta(seconds=timeout_s), wait_all_ranks=True)
    except RuntimeError as error:
        raise AbsentRanksError(
            f"Rank {world.rank} of {world.world_size}: the first barrier of the job failed within "
            f"{timeout_s:g} s: {error}"
        ) from error


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"

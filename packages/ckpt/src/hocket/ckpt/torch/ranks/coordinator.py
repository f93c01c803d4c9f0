"""The coordinator: a key-value store through which ranks exchange the outcome of a save or load.

The store is opened with the checkpoint store, belongs to it alone, and uses no process group. A save can
therefore run in a background thread beside the job's collectives, and the peers of a dead rank see its
missing key instead of hanging.
"""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from os import environ

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import HashStore  # type: ignore[attr-defined]  # of torch
from torch.distributed.distributed_c10d import _get_default_store

from hocket.ckpt.errors import CheckpointTimeoutError
from hocket.ckpt.torch.ranks.kv_store import SLICES, DeadlineStore, KeyValue

__all__ = ["Coordinator", "open_coordinator"]

_POLL_S = (0.002, 0.05)
# Timeout of the connection to the store, which is a thread of rank 0.
_CONNECT_S = 30
_opened = 0


class Coordinator:
    """This rank's connection to the key-value store of the job.

    Attributes:
        rank: This rank.
        is_rank_0: Whether this is rank 0, the coordinator.
        world_size: The number of ranks.
        nonce: 16 random bytes, the same on all ranks, which make save ids unique.
        store: The key-value store.
    """

    def __init__(self, store: KeyValue, *, rank: int, world_size: int, nonce: bytes):
        self.rank = rank
        self.is_rank_0 = rank == 0
        self.world_size = world_size
        self.nonce = nonce
        self.store = store

    def post(self, key: str, value: bytes) -> None:
        """Publish a value for the other ranks."""
        self.store.set(key, value)

    def collect(self, key: str, ranks: Iterable[int], *, timeout_s: float, what: str) -> dict[int, bytes]:
        """Wait for the value of each rank under `key/rank` and remove them from the store.

        Raises:
            CheckpointTimeoutError: Some values were not posted in time; the message names their ranks.
        """
        missing = list(ranks)
        values: dict[int, bytes] = {}

        def look() -> bool:
            # In order, up to the first missing one: one request per poll instead of one per rank.
            while missing and self.store.check([f"{key}/{missing[0]}"]):
                rank = missing.pop(0)
                values[rank] = bytes(self.store.get(f"{key}/{rank}"))
                self.store.delete_key(f"{key}/{rank}")
            return not missing

        if not _poll(look, timeout_s):
            late = [rank for rank in missing if not self.store.check([f"{key}/{rank}"])] or missing
            raise CheckpointTimeoutError.of_ranks(
                f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))} did not report {what} "
                f"within {timeout_s:g} s. Look for what ended or delayed these ranks; a slow store needs a "
                "larger `timeout_s`",
                late,
                timeout_s,
            )
        return values

    def await_value(self, key: str, *, timeout_s: float) -> bytes | None:
        """Wait for a value that another rank posts, and return it; None if it was not posted in time."""
        return bytes(self.store.get(key)) if _poll(lambda: self.store.check([key]), timeout_s) else None

    def receive(self, key: str, *, timeout_s: float, what: str) -> bytes:
        """Wait for a value that rank 0 posts, and return it.

        Raises:
            CheckpointTimeoutError: The value was not posted in time.
            torch.distributed.DistError: Rank 0's process has ended.
        """
        value = self.await_value(key, timeout_s=timeout_s)
        if value is None:
            message = f"rank 0 did not post {what} within {timeout_s:g} s"
            raise CheckpointTimeoutError.of_ranks(message, [0], timeout_s)
        return value

    def tick(self, key: str) -> None:
        """Increment a counter by one; errors are ignored, because a dead rank 0 needs no count."""
        with contextlib.suppress(CheckpointTimeoutError, RuntimeError):
            self.store.add(key, 1)

    def await_ticks(self, key: str, count: int, *, timeout_s: float) -> bool:
        """Wait until `count` ranks have called `tick`; return whether they did in time."""
        return _poll(lambda: self.store.add(key, 0) >= count, timeout_s)

    def forget(self, *keys: str) -> None:
        """Remove values from the store; errors are ignored, because a store that has ended keeps none."""
        with contextlib.suppress(CheckpointTimeoutError, RuntimeError):
            for key in keys:
                self.store.delete_key(key)


def _poll(is_ready: Callable[[], bool], timeout_s: float) -> bool:
    left_s, pause_s, last = timeout_s, _POLL_S[0], time.monotonic()
    while not is_ready():
        # If the job was suspended, at most one slice of that time counts.
        now = time.monotonic()
        left_s -= min(now - last, timeout_s / SLICES)
        last = now
        if left_s < 0:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _POLL_S[1])
    return True


_opening = threading.Lock()


def open_coordinator(*, answer_s: float = 600, timeout_s: float = 60) -> Coordinator:
    """Open a key-value store for the ranks of the job, or a local one for a single process.

    Collective if torch.distributed is initialised: every rank must call it, in the same order among its
    calls. The address is exchanged through the default group's store, so no process group communicates.

    Args:
        answer_s: Seconds that rank 0 may take to answer a request, once the store is open.
        timeout_s: Seconds that rank 0 may be later than this rank.

    Raises:
        CheckpointTimeoutError: Rank 0 did not open the store in time, or does not answer.
    """
    global _opened
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Coordinator(HashStore(), rank=0, world_size=1, nonce=secrets.token_bytes(16))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shared = _get_default_store()
    with _opening:
        _opened += 1
        key = f"hocket-ckpt/{_opened}"
    if rank == 0:
        host, tcp_store = _host_store(world_size)
        nonce = secrets.token_bytes(16)
        shared.set(key, f"{host} {tcp_store.port} {nonce.hex()}")
        return Coordinator(tcp_store, rank=0, world_size=world_size, nonce=nonce)
    default = DeadlineStore(lambda: shared, timeout_s=timeout_s)
    if not _poll(lambda: default.check([key]), timeout_s):
        raise CheckpointTimeoutError(
            f"rank 0 did not open its side of the checkpoint store within {timeout_s:g} s. Build the store "
            f"on every rank"
        )
    host, port, nonce_hex = default.get(key).decode().split()
    default.close()

    def connect() -> TCPStore:
        return TCPStore(
            host,
            int(port),
            world_size,
            is_master=False,
            timeout=timedelta(seconds=_CONNECT_S),
            wait_for_workers=False,
        )

    store = DeadlineStore(connect, timeout_s=answer_s, connect_s=2 * _CONNECT_S)
    return Coordinator(store, rank=rank, world_size=world_size, nonce=bytes.fromhex(nonce_hex))


def _host_store(world_size: int) -> tuple[str, TCPStore]:
    """Serve the store from this process; return its host name for the other ranks, and the store."""
    host = environ.get("MASTER_ADDR", "127.0.0.1")
    if "MASTER_ADDR" not in environ and int(environ.get("LOCAL_WORLD_SIZE", world_size)) != world_size:
        host = socket.getfqdn()
    if host in ("localhost", "127.0.0.1", "::1"):
        host = "127.0.0.1"
        listener = socket.create_server((host, 0), backlog=max(128, world_size))
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=max(128, world_size)
        )
    else:
        listener = socket.create_server(("", 0), backlog=max(128, world_size))
    with listener:
        store = TCPStore(
            host,
            listener.getsockname()[1],
            world_size,
            is_master=True,
            timeout=timedelta(seconds=_CONNECT_S),
            wait_for_workers=False,
            master_listen_fd=listener.fileno(),
        )
        listener.detach()  # the store owns it now, and closes it
    return host, store

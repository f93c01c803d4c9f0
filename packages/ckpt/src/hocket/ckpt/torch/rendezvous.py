"""How ranks tell each other what became of a save: a small key-value store, and no process group.

The store is opened once, together with the checkpoint store, and belongs to it alone. So a save can run in a
background thread beside the job's collectives, and a rank that dies is named by its missing key instead of
hanging its peers.
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
from torch.distributed.distributed_c10d import _get_default_store

from hocket.ckpt.errors import CheckpointTimeoutError
from hocket.ckpt.torch.keyvalue import SLICES, Alone, KeyValue, Patient

__all__ = ["Rendezvous", "open_rendezvous"]

_POLL_S = (0.002, 0.05)
# To be connected with the store, which is a thread of rank 0.
_CONNECT_S = 30
_opened = 0


class Rendezvous:
    """This rank's place among the ranks of a job, and their common store.

    Attributes:
        rank: This rank. Rank 0 is the coordinator.
        world_size: How many there are.
        nonce: 16 random bytes, the same on all ranks: what makes save ids unique.
        store: What they share.
    """

    def __init__(self, store: KeyValue, *, rank: int, world_size: int, nonce: bytes):
        self.rank = rank
        self.world_size = world_size
        self.nonce = nonce
        self.store = store

    @property
    def is_coordinator(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def post(self, key: str, value: bytes) -> None:
        """Puts a value, UTF-8 text, where the other ranks find it."""
        self.store.set(key, value.decode())

    def collect(self, key: str, ranks: Iterable[int], *, timeout_s: float, what: str) -> dict[int, bytes]:
        """Waits for `key/rank` of each rank; takes them out of the store.

        Raises:
            CheckpointTimeoutError: Some were not there in time; the message names them.
        """
        missing = list(ranks)
        found: dict[int, bytes] = {}

        def look() -> bool:
            # In order, and no further than the first that is not there: one question a poll, not one a rank.
            while missing and self.store.check([f"{key}/{missing[0]}"]):
                rank = missing.pop(0)
                found[rank] = bytes(self.store.get(f"{key}/{rank}"))
                self.store.delete_key(f"{key}/{rank}")
            return not missing

        if not _poll(look, timeout_s):
            late = [rank for rank in missing if not self.store.check([f"{key}/{rank}"])] or missing
            raise CheckpointTimeoutError(
                f"Rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))} did not report {what} "
                f"within "
                f"{timeout_s:g} s. Look for what ended or held up these ranks; a slow store needs a larger "
                f"`timeout_s`."
            )
        return found

    def receive(self, key: str, *, timeout_s: float, what: str) -> bytes:
        """Waits for a value that the coordinator posts.

        Raises:
            CheckpointTimeoutError: It was not there in time.
            torch.distributed.DistError: The coordinator's process is gone.
        """
        if not _poll(lambda: self.store.check([key]), timeout_s):
            raise CheckpointTimeoutError(f"Rank 0 did not post {what} within {timeout_s:g} s.")
        return bytes(self.store.get(key))

    def tick(self, key: str) -> None:
        """Counts this rank at a key: a courtesy, which a coordinator that is gone needs no more."""
        with contextlib.suppress(CheckpointTimeoutError, RuntimeError):
            self.store.add(key, 1)

    def await_ticks(self, key: str, count: int, *, timeout_s: float) -> bool:
        """Waits until `count` ranks have counted themselves; whether they did in time."""
        return _poll(lambda: self.store.add(key, 0) >= count, timeout_s)

    def forget(self, *keys: str) -> None:
        """Takes values out of the store."""
        for key in keys:
            self.store.delete_key(key)


def _poll(look: Callable[[], bool], timeout_s: float) -> bool:
    left_s, pause_s, last = timeout_s, _POLL_S[0], time.monotonic()
    while not look():
        # Of the time that the job was suspended no more counts than this.
        now = time.monotonic()
        left_s -= min(now - last, timeout_s / SLICES)
        last = now
        if left_s < 0:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _POLL_S[1])
    return True


_opening = threading.Lock()


def open_rendezvous(*, answer_s: float = 600, timeout_s: float = 60) -> Rendezvous:
    """Opens a store of our own for the ranks of the job, or one for this process alone.

    Collective where torch.distributed is initialised: every rank calls it, in the same order among its calls.
    The address goes through the default group's store, so no process group communicates.

    Args:
        answer_s: How long rank 0 may take for one answer, once it is open, before it is given up.
        timeout_s: How long it may be later here than other ranks.

    Raises:
        CheckpointTimeoutError: Rank 0 did not open it in time, or does not answer.
    """
    global _opened
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Rendezvous(Alone(), rank=0, world_size=1, nonce=secrets.token_bytes(16))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shared = _get_default_store()
    with _opening:
        _opened += 1
        key = f"hocket-ckpt/{_opened}"
    if rank == 0:
        host, own = _host_store(world_size)
        nonce = secrets.token_bytes(16)
        shared.set(key, f"{host} {own.port} {nonce.hex()}")
        return Rendezvous(own, rank=0, world_size=world_size, nonce=nonce)
    default = Patient(lambda: shared, timeout_s=timeout_s)
    if not _poll(lambda: default.check([key]), timeout_s):
        raise CheckpointTimeoutError(
            f"Rank 0 did not open its side of the checkpoint store within {timeout_s:g} s. Build the store "
            f"on every rank."
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

    store = Patient(connect, timeout_s=answer_s, connect_s=2 * _CONNECT_S)
    return Rendezvous(store, rank=rank, world_size=world_size, nonce=bytes.fromhex(nonce_hex))


def _host_store(world_size: int) -> tuple[str, TCPStore]:
    """Serves the store from this process; returns the address at which the others reach it."""
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

"""Files of one rank's folder that the other ranks of a job read over TCP."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from hocket.ckpt.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["FileServer", "fetch_bytes", "fetch_file", "new_token", "route_to"]

TOKEN_BYTES = 32
_REQUEST = struct.Struct("!I")
_SIZE = struct.Struct("!q")
_MOST_PATH_BYTES = 4096
_BUFFER_BYTES = 4 << 20
_BACKLOG = 128
_PAUSE_S = 0.1
"""Seconds to wait after a connection that could not be accepted."""


class FileServer:
    """Serves the files below a folder to clients that know a secret, on a thread of its own.

    A request is the secret, the length of a path and the path; the answer is the size of the file, -1 where
    there is none, and its bytes.

    Args:
        folder: The folder.
        token: The secret.
        timeout_s: Seconds that a client may be silent.
        is_local: Whether only this machine may connect.

    Attributes:
        port: The port.
    """

    def __init__(self, folder: str, token: bytes, *, timeout_s: float, is_local: bool) -> None:
        self._folder = Path(folder).resolve()
        self._token = token
        self._timeout_s = timeout_s
        self._has_closed = threading.Event()
        if is_local or not socket.has_dualstack_ipv6():
            self._listener = socket.create_server(("127.0.0.1" if is_local else "", 0), backlog=_BACKLOG)
        else:
            self._listener = socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
            )
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="hocket-ckpt-files", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no further connections."""
        self._has_closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes up `accept`
        self._listener.close()
        self._thread.join(timeout=2)

    def _accept(self) -> None:
        while not self._has_closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or out of file descriptors, which passes
                self._has_closed.wait(_PAUSE_S)
                continue
            try:
                threading.Thread(
                    target=self._serve, args=(connection,), name="hocket-ckpt-file", daemon=True
                ).start()
            except RuntimeError:  # out of threads; the client hears at once that it gets nothing
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one request; a client without the secret gets nothing."""
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(self._timeout_s)
            if not hmac.compare_digest(_receive(connection, TOKEN_BYTES), self._token):
                return
            (length,) = _REQUEST.unpack(_receive(connection, _REQUEST.size))
            if length > _MOST_PATH_BYTES:
                return
            path = (self._folder / _receive(connection, length).decode()).resolve()
            if not path.is_relative_to(self._folder) or not path.is_file():
                connection.sendall(_SIZE.pack(-1))
                return
            with path.open("rb") as file:
                connection.sendall(_SIZE.pack(os.fstat(file.fileno()).st_size))
                connection.sendfile(file)


def new_token() -> bytes:
    """Return a secret."""
    return secrets.token_bytes(TOKEN_BYTES)


def fetch_file(
    address: tuple[str, int],
    token: bytes,
    path: str,
    target: Path,
    *,
    timeout_s: float,
    num_bytes: int | None = None,
) -> None:
    """Copy a file of a `FileServer` to a local path, which appears once it is whole.

    Args:
        address: Host and port.
        token: The secret.
        path: The path below the server's folder.
        target: The local path.
        timeout_s: Seconds that the server may be silent.
        num_bytes: The size that the file must have; None for any.

    Raises:
        CheckpointNotFoundError: The server has no such file.
        CheckpointError: The server does not answer, the size is another, or there is no room.
    """
    with _connected(address, token, path, timeout_s) as connection:
        size = _read_size(connection, address, path)
        if num_bytes is not None and size != num_bytes:
            raise CheckpointError(f"{_where(address, path)} has {size} bytes, expected {num_bytes}")
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < size:
            raise CheckpointError(
                f"{_where(address, path)} has {size} bytes, and `{target.parent}` has room for {free}"
            )
        part = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with part.open("wb") as file:
                buffer, left = memoryview(bytearray(min(_BUFFER_BYTES, max(size, 1)))), size
                while left:
                    count = connection.recv_into(buffer[: min(left, len(buffer))])
                    if not count:
                        raise CheckpointError(f"{_where(address, path)} ended {left} bytes early")
                    file.write(buffer[:count])
                    left -= count
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def fetch_bytes(address: tuple[str, int], token: bytes, path: str, *, timeout_s: float) -> bytes:
    """Return the content of a file of a `FileServer`.

    Raises:
        CheckpointError: As for `fetch_file`.
    """
    with _connected(address, token, path, timeout_s) as connection:
        return _receive(connection, _read_size(connection, address, path))


def route_to(host: str) -> str | None:
    """Return the address by which this machine reaches another; None if no interface does."""
    if not host:
        return None  # to a socket, it would be this machine
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
    return None


@contextlib.contextmanager
def _connected(
    address: tuple[str, int], token: bytes, path: str, timeout_s: float
) -> Iterator[socket.socket]:
    """Yield a connection on which the request for a file was sent; errors of the network become ours."""
    try:
        with socket.create_connection(address, timeout=timeout_s) as connection:
            name = path.encode()
            connection.sendall(token + _REQUEST.pack(len(name)) + name)
            yield connection
    except CheckpointError:  # some are errors of the system, too
        raise
    except OSError as error:
        raise CheckpointError(f"{_where(address, path)} could not be copied: {error}") from error


def _read_size(connection: socket.socket, address: tuple[str, int], path: str) -> int:
    (size,) = _SIZE.unpack(_receive(connection, _SIZE.size))
    if size < 0:
        raise CheckpointNotFoundError(f"{_where(address, path)} does not exist")
    return int(size)


def _receive(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(count - len(data), _BUFFER_BYTES))
        if not part:
            raise ConnectionResetError(f"the connection ended after {len(data)} of {count} bytes")
        data += part
    return bytes(data)


def _where(address: tuple[str, int], path: str) -> str:
    return f"`{path}` of the rank at {address[0]}:{address[1]}"

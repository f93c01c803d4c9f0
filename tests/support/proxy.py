"""A forward proxy on loopback, which records requests and drops chosen ones, and TLS for test servers.

Certificates are signed by an authority that only these tests trust.
"""

from __future__ import annotations

import contextlib
import http.client
import selectors
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

Fate = Literal["pass", "refuse", "lose"]
"""`refuse`: not forwarded, connection closed. `lose`: executed by the server, but the response is dropped."""


class Proxy(ThreadingHTTPServer):
    """Forwards every request to one server, whatever its host, and records its line and headers."""

    def __init__(self, target: str):
        self.target = urlsplit(target).netloc
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.tunnels: list[str] = []
        """Hosts and ports of CONNECT requests, whose bytes all go to the server and are not recorded."""
        self.lost: list[str] = []
        self.fate: Callable[[str, str], Fate] = lambda method, url: "pass"
        """Maps a request's method and percent-decoded URL to its fate; calls do not overlap."""
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Forward)

    @property
    def address(self) -> str:
        """Return the URL for `HTTP_PROXY`, without TLS."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect or reject the certificate, and report all other errors."""
        if not isinstance(sys.exception(), ConnectionError | ssl.SSLError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Forward(BaseHTTPRequestHandler):
    """One connection of the proxy."""

    server: Proxy
    protocol_version = "HTTP/1.1"

    def forward(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        with self.server.lock:
            self.server.seen.append((self.path, headers))
            fate = self.server.fate(self.command, unquote(self.path))
            if fate != "pass":
                self.server.lost.append(f"{self.command} {self.path}")
        if fate != "refuse":
            answer, data = self._ask(headers, body)
        if fate != "pass":
            self.close_connection = True
            return
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "keep-alive"):
                self.send_header(name, value)
        if answer.getheader("content-length") is None and answer.status != 204:
            self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _ask(self, headers: dict[str, str], body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        url = urlsplit(self.path)
        onward = http.client.HTTPConnection(self.server.target, timeout=30)
        try:
            target = f"{url.path}?{url.query}" if url.query else url.path
            onward.putrequest(self.command, target, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                onward.putheader(name, value)
            onward.endheaders(body)
            answer = onward.getresponse()
            return answer, answer.read()
        finally:
            onward.close()

    def do_CONNECT(self) -> None:
        with self.server.lock:
            self.server.tunnels.append(self.path)
        host, _, port = self.server.target.partition(":")
        self.close_connection = True
        with socket.create_connection((host, int(port)), timeout=30) as onward:
            self.send_response_only(200)
            self.end_headers()
            _relay(self.connection, onward)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

    def log_message(self, format: str, *values: object) -> None:  # noqa: A002
        pass


def _relay(first: socket.socket, second: socket.socket) -> None:
    """Copy bytes between two sockets in both directions until one of them closes."""
    with selectors.DefaultSelector() as selector:
        selector.register(first, selectors.EVENT_READ, second)
        selector.register(second, selectors.EVENT_READ, first)
        while True:
            for key, _ in selector.select():
                data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                if not data:
                    return
                key.data.sendall(data)


class Authority:
    """A certificate authority in a folder, with one certificate for `127.0.0.1` and `store.invalid`.

    Raises:
        FileNotFoundError: There is no `openssl`.
    """

    def __init__(self, folder: Path):
        self.bundle = folder / "ca.pem"
        """The certificate bundle that clients must trust."""
        self._key, self._certificate = folder / "key.pem", folder / "certificate.pem"
        openssl = shutil.which("openssl")
        if openssl is None:
            raise FileNotFoundError("`openssl` was not found; install it to make certificates")

        def run(*arguments: str) -> None:
            subprocess.run(
                [openssl, *arguments], cwd=folder, check=True, capture_output=True, text=True, timeout=60
            )

        new = [
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "30",
        ]
        run(*new, "-subj", "/CN=These tests", "-keyout", "ca-key.pem", "-out", "ca.pem")
        names = "subjectAltName=IP:127.0.0.1,DNS:store.invalid"
        extensions = ["-addext", "basicConstraints=critical,CA:FALSE", "-addext", names]
        signer = ["-CA", "ca.pem", "-CAkey", "ca-key.pem"]
        run(
            *new, *signer, *extensions, "-subj", "/CN=server", "-keyout", "key.pem", "-out", "certificate.pem"
        )

    def secure(self, server: ThreadingHTTPServer) -> None:
        """Make a server that is not running yet use TLS."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._certificate, self._key)
        # The handshake runs on the connection's thread and does not block the listener.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)


@contextlib.contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[None]:
    """Run a server of the standard library on a thread."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@contextlib.contextmanager
def forwarding(target: str, *, authority: Authority | None = None) -> Iterator[Proxy]:
    """Run a proxy in front of the server at `target`, with TLS if there is an `authority`."""
    proxy = Proxy(target)
    if authority is not None:
        authority.secure(proxy)
    with serving(proxy):
        yield proxy

"""A forward proxy on loopback: it sees what clients ask for, and loses on the way what it is told to."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import unquote, urlsplit

Fate = Literal["pass", "refuse", "lose"]
"""`refuse`: closed before the server hears of it. `lose`: carried out, and the answer never comes."""


class Proxy(ThreadingHTTPServer):
    """Hands every request to one server, whatever host it names, and notes its line and headers."""

    def __init__(self, target: str):
        self.target = urlsplit(target).netloc
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.lost: list[str] = []
        self.fate: Callable[[str, str], Fate] = lambda method, url: "pass"
        """Decides on a request by its method and its URL without percent signs; one call at a time."""
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Forward)

    @property
    def address(self) -> str:
        """What `HTTP_PROXY` is set to."""
        return f"http://127.0.0.1:{self.server_address[1]}"


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

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

    def log_message(self, format: str, *values: object) -> None:  # noqa: A002
        pass


@contextlib.contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[None]:
    """Runs a server of the standard library on a thread."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@contextlib.contextmanager
def forwarding(target: str) -> Iterator[Proxy]:
    """A running proxy before the server at `target`."""
    proxy = Proxy(target)
    with serving(proxy):
        yield proxy

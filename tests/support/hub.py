"""A local server that speaks the HTTP API of a hub of Hugging Face, with a second one for large files.

Repositories are in memory. As the real hub does, this one redirects large files to the storage by signed
addresses; the storage refuses requests that carry a token.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit

LARGE_SUFFIXES = (".parquet", ".mds", ".safetensors", ".bin", ".zstd")
_PARTS = re.compile(r"(?P<kind>datasets/|spaces/|)(?P<name>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>.+)")
_API = re.compile(
    r"api/(?P<kind>datasets|spaces|models)/(?P<name>[^/]+/[^/]+)(?:/(?P<verb>[^/]+)(?:/(?P<rest>.*))?)?"
)


@dataclass
class Repository:
    """A repository: its commits, and the names of some of them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    is_private: bool = False
    is_gated: bool = False

    def commit(self, files: Mapping[str, bytes | None], *, branch: str = "main") -> str:
        """Write a commit on top of a branch and return its hash; None removes a file."""
        tree = dict(self.commits.get(self.refs.get(branch, ""), {}))
        tree |= {path: data for path, data in files.items() if data is not None}
        tree = {path: data for path, data in tree.items() if files.get(path, data) is not None}
        digest = hashlib.sha1(f"{len(self.commits)} {branch} {sorted(tree)}".encode())
        sha = digest.hexdigest()
        self.commits[sha], self.refs[branch] = tree, sha
        return sha


class Hub:
    """A running hub with its storage, as a context manager.

    Attributes:
        repositories: Repositories by kind and name, such as `datasets/owner/name` or `models/owner/name`.
        tokens: Tokens of accounts, all of which may read every private repository.
        accepted: Tokens of accounts that may read gated repositories.
        moved: New names of repositories by the former ones.
        limits: Headers of the 429 responses to the next requests for a path that contains the key.
        page_size: Entries in a page of a listing.
        next_link: The header `Link` of a page of a listing, of which `{}` is the address of the next one.
        ignores_ranges: Whether the hub answers a range of a small file with the whole file.
        range_shift: Bytes by which the storage answers with another range than the one asked for.
        after_revision: Called after a revision has been told, such as to move it for the next request.
        seen: Method, target and headers of every request to the hub; `stored`: of those to the storage.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.tokens = {"hf_member"}
        self.accepted: set[str] = set()
        self.moved: dict[str, str] = {}
        self.limits: list[tuple[str, dict[str, str]]] = []
        self.page_size = 1000
        self.next_link = '<{}>; rel="next"'
        self.ignores_ranges = False
        self.range_shift = 0
        self.after_revision: Callable[[], object] = lambda: None
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.stored: list[tuple[str, str, dict[str, str]]] = []
        self.signature = 0
        self.blobs: dict[str, bytes] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with self._stack as stack:
            self._hub = stack.enter_context(_serving(_HubRequest, self))
            self._storage = stack.enter_context(_serving(_StorageRequest, self))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def endpoint(self) -> str:
        """The address for `HF_ENDPOINT`."""
        return f"http://127.0.0.1:{self._hub.server_address[1]}"

    @property
    def storage(self) -> str:
        """The address of the storage."""
        return f"http://127.0.0.1:{self._storage.server_address[1]}"

    def repository(self, name: str) -> Repository:
        """Return a repository, which is made at the first call, by its kind and name."""
        return self.repositories.setdefault(name, Repository())

    def clean_env(self, home: Path) -> dict[str, str]:
        """Return the variables of a client without a token, whose files are in `home`."""
        names = [name for name in os.environ if name.startswith(("HF_", "HUGGING_FACE_", "TRANSFORMERS_"))]
        return dict.fromkeys(names, "") | {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home)}

    def expire_links(self) -> None:
        """Make the storage refuse the addresses that were given out so far."""
        self.signature += 1


@contextlib.contextmanager
def _serving(request: type[BaseHTTPRequestHandler], hub: Hub) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), request)
    server.hub = hub  # type: ignore[attr-defined]
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="hub-server", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        return hub

    def log_message(self, *args: object) -> None:
        """Log nothing."""

    def told(self) -> tuple[str, str, dict[str, str]]:
        headers = {name.lower(): value for name, value in self.headers.items()}
        return self.command, self.path, headers

    def answer(self, status: int, data: bytes = b"", **headers: str) -> None:
        """Send a response; underscores in the names of headers are hyphens."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def send_file(self, data: bytes, **headers: str) -> None:
        """Send a file, or the range of it that is asked for."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None or (self.hub.ignores_ranges and isinstance(self, _HubRequest)):
            self.answer(200, data, Accept_Ranges="bytes", **headers)
            return
        shift = self.hub.range_shift
        start, end = int(asked[1]) + shift, min(int(asked[2] or len(data)) + 1 + shift, len(data))
        if start >= len(data):
            self.answer(416, Content_Range=f"bytes */{len(data)}")
            return
        self.answer(206, data[start:end], Content_Range=f"bytes {start}-{end - 1}/{len(data)}", **headers)


class _StorageRequest(_Request):
    def do_GET(self) -> None:
        self.hub.stored.append(self.told())
        url = urlsplit(self.path)
        is_signed = parse_qs(url.query).get("sig") == [str(self.hub.signature)]
        if self.headers.get("Authorization") is not None:
            self.answer(400, b"only one way of authentication is allowed")
        elif not is_signed or self.command == "HEAD":
            self.answer(403, b"the signature does not match")
        else:
            data = self.hub.blobs[url.path.lstrip("/")]
            self.send_file(data, ETag=f'"storage-{hashlib.md5(data).hexdigest()}"')

    do_HEAD = do_GET


class _HubRequest(_Request):
    def do_GET(self) -> None:
        told, url = self.told(), urlsplit(self.path)
        self.hub.seen.append(told)
        for number, (part, headers) in enumerate(self.hub.limits):
            if part in self.path:
                del self.hub.limits[number]
                self.answer(429, b"", **headers)
                return
        path = url.path.lstrip("/")
        if found := _PARTS.fullmatch(path):
            self._send_file(found)
        elif found := _API.fullmatch(path):
            self._send_api(found, parse_qs(url.query))
        else:
            self.answer(404)

    def do_POST(self) -> None:
        self.do_GET()

    do_HEAD = do_GET

    def _open(self, kind: str, name: str, revision: str) -> tuple[Repository, str] | None:
        """Return the repository and the commit; None after a refusal or a redirect was sent."""
        full = f"{kind}/{name}"
        if (new := self.hub.moved.get(full)) is not None:
            old_part, new_part = f"/{name}/", f"/{new.split('/', 1)[1]}/"
            self.answer(307, Location=f"{self.path}/".replace(old_part, new_part, 1).rstrip("/"))
            return None
        repository = self.hub.repositories.get(full)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        if token is not None and token not in self.hub.tokens | self.hub.accepted:
            self._refuse(401, None, "Invalid credentials in Authorization header")
        elif repository is None or (repository.is_private and token is None):
            if token is None:
                self._refuse(401, "RepoNotFound", "Invalid username or password.")
            else:
                self._refuse(404, "RepoNotFound", "Repository not found")
        elif repository.is_gated and token not in self.hub.accepted and "/api/" not in self.path:
            status = 401 if token is None else 403
            self._refuse(status, "GatedRepo", f"Access to {kind} {name} is restricted.")
        else:
            commit = repository.refs.get(revision, revision)
            if commit in repository.commits:
                return repository, commit
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return None

    def _refuse(self, status: int, code: str | None, message: str) -> None:
        headers = {} if code is None else {"X_Error_Code": code}
        self.answer(status, json.dumps({"error": message}).encode(), X_Error_Message=message, **headers)

    def _send_file(self, found: re.Match[str]) -> None:
        kind = found["kind"].rstrip("/") or "models"
        if (opened := self._open(kind, found["name"], unquote(found["rev"]))) is None:
            return
        repository, commit = opened
        path = unquote(found["path"])
        data = repository.commits[commit].get(path)
        common = {"X_Repo_Commit": commit}
        if data is None:
            headers = {"X_Error_Code": "EntryNotFound", "X_Error_Message": "Entry not found"}
            self.answer(404, **common, **headers)
        elif path.endswith(LARGE_SUFFIXES):
            digest = hashlib.sha256(data).hexdigest()
            self.hub.blobs[digest] = data
            self.answer(
                302,
                Location=f"{self.hub.storage}/{digest}?sig={self.hub.signature}",
                X_Linked_Etag=f'"{digest}"',
                X_Linked_Size=str(len(data)),
                **common,
            )
        else:
            self.send_file(data, ETag=f'"{git_hash(data)}"', **common)

    def _send_api(self, found: re.Match[str], query: dict[str, list[str]]) -> None:
        verb, rest = found["verb"], found["rest"] or ""
        revision = unquote(rest.split("/")[0]) if verb else "main"
        if (opened := self._open(found["kind"], found["name"], revision)) is None:
            return
        repository, commit = opened
        tree = repository.commits[commit]
        if verb in (None, "revision"):
            info = {
                "id": found["name"],
                "sha": commit,
                "private": repository.is_private,
                "gated": repository.is_gated,
                "siblings": [{"rfilename": path} for path in sorted(tree)],
                "tags": [],
                "downloads": 0,
                "likes": 0,
            }
            self._send_json(info)
            self.hub.after_revision()
        elif verb == "tree":
            self._send_tree(tree, unquote(rest.partition("/")[2]), query)
        elif verb == "paths-info":
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length).decode()
            is_json = "json" in self.headers.get("Content-Type", "")
            asked = json.loads(body) if is_json else parse_qs(body)
            paths = asked["paths"]
            self._send_json([entry for path in paths for entry in _entries(tree, path)])
        else:
            self.answer(404)

    def _send_tree(self, tree: dict[str, bytes], folder: str, query: dict[str, list[str]]) -> None:
        is_recursive = query.get("recursive") in (["true"], ["True"], ["1"])
        below = f"{folder}/" if folder else ""
        names: set[str] = set()
        for path in tree:
            if path.startswith(below):
                parts = path[len(below) :].split("/")
                depths = range(1, len(parts) + 1) if is_recursive else [1]
                names |= {below + "/".join(parts[:depth]) for depth in depths}
        if not names and folder:
            self._refuse(404, "EntryNotFound", f"{folder} does not exist")
            return
        start = int(query.get("cursor", ["0"])[0])
        if start > len(names):
            self._refuse(404, "EntryNotFound", "there is no such page")
            return
        chosen = sorted(names)[start : start + self.hub.page_size]
        headers = {}
        if start + len(chosen) < len(names):
            url = urlsplit(self.path)
            flag = "true" if is_recursive else "false"
            next_page = f"{self.hub.endpoint}{url.path}?recursive={flag}&cursor={start + len(chosen)}"
            headers = {"Link": self.hub.next_link.format(next_page)}
        self._send_json([entry for path in chosen for entry in _entries(tree, path)], **headers)

    def _send_json(self, value: Any, **headers: str) -> None:
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json", **headers)


def _entries(tree: Mapping[str, bytes], path: str) -> Iterator[dict[str, Any]]:
    """Yield the entry of a file or a folder in a listing; none if there is none."""
    data = tree.get(path)
    if data is None:
        if any(name.startswith(f"{path}/") for name in tree):
            yield {"type": "directory", "oid": git_hash(path.encode()), "size": 0, "path": path}
        return
    entry = {"type": "file", "oid": git_hash(data), "size": len(data), "path": path}
    if path.endswith(LARGE_SUFFIXES):
        digest = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 134}
    yield entry


def git_hash(data: bytes) -> str:
    """Return the hash by which git names a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def uri(name: str, path: str = "", *, revision: str | None = None) -> str:
    """Return the URI of a path in a repository, by its kind and name."""
    at = "" if revision is None else f"@{quote(revision, safe='')}"
    return f"hf://{name.removeprefix('models/')}{at}/{path}".rstrip("/")

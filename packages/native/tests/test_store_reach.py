"""Reaching a store: endpoints, proxies, signatures, and reading from plain web servers."""

import os
import pickle
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hocket.native import Store, errors
from support.proxy import Proxy, serving
from support.s3d import Server

Faults = Callable[..., Server]


@pytest.fixture
def serve() -> Iterator[Callable[[ThreadingHTTPServer], None]]:
    """Return a function that runs a server of the standard library on a thread until the test ends."""
    with ExitStack() as stack:
        yield lambda server: stack.enter_context(serving(server))


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove all variables about stores and proxies from the environment."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "S3_", "GOOGLE_", "AZURE_", "MOSAICML_")) or name.lower().endswith(
            "_proxy"
        ):
            monkeypatch.delenv(name)
    return monkeypatch


def set_all(patch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        patch.setenv(name, value)


@pytest.mark.parametrize("variable", ["S3_ENDPOINT_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "option"])
def test_the_endpoint_is_read_from_variables_and_options(
    s3d: Server, clean: pytest.MonkeyPatch, variable: str
) -> None:
    set_all(clean, {**s3d.env, "AWS_ENDPOINT_URL": ""})
    if variable == "option":
        clean.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        store = Store(s3d.uri("reach"), endpoint=s3d.endpoint + "/")
    else:
        clean.setenv(variable, s3d.endpoint)
        store = Store(s3d.uri("reach"))
    store.put(variable, b"x")
    assert store.get(variable) == b"x"


NOBODY = "http://127.0.0.1:9"
SERVICES = "[services mine]\ndynamodb =\n  endpoint_url = {nobody}\ns3 =\n  endpoint_url = {server}\n"


@pytest.mark.parametrize(
    ("config", "variables"),
    [
        ("[default]\nregion = eu-1\nendpoint_url = {server}\n", {}),
        ("[profile p]\nendpoint_url={server}\n[default]\nendpoint_url = {nobody}\n", {"AWS_PROFILE": "p"}),
        (
            "[profile p]\nregion = eu-2\nservices = mine\nendpoint_url = {nobody}\n" + SERVICES,
            {"AWS_PROFILE": "p"},
        ),
        ('[profile "p q"]\nservices = mine\n' + SERVICES, {"AWS_PROFILE": "p q", "AWS_REGION": "us-2"}),
        ("[default]\nendpoint_url = {nobody}\n", {"AWS_ENDPOINT_URL": "{server}"}),
        ("[default]\nservices = mine\n" + SERVICES, {"AWS_DEFAULT_PROFILE": "default"}),
    ],
)
def test_the_endpoint_and_the_region_of_a_profile_are_those_of_boto3(
    s3d_faults: Faults,
    clean: pytest.MonkeyPatch,
    tmp_path: Path,
    config: str,
    variables: dict[str, str],
) -> None:
    boto3 = pytest.importorskip("boto3", reason="`boto3` is in the dependency group `test`")
    server = s3d_faults("kind=moved,key=region")
    places = {"server": server.endpoint, "nobody": NOBODY}
    (tmp_path / "config").write_text(config.format(**places))
    keys = {name: value for name, value in server.env.items() if "KEY" in name}
    values = {name: value.format(**places) for name, value in variables.items()}
    files = {"AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_SHARED_CREDENTIALS_FILE": "/nowhere"}
    set_all(clean, {**keys, **values, **files})
    # boto3 does not read `AWS_REGION`.
    peer = boto3.Session(region_name=values.get("AWS_REGION")).client("s3").meta
    assert peer.endpoint_url == server.endpoint
    store = Store(server.uri("profile"), deadline_s=5)
    store.put("k", b"x")
    assert store.get("k") == b"x"
    with pytest.raises(
        errors.StoreConfigError, match=f"the request was made for `{peer.region_name or 'us-east-1'}`"
    ):
        Store(server.uri(), deadline_s=5).get("region")


def test_ignored_endpoints_and_missing_services_are_treated_as_by_boto3(
    s3d: Server, clean: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    boto3 = pytest.importorskip("boto3", reason="`boto3` is in the dependency group `test`")
    (tmp_path / "config").write_text(
        f"[default]\nregion = eu-1\nignore_configured_endpoint_urls = true\nendpoint_url = {NOBODY}\n"
        "[profile lost]\nregion = eu-1\nservices = nowhere\n"
    )
    keys = {name: value for name, value in s3d.env.items() if "KEY" in name}
    set_all(clean, {**keys, "AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_ENDPOINT_URL": NOBODY})
    assert "amazonaws.com" in boto3.Session().client("s3").meta.endpoint_url
    clean.setenv("S3_ENDPOINT_URL", s3d.endpoint)  # unknown to boto3, so never ignored
    store = Store(s3d.uri("ignored"), deadline_s=5)
    store.put("k", b"x")
    assert store.get("k") == b"x"
    clean.delenv("AWS_ENDPOINT_URL")
    clean.setenv("AWS_PROFILE", "lost")
    with pytest.raises(Exception, match="nowhere"):
        boto3.Session().client("s3")
    with pytest.raises(errors.StoreConfigError, match=r"\[services nowhere\]"):
        Store(s3d.uri("ignored")).get("k")


def test_oci_uris_use_oracles_s3_endpoint(s3d: Server, clean: pytest.MonkeyPatch) -> None:
    set_all(clean, s3d.env)
    store = Store(f"oci://{s3d.bucket}@space/oracle")
    store.put("k", b"x")
    assert Store(s3d.uri("oracle")).get("k") == b"x"
    clean.delenv("AWS_ENDPOINT_URL")
    with pytest.raises(errors.StoreConfigError, match="OCI_REGION"):
        Store("oci://bucket/p").get("k")


def test_proxies_virtual_hosts_and_requester_pays(
    s3d: Server, clean: pytest.MonkeyPatch, serve: Callable[[ThreadingHTTPServer], None]
) -> None:
    proxy = Proxy(s3d.endpoint)
    serve(proxy)
    set_all(clean, {**s3d.env, "AWS_ENDPOINT_URL": "http://store.invalid"})
    clean.setenv("HTTP_PROXY", proxy.address)
    store = Store(s3d.uri("proxied"), requester_pays=True)
    store.put("k", b"through")
    assert store.get("k") == b"through"
    path, headers = proxy.seen[-1]
    assert path.startswith(f"http://store.invalid/{s3d.bucket}/proxied/k")
    assert headers["x-amz-request-payer"] == "requester"
    clean.setenv("MOSAICML_STREAMING_AWS_REQUESTER_PAYS", f"other, {s3d.bucket}")
    Store(s3d.uri("proxied")).get("k")
    assert proxy.seen[-1][1]["x-amz-request-payer"] == "requester"
    clean.delenv("MOSAICML_STREAMING_AWS_REQUESTER_PAYS")
    Store(s3d.uri("proxied")).get("k")
    assert "x-amz-request-payer" not in proxy.seen[-1][1]
    # The server supports path-style buckets only; the proxy still records the client's request.
    with pytest.raises(errors.StoreError):
        Store(s3d.uri("proxied"), path_style=False).get("k")
    assert proxy.seen[-1][0].startswith(f"http://{s3d.bucket}.store.invalid/proxied/k")
    clean.setenv("NO_PROXY", "127.0.0.1")
    count = len(proxy.seen)
    Store(s3d.uri("proxied"), endpoint=s3d.endpoint).get("k")
    assert len(proxy.seen) == count


def test_a_public_bucket_needs_no_keys(s3d_faults: Faults, clean: pytest.MonkeyPatch) -> None:
    server = s3d_faults(mode="anonymous")
    clean.setenv("AWS_ENDPOINT_URL", server.endpoint)
    store = Store(server.uri("p"), anonymous=True)
    store.put("k", b"x")
    assert store.get("k") == b"x"
    clean.setenv("AWS_SKIP_SIGNATURE", "true")
    assert Store(server.uri("p")).get("k") == b"x"


def test_a_plain_http_uri_can_be_read_but_not_listed_or_written(
    s3d_faults: Faults, clean: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = s3d_faults(mode="anonymous")
    data = os.urandom(300_000)
    clean.setenv("AWS_ENDPOINT_URL", server.endpoint)
    Store(server.uri("p"), anonymous=True).put("a/k 1%", data)
    store = Store(f"{server.endpoint}/{server.bucket}/p", part_bytes=64 << 10)
    assert store.get("a/k 1%") == data
    assert store.get("a/k 1%", start=7, end=200_000) == data[7:200_000]
    assert store.head("a/k 1%").size == len(data)
    store.download("a/k 1%", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data
    with pytest.raises(errors.StoreNotFoundError):
        store.get("nothing")
    (tmp_path / "source").write_bytes(b"x")
    refused: list[tuple[str, Callable[[], object]]] = [
        ("list", store.list),
        ("list", store.list_dirs),
        ("put", lambda: store.put("k", b"x")),
        ("upload", lambda: store.upload("k", tmp_path / "source")),
        ("delete", lambda: store.delete("k")),
    ]
    for verb, call in refused:
        with pytest.raises(errors.StoreConfigError, match=f"cannot {verb}: plain HTTP"):
            call()
    for uri in ("https://me:secret@host/p", "https://host/p?sig=secret"):
        with pytest.raises(errors.StoreConfigError) as caught:
            Store(uri)
        assert "secret" not in str(caught.value)


def test_a_web_server_without_ranges_is_detected(
    clean: pytest.MonkeyPatch, serve: Callable[[ThreadingHTTPServer], None], tmp_path: Path
) -> None:
    class Files(SimpleHTTPRequestHandler):
        def __init__(self, *values: object):
            super().__init__(*values, directory=str(tmp_path))  # type: ignore[arg-type]

        def log_message(self, format: str, *values: object) -> None:  # noqa: A002
            pass

    (tmp_path / "k").write_bytes(b"x" * 100)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Files)
    serve(server)
    with pytest.raises(
        errors.StoreIOError, match=r"answered HTTP 200 .* expected HTTP 206 .* copy the object to"
    ):
        Store(f"http://127.0.0.1:{server.server_address[1]}").get("k")


class Web(ThreadingHTTPServer):
    """A web server of one object, with ranges and conditional requests as in RFC 9110."""

    def __init__(self, data: bytes, *etags: str, is_slow: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.data, self.is_slow = data, is_slow
        self.etags = list(etags)
        """The ETags of the next responses; the last one is used for all later responses."""
        self.paths: list[str] = []
        self.address = f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(BaseHTTPRequestHandler):
    server: Web

    def do_GET(self) -> None:
        web = self.server
        web.paths.append(self.path)
        etag = web.etags.pop(0) if len(web.etags) > 1 else web.etags[0]
        condition = self.headers["If-Match"]
        if condition is not None and (condition != etag or etag.startswith("W/")):
            self.send_response(412)
            self.end_headers()
            return
        first, last = map(int, re.findall(r"\d+", self.headers["Range"] or f"0-{len(web.data)}"))
        part = web.data[first : last + 1]
        self.send_response(206)
        self.send_header("ETag", etag)
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(web.data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        try:
            for byte in part if web.is_slow else b"":
                self.wfile.write(bytes([byte]))
                time.sleep(0.1)
            self.wfile.write(b"" if web.is_slow or self.command == "HEAD" else part)
        except OSError:
            pass  # the client has closed the connection

    do_HEAD = do_GET

    def log_message(self, format: str, *values: object) -> None:  # noqa: A002
        pass


def test_a_weak_etag_is_compared_but_not_sent_as_a_condition(
    clean: pytest.MonkeyPatch, serve: Callable[[ThreadingHTTPServer], None]
) -> None:
    web = Web(os.urandom(300_000), 'W/"one"')
    serve(web)
    store = Store(web.address, part_bytes=64 << 10)
    assert store.get("k") == web.data
    web.etags = ['W/"one"', 'W/"two"']
    with pytest.raises(errors.StoreChangedError, match='expected ETag `W/"one"`, found `W/"two"`'):
        store.get("k")


def test_a_web_address_may_be_percent_encoded(
    clean: pytest.MonkeyPatch, serve: Callable[[ThreadingHTTPServer], None]
) -> None:
    web = Web(b"x", '"one"')
    serve(web)
    for path in ("my data/ü%", "my%20data/%C3%BC%25"):
        store = Store(f"{web.address}/{path}")
        assert store.uri == f"{web.address}/my%20data/%C3%BC%25"
        for handle in (store, pickle.loads(pickle.dumps(store))):
            assert handle.get("a 1%") == b"x"
    assert set(web.paths) == {"/my%20data/%C3%BC%25/a%201%25"}


def test_a_slow_response_ends_at_the_deadline(
    clean: pytest.MonkeyPatch, serve: Callable[[ThreadingHTTPServer], None]
) -> None:
    web = Web(bytes(100), '"one"', is_slow=True)
    serve(web)
    with pytest.raises(errors.StoreTransientError, match="no complete answer within"):
        Store(web.address, deadline_s=2.0).get("k")
    # The first request used up the deadline; its few bytes do not extend it.
    assert len(web.paths) == 1


def test_a_host_that_does_not_answer_ends_at_the_deadline_without_extra_time(
    clean: pytest.MonkeyPatch,
) -> None:
    set_all(clean, {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s"})
    with ExitStack() as stack:
        # A listener with a full queue does not answer further connections.
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = server.getsockname()
        for _ in range(4):
            knock = stack.enter_context(socket.socket())
            knock.setblocking(False)
            knock.connect_ex(address)
        store = Store(
            "s3://bucket",
            endpoint=f"http://127.0.0.1:{address[1]}",
            timeout_s=0.4,
            deadline_s=1.5,
            part_bytes=64 << 20,
            max_retries=1000,
        )
        started = time.monotonic()
        with pytest.raises(errors.StoreTransientError, match="s3://bucket/k"):
            store.get("k")
        assert time.monotonic() - started < 20

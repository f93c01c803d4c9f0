"""Third-party object-store servers, for tests marked `stores`: MinIO, versitygw, Azurite, fake-gcs-server.

Each is installed by its own package manager at the first use, and kept in the folder
`$XDG_CACHE_HOME/hocket-test-servers` (`~/.cache` by default), by its version. MinIO's repository is archived,
so its version is fixed; versitygw is a maintained S3 server.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

import pytest

from support import leaks

INSTALL_TIMEOUT_S = 1800
START_TIMEOUT_S = 60
BUCKET = "hocket"
MINIO_DOMAIN = "minio.invalid"
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = base64.b64encode(b"a key of these tests alone").decode()
GO_MODULES = {
    "fake-gcs-server": "github.com/fsouza/fake-gcs-server@v1.56.1",
    "minio": "github.com/minio/minio@v0.0.0-20260212201848-7aac2a2c5b7c",
    "versitygw": "github.com/versity/versitygw/cmd/versitygw@v1.8.0",
}
AZURITE = "3.37.0"


class MissingToolError(RuntimeError):
    """The tool that installs a server is missing on this machine."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A running server."""

    endpoint: str
    root: str
    env: Mapping[str, str]

    def uri(self, prefix: str) -> str:
        """Return the URI of `prefix` in the server's bucket."""
        return f"{self.root}/{prefix}"


@pytest.fixture(scope="session")
def minio() -> Iterator[Remote]:
    """Start MinIO with an empty bucket, which has the virtual host `BUCKET.MINIO_DOMAIN`, too."""
    program = _installed("minio")
    keys = {"MINIO_ROOT_USER": "hocket", "MINIO_ROOT_PASSWORD": "hocket-secret"}
    settings = {"MINIO_DOMAIN": MINIO_DOMAIN, "MINIO_UPDATE": "off"}

    def command(folder: Path, port: int) -> list[str]:
        console = f"127.0.0.1:{_free_port()}"
        address = f"127.0.0.1:{port}"
        return [str(program), "server", str(folder), "--address", address, "--console-address", console]

    with _running(command, {**keys, **settings}) as endpoint:
        env = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": keys["MINIO_ROOT_USER"],
            "AWS_SECRET_ACCESS_KEY": keys["MINIO_ROOT_PASSWORD"],
            "AWS_REGION": "us-east-1",
        }
        _create_s3_bucket(env)
        yield Remote(endpoint, f"s3://{BUCKET}", env)


@pytest.fixture(scope="session")
def versitygw() -> Iterator[Remote]:
    """Start versitygw, a maintained S3 server that stores objects as files, with an empty bucket."""
    program = _installed("versitygw")
    keys = {"ROOT_ACCESS_KEY": "hocket", "ROOT_SECRET_KEY": "hocket-secret"}

    def command(folder: Path, port: int) -> list[str]:
        return [str(program), "--port", f"127.0.0.1:{port}", "--quiet", "posix", str(folder)]

    with _running(command, keys) as endpoint:
        env = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": keys["ROOT_ACCESS_KEY"],
            "AWS_SECRET_ACCESS_KEY": keys["ROOT_SECRET_KEY"],
            "AWS_REGION": "us-east-1",
        }
        _create_s3_bucket(env)
        yield Remote(endpoint, f"s3://{BUCKET}", env)


@pytest.fixture(scope="session")
def azurite() -> Iterator[Remote]:
    """Start Azurite's blob service with an empty container."""
    program = _installed("azurite")
    accounts = {"AZURITE_ACCOUNTS": f"{AZURITE_ACCOUNT}:{AZURITE_KEY}"}

    def command(folder: Path, port: int) -> list[str]:
        options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
        return [str(program), *options, "--silent", "--skipApiVersionCheck", "--disableTelemetry"]

    with _running(command, accounts) as server:
        endpoint = f"{server}/{AZURITE_ACCOUNT}"
        env = {
            "AZURE_STORAGE_ACCOUNT_NAME": AZURITE_ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": AZURITE_KEY,
            "AZURE_STORAGE_ENDPOINT": endpoint,
        }
        _create_container(endpoint)
        yield Remote(endpoint, f"az://{BUCKET}", env)


@pytest.fixture(scope="session")
def fake_gcs() -> Iterator[Remote]:
    """Start fake-gcs-server with an empty bucket; it supports only reads of the XML API that Hocket uses."""
    program = _installed("fake-gcs-server")

    def command(folder: Path, port: int) -> list[str]:
        address = ["-host", "127.0.0.1", "-port", str(port), "-public-host", f"127.0.0.1:{port}"]
        return [str(program), "-scheme", "http", "-backend", "memory", "-log-level", "error", *address]

    with _running(command, {}) as endpoint:
        _send("POST", f"{endpoint}/storage/v1/b", {"Content-Type": "application/json"}, {"name": BUCKET})
        yield Remote(endpoint, f"gs://{BUCKET}", {"STORAGE_EMULATOR_HOST": endpoint})


FIXTURES: dict[str, str] = {
    "minio": "minio",
    "versitygw": "versitygw",
    "azurite": "azurite",
    "fake_gcs": "fake-gcs-server",
}


def install(name: str) -> Path:
    """Install the server `name` if it is missing, and return its program; takes minutes the first time.

    Raises:
        MissingToolError: There is no Go, or no npm; the message says which to install.
        subprocess.CalledProcessError: The package manager failed; its output went to the terminal.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hocket-test-servers"
    if name == "azurite":
        # Only the blob service, because the others have fixed ports. The folder's name must differ from the
        # package's: npm would take the name for the folder, and install nothing.
        folder = cache / f"npm-{AZURITE}"
        program, tool = folder / "node_modules/.bin/azurite-blob", "npm"
        command = [
            "npm",
            "install",
            "--silent",
            "--no-fund",
            "--no-audit",
            "--prefix",
            str(folder),
            f"{name}@{AZURITE}",
        ]
    else:
        folder = cache / GO_MODULES[name].rpartition("@")[2]
        program, tool = folder / name, "go"
        command = ["go", "install", GO_MODULES[name]]
    if program.exists():
        return program
    if shutil.which(tool) is None:
        raise MissingToolError(f"`{tool}` was not found; install it, and the tests install {name} with it")
    folder.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "GOBIN": str(folder), "GOFLAGS": "-mod=mod"}
    subprocess.run(command, env=env, cwd=cache, timeout=INSTALL_TIMEOUT_S, check=True)
    return program


def _installed(name: str) -> Path:
    try:
        return install(name)
    except MissingToolError as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def _running(command: Callable[[Path, int], list[str]], env: Mapping[str, str]) -> Iterator[str]:
    """Run a server with a temporary folder; yield its address once it accepts connections."""
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="hocket-server-") as folder:
        log = Path(folder) / "log.txt"
        data = Path(folder) / "data"
        data.mkdir()
        with log.open("wb") as output:
            # In its own process group, so that Ctrl-C reaches only the tests, which then stop the server.
            process = subprocess.Popen(
                command(data, port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **env},
                process_group=0,
            )
        leaks.keep_process(process.pid)
        try:
            _wait(process, port, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            leaks.release_process(process.pid)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"{process.args!r} did not start:\n{log.read_text(errors='replace')[-4000:]}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _send(method: str, url: str, headers: Mapping[str, str], body: object = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=dict(headers), method=method)
    # Ignore the environment's proxies for loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as answer:
        content: bytes = answer.read()
        return content


def _create_s3_bucket(env: Mapping[str, str]) -> None:
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=env["AWS_ENDPOINT_URL"],
        aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
        region_name=env["AWS_REGION"],
        config=Config(proxies={}, retries={"total_max_attempts": 20}),
    )
    client.create_bucket(Bucket=BUCKET)
    client.close()


def _create_container(endpoint: str) -> None:
    """Create a container by a request that is signed with Azure's Shared Key scheme."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = [f"{name}:{value}" for name, value in sorted(headers.items())]
    resource = f"/{AZURITE_ACCOUNT}/{AZURITE_ACCOUNT}/{BUCKET}\nrestype:container"
    text = "\n".join(["PUT", *[""] * 11, *lines, resource])
    digest = hmac.new(base64.b64decode(AZURITE_KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {AZURITE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    _send("PUT", f"{endpoint}/{BUCKET}?restype=container", headers)

"""Each of AWS's sources of credentials is used by its own protocol, and renewed before keys expire."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.native.errors import StorePermissionError
from hocket.stream import MDSWriter, StreamingDataset
from support.identity import ACCOUNT, RELATIVE, ROLE, TOKEN, Identity, identities
from support.proxy import Authority
from support.s3d import Server

LIFE_S = 1.5
ARN = f"arn:aws:iam::{ACCOUNT}:role/{ROLE}"

# Runs in a new process, because keys are cached per process and botocore reads the home folder on import.
READER = """
import sys
from pathlib import Path
from hocket.native import Store

data, store = bytes(range(256)) * 1024, Store(sys.argv[1], part_bytes=1 << 16)
store.put("k", data)
while not Path(sys.argv[2]).exists():
    assert store.get("k") == data
"""


# Reads epochs of a data set from its store, each with an empty cache folder, until the file `done` exists.
EPOCHS = """
import sys, time
from itertools import count
from pathlib import Path
from hocket.stream import MDSWriter, StreamingDataset

uri, done, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[2]).parent
with MDSWriter(out=uri, columns={"id": "int"}, size_limit=100) as writer:
    for number in range(64):
        writer.write({"id": number})
for epoch in count():
    samples = StreamingDataset(remote=uri, local=folder / str(epoch), batch_size=4, prefetch_batches=1)
    for number, sample in enumerate(samples):
        assert sample["id"] == number
        time.sleep(0.005)
    assert number == 63
    if done.exists():
        break
"""


@pytest.fixture(scope="module")
def server(s3d: Server) -> Iterator[Server]:
    """Start a server that accepts keys until they expire."""
    from support import leaks

    with Server(mode="keys-expire") as server:
        leaks.keep_process(server.pid)
        yield server
    leaks.release_process(server.pid)


@pytest.fixture
def identity() -> Iterator[Identity]:
    with identities(LIFE_S) as identity:
        yield identity


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".aws/sso/cache").mkdir(parents=True)
    return tmp_path


def instance(identity: Identity, home: Path) -> dict[str, str]:
    return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"{identity.address}/", "AWS_EC2_METADATA_DISABLED": "false"}


def container(identity: Identity, home: Path) -> dict[str, str]:
    address = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{identity.address}/container"}
    return {**address, "AWS_CONTAINER_AUTHORIZATION_TOKEN": TOKEN}


def container_with_a_file(identity: Identity, home: Path) -> dict[str, str]:
    (home / "token").write_text(TOKEN)
    address = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{identity.address}/container"}
    return {**address, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(home / "token")}


def sso(identity: Identity, home: Path) -> dict[str, str]:
    """Set up a user who has logged in, whose token is in the cache."""
    session = "sso_region = eu-x-1\nsso_start_url = https://start.invalid\n"
    profile = f"sso_session = people\nsso_account_id = {ACCOUNT}\nsso_role_name = {ROLE}\nregion = eu-x-1\n"
    (home / ".aws/config").write_text(f"[profile person]\n{profile}[sso-session people]\n{session}")
    token = {"accessToken": TOKEN, "expiresAt": "2999-01-01T00:00:00Z", "startUrl": "https://start.invalid"}
    name = hashlib.sha1(b"people", usedforsecurity=False).hexdigest()
    (home / f".aws/sso/cache/{name}.json").write_text(json.dumps(token))
    return {"AWS_PROFILE": "person", "AWS_ENDPOINT_URL_SSO": identity.address}


def assumed_role(identity: Identity, home: Path) -> dict[str, str]:
    (home / ".aws/config").write_text(f"[profile job]\nrole_arn = {ARN}\nsource_profile = base\n")
    keys = "aws_access_key_id = base-key\naws_secret_access_key = base-secret\n"
    (home / ".aws/credentials").write_text(f"[base]\n{keys}")
    return {"AWS_PROFILE": "job", "AWS_ENDPOINT_URL_STS": identity.address}


def relative(identity: Identity, home: Path) -> dict[str, str]:
    """Set a relative address in a container's own network, which a proxy forwards."""
    proxies = {"HTTP_PROXY": identity.address, "NO_PROXY": "127.0.0.1"}
    return {"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": RELATIVE, **proxies}


def web_identity(identity: Identity, home: Path) -> dict[str, str]:
    """Set up a web identity in a profile, which boto3 reads."""
    (home / "token").write_text(TOKEN)
    profile = f"role_arn = {ARN}\nweb_identity_token_file = {home / 'token'}\n"
    (home / ".aws/config").write_text(f"[profile pod]\n{profile}")
    return {"AWS_PROFILE": "pod", "AWS_ENDPOINT_URL_STS": identity.address}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "way"),
    [
        (instance, "instance"),
        (container, "container"),
        (container_with_a_file, "container"),
        (relative, "relative"),
        (sso, "sso"),
        (assumed_role, "AssumeRole"),
        (web_identity, "AssumeRoleWithWebIdentity"),
    ],
)
def test_reading_continues_after_keys_expire(
    server: Server,
    identity: Identity,
    home: Path,
    source: Callable[[Identity, Path], dict[str, str]],
    way: str,
) -> None:
    run_until_renewed(READER, server, identity, home, source(identity, home))
    assert set(identity.given) == {way}
    assert identity.refused == []


@pytest.mark.slow
def test_reading_continues_with_a_web_identity_set_by_variables(
    server: Server, home: Path, authority: Authority
) -> None:
    """The native client requests keys itself, over TLS only, with the given certificate authority."""
    with identities(LIFE_S, authority=authority) as identity:
        (home / "token").write_text(TOKEN)
        variables = {"AWS_WEB_IDENTITY_TOKEN_FILE": str(home / "token"), "AWS_ROLE_ARN": ARN}
        address = identity.address.replace("http://", "https://")
        variables |= {"AWS_ENDPOINT_URL_STS": address, "AWS_CA_BUNDLE": str(authority.bundle)}
        run_until_renewed(READER, server, identity, home, variables)
        assert set(identity.given) == {"AssumeRoleWithWebIdentity"}
        assert identity.refused == []


@pytest.mark.slow
@pytest.mark.parametrize(("source", "way"), [(instance, "instance"), (container, "container")])
def test_epochs_continue_after_their_keys_expire(
    server: Server,
    identity: Identity,
    home: Path,
    source: Callable[[Identity, Path], dict[str, str]],
    way: str,
) -> None:
    """Renew keys that the store refuses before the expiry that boto3 reports."""
    run_until_renewed(EPOCHS, server, identity, home, source(identity, home))
    assert set(identity.given) == {way}
    assert identity.refused == []


@pytest.mark.parametrize("is_renewed", [True, False])
def test_keys_that_the_program_changes_in_its_environment_are_read_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_renewed: bool
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)

    def renew(life_s: float) -> float:
        until = time.time() + life_s
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"hocket-{int(until * 1000)}")
        return until

    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hocket-secret")
    renew(3600)
    uri = server.uri(tmp_path.name)
    with MDSWriter(out=uri, columns={"id": "int"}, size_limit=100) as writer:
        for number in range(64):
            writer.write({"id": number})
    until = renew(4.0)  # enough time to open both data sets and read the first batch
    options: dict[str, Any] = {"batch_size": 4, "prefetch_batches": 1, "fetch_threads": 1}
    dataset = StreamingDataset(remote=uri, local=tmp_path / "cache", prefetch_bytes=100, **options)
    other = StreamingDataset(remote=uri, local=tmp_path / "other", **options)
    samples = iter(dataset)
    first = [next(samples)["id"] for _ in range(4)]
    time.sleep(max(0, until - time.time()) + 0.1)
    if not is_renewed:
        with pytest.raises(StorePermissionError, match="ExpiredToken"):
            list(samples)
        with pytest.raises(StorePermissionError, match="ExpiredToken"):
            other[60]
        return
    renew(3600)
    assert first + [sample["id"] for sample in samples] == list(range(64))
    assert other[60]["id"] == 60


def run_until_renewed(
    script: str, server: Server, identity: Identity, home: Path, variables: dict[str, str]
) -> None:
    """Run a script that reads until its first keys have expired and it has renewed them twice."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    env |= {"HOME": str(home), "AWS_ENDPOINT_URL": server.endpoint, "AWS_REGION": "us-east-1"}
    env |= {"AWS_EC2_METADATA_DISABLED": "true", **variables}
    done = home / "done"
    command = [sys.executable, "-c", script, server.uri(home.name), str(done)]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as reader:
        try:
            deadline = time.monotonic() + 60
            while len(identity.given) < 3 or time.time() < identity.ends[0] + 0.2:
                if reader.poll() is not None or time.monotonic() > deadline:
                    break
                time.sleep(0.02)
            done.touch()
            _, said = reader.communicate(timeout=60)
        finally:
            reader.kill()
    assert (reader.returncode, said) == (0, "")
    assert len(identity.given) >= 3

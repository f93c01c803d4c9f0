"""Credentials that boto3 finds are used for requests and renewed before they expire."""

import multiprocessing
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest

from hocket.native import Store, counters, credentials, errors
from support.identity import Identity, identities
from support.s3d import Server

DATA = bytes(range(256)) * 4096
PART = 64 << 10
LIFE_S = 3.0

pytest.importorskip("boto3", reason="`boto3` is in the dependency group `test`: `uv sync --group test`")


@pytest.fixture
def server(s3d_faults: Callable[..., Server]) -> Server:
    return s3d_faults(mode="keys-expire")


@pytest.fixture
def profile(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets up an AWS profile with a credential process, without keys in variables."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)

    def write(
        *,
        key: str = "hocket",
        life_s: float = LIFE_S,
        lie_s: float | None = 0.0,  # added to the reported expiry; None: no expiry
        command: str = "",
    ) -> None:
        script = f"""
            import datetime, json, time
            with open({str(tmp_path / "asked")!r}, "a") as asked:
                asked.write("x")
            until, lie_s = time.time() + {life_s}, {lie_s}
            key = f"{key}-{{int(until * 1000)}}"
            keys = {{"Version": 1, "AccessKeyId": key, "SecretAccessKey": "hocket-secret"}}
            if lie_s is not None:
                moment = datetime.datetime.fromtimestamp(until + lie_s, datetime.timezone.utc)
                keys["Expiration"] = moment.isoformat()
            print(json.dumps(keys))
        """
        (tmp_path / "keys.py").write_text(textwrap.dedent(script))
        # Hocket caches keys by profile, so each test uses a profile of its own.
        name = tmp_path.name
        command = command or f"{sys.executable} {tmp_path / 'keys.py'}"
        (tmp_path / "config").write_text(
            f"[profile {name}]\nregion = eu-x-1\ncredential_process = {command}\n"
        )
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_PROFILE", name)

    return write


def asked(tmp_path: Path) -> int:
    """Return how often the profile's credential process has run."""
    return len((tmp_path / "asked").read_text())


def test_reads_continue_after_their_first_keys_expire(
    server: Server, profile: Callable[..., None], tmp_path: Path
) -> None:
    profile()
    store = Store(server.uri("p"), part_bytes=PART)
    store.put("k", DATA)
    deadline = time.monotonic() + 2.2 * LIFE_S
    reads = 0
    while time.monotonic() < deadline:
        assert store.get("k") == DATA
        reads += 1
    assert reads > 3
    assert asked(tmp_path) >= 3
    answers = server.stats()["answers"]
    assert set(answers) <= {"200", "206"}, answers
    assert store.counters()["retries"] == 0


def test_unused_keys_are_not_renewed_until_the_next_request(
    server: Server, profile: Callable[..., None], tmp_path: Path
) -> None:
    profile(life_s=2.0)
    store = Store(server.uri("p"))
    store.put("k", b"x")
    used = asked(tmp_path)  # once, unless the machine is so slow that the keys expire before their use
    time.sleep(5)
    assert asked(tmp_path) <= used + 2
    assert "hocket-credentials" not in {thread.name for thread in threading.enumerate()}
    assert store.get("k") == b"x"
    assert set(server.stats()["answers"]) == {"200", "206"}


def test_keys_that_end_before_their_reported_expiry_are_renewed(
    server: Server, profile: Callable[..., None], tmp_path: Path
) -> None:
    profile(life_s=1.0, lie_s=3600)
    store = Store(server.uri("p"), part_bytes=PART)
    store.put("k", DATA)
    while asked(tmp_path) < 3:
        assert store.get("k") == DATA
        assert store.head("k").size == len(DATA)
    assert store.counters()["retries"] > 0


@pytest.mark.parametrize("lie_s", [3600, None])
def test_expired_keys_are_renewed_once_and_then_raise(
    server: Server, profile: Callable[..., None], tmp_path: Path, lie_s: float | None
) -> None:
    profile(life_s=-60, lie_s=lie_s)
    with pytest.raises(errors.StorePermissionError, match="ExpiredToken"):
        Store(server.uri("p")).get("k")
    assert asked(tmp_path) == 2


def test_rotated_keys_without_an_expiry_are_read_again(
    server: Server, profile: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test rewrites `~/.aws/credentials`, as some daemons do; keys in this file have no expiry."""
    profile()
    name = tmp_path.name
    (tmp_path / "config").write_text(f"[profile {name}]\nregion = eu-x-1\n")
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))

    def rotate(life_s: float) -> float:
        until = time.time() + life_s
        key = f"hocket-{int(until * 1000)}"
        path.write_text(f"[{name}]\naws_access_key_id = {key}\naws_secret_access_key = hocket-secret\n")
        return until

    until = rotate(LIFE_S)
    store = Store(server.uri("p"), part_bytes=PART)
    store.put("k", DATA)
    for life_s in (LIFE_S, 3600):
        time.sleep(max(0, until - time.time()) + 0.1)
        until = rotate(life_s)
        assert store.get("k") == DATA
        assert store.head("k").size == len(DATA)
    path.write_text("")
    assert store.get("k") == DATA  # the cached keys are still valid


def test_renewable_keys_with_an_unreadable_expiry_count_as_short_lived(
    server: Server, profile: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test hides the expiry, as a botocore that renames the attribute would."""
    import boto3

    class Hidden:
        def __init__(self, source: Any) -> None:
            self.refresh_needed = source.refresh_needed
            self.get_frozen_credentials = source.get_frozen_credentials

    find = boto3.Session.get_credentials
    monkeypatch.setattr(boto3.Session, "get_credentials", lambda session: Hidden(find(session)))
    monkeypatch.setattr(credentials, "UNKNOWN_LIFE_S", 1.0)
    profile(life_s=LIFE_S, lie_s=3600)
    store = Store(server.uri("p"), part_bytes=PART)
    store.put("k", DATA)
    while asked(tmp_path) < 3:  # boto3 considers the keys valid, so renewing needs a new session
        assert store.get("k") == DATA
        assert store.head("k").size == len(DATA)
    assert any(thread.name == "hocket-credentials" for thread in threading.enumerate())


def instance_role(identity: Identity, monkeypatch: pytest.MonkeyPatch, server: Server) -> Store:
    """Return a store, as on a machine with an instance role and without boto3."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"{identity.address}/")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    return Store(server.uri("p"), part_bytes=PART)


def test_an_instance_role_needs_no_boto3(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with identities(LIFE_S) as identity:
        store = instance_role(identity, monkeypatch, server)
        store.put("k", DATA)
        deadline = time.monotonic() + 1.5 * LIFE_S
        while time.monotonic() < deadline:
            assert store.get("k") == DATA
        assert set(identity.given) == {"instance"}
        assert identity.refused == []
        assert set(server.stats()["answers"]) <= {"200", "206"}


def test_without_boto3_and_a_role_the_error_names_the_command(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with identities(-60) as identity:
        pass
    with pytest.raises(errors.StorePermissionError, match=r"hocket-native\[s3\].*returned no keys"):
        instance_role(identity, monkeypatch, server).get("k")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(errors.StorePermissionError, match=r"hocket-native\[s3\]'`, or set") as caught:
        Store(server.uri("q")).get("k")
    assert "metadata" not in str(caught.value)


def test_threads_share_one_search_for_keys(
    server: Server, profile: Callable[..., None], tmp_path: Path
) -> None:
    profile(life_s=3600)
    stores = [Store(server.uri(f"p{index}")) for index in range(6)]
    threads = [threading.Thread(target=store.put, args=("k", b"x")) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [store.get("k") for store in stores] == [b"x"] * 6
    assert asked(tmp_path) == 1


def stop_helpers() -> None:
    """End multiprocessing's helpers: a fork server keeps the environment of the test that started it."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_child_processes_find_their_own_keys(
    server: Server, profile: Callable[..., None], tmp_path: Path, method: str
) -> None:
    profile(life_s=3600)
    store = Store(server.uri("p"))
    store.put("k", DATA)
    stop_helpers()
    context = multiprocessing.get_context(method)
    child = context.Process(target=Store.download, args=(store, "k", tmp_path / "copy"))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    child.close()
    assert (tmp_path / "copy").read_bytes() == DATA
    assert asked(tmp_path) == 2
    stop_helpers()


def test_wrong_keys_raise_without_showing_their_secret(server: Server, profile: Callable[..., None]) -> None:
    profile(key="stranger", life_s=3600)
    with pytest.raises(errors.StorePermissionError, match="InvalidAccessKeyId") as caught:
        Store(server.uri("p")).get("k")
    assert "hocket-secret" not in str(caught.value)
    assert "AWS_PROFILE" in str(caught.value)


def test_a_missing_profile_is_named(
    server: Server, profile: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile()
    monkeypatch.setenv("AWS_PROFILE", "nobody-has-this")
    before = counters()["requests"]
    for _ in range(2):  # the second request searches again
        with pytest.raises(errors.StorePermissionError, match="nobody-has-this"):
            Store(server.uri("p")).get("k")
    assert counters()["requests"] == before


def test_after_a_failed_thread_start_the_next_request_tries_again(
    server: Server, profile: Callable[..., None]
) -> None:
    profile(life_s=3600)
    store = Store(server.uri("p"))
    usual = threading.stack_size(1 << 48)  # larger than the address space, so no thread starts
    try:
        with pytest.raises(errors.StorePermissionError, match="can't start new thread"):
            store.put("k", b"x")
    finally:
        threading.stack_size(usual)
    store.put("k", b"x")


def test_the_output_of_a_failed_credential_process_is_not_shown(
    server: Server, profile: Callable[..., None]
) -> None:
    profile(command=f"{sys.executable} -c 'import sys; sys.exit(\"top-secret\")'")
    with pytest.raises(errors.StorePermissionError, match="CredentialRetrievalError") as caught:
        Store(server.uri("p")).get("k")
    assert "top-secret" not in str(caught.value)


def test_without_boto3_the_error_names_the_command(
    server: Server, profile: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile(life_s=3600)
    monkeypatch.setitem(sys.modules, "boto3", None)  # makes `import boto3` fail
    with pytest.raises(errors.StorePermissionError, match=r"pip install 'hocket-native\[s3\]'"):
        Store(server.uri("p")).put("k", b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"hocket-{int((time.time() + 60) * 1000)}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hocket-secret")
    store = Store(server.uri("p"))
    store.put("k", b"x")
    assert store.get("k") == b"x"

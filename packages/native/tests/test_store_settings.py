"""Settings from variables: each is checked where it is read, and a bad one is named."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hocket.native import Store, errors
from support.proxy import Proxy, serving
from support.s3d import Server

KEYS = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "secret"}
WEB = {"AWS_ROLE_ARN": "arn", "AWS_WEB_IDENTITY_TOKEN_FILE": "/etc/hostname"}
CONTAINER = {
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:9",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "/etc/passwd",
}
AZURE_CLIENT = {
    "AZURE_STORAGE_ACCOUNT_NAME": "a",
    "AZURE_CLIENT_ID": "i",
    "AZURE_CLIENT_SECRET": "secret",
    "AZURE_TENANT_ID": "t",
}


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove all variables about stores and proxies from the environment."""
    for name in list(os.environ):
        is_proxy = name.lower().endswith("_proxy")
        if is_proxy or name.startswith(("AWS_", "S3_", "GOOGLE_", "AZURE_", "STORAGE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (
            "AWS_ENDPOINT_URL",
            "127.0.0.1:9555",
            "expected `http://127.0.0.1:9555` or `https://127.0.0.1:9555`",
        ),
        ("AWS_ENDPOINT_URL", "minio.local", "expected `http://minio.local` or"),
        ("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9\n", "an address such as"),
        ("S3_ENDPOINT_URL", "http://127.0.0.1:99999", "an address such as"),
        ("AWS_ENDPOINT", "http://", "an address such as"),
        ("AWS_ENDPOINT_URL", "http:/127.0.0.1", "an address such as"),
        ("AWS_ENDPOINT_URL", "s3://bucket", "an address such as"),
        ("AWS_ENDPOINT_URL", "http://me:password@127.0.0.1:9", "without a login"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9?a=b", "an address such as"),
        ("AWS_ACCESS_KEY_ID", "AKIA\n", "a line break as character 5 of 5"),
        ("AWS_SECRET_ACCESS_KEY", "se\rcret", "a line break as character 3 of 7"),
        ("AWS_SESSION_TOKEN", "tökén", "'ö' as character 2 of 5"),
        ("AWS_REGION", "us-east-1\n", "the name of a region, such as `us-east-1`"),
        ("AWS_ACCESS_KEY_ID", "\u200bAKIA", "as character 1 of 5"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9/`x`", "an address such as"),
        ("AWS_REGION", "eu west/1", "the name of a region, such as `us-east-1`"),
        ("AWS_SESSION_TOKEN", "t\udcff", "is not UTF-8; expected text"),
        ("HTTP_PROXY", "http://127.0.0.1:9\udcff", "is not UTF-8; expected text"),
        ("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "maybe", 'is "maybe"; expected `true` or `false`'),
        ("AWS_TIMEOUT", "soon", 'failed to parse "soon" as Duration'),
        ("AWS_CHECKSUM_ALGORITHM", "md5", '"md5" is not a valid checksum algorithm'),
    ],
)
def test_a_bad_setting_of_s3_is_named(
    clean: pytest.MonkeyPatch, name: str, value: str, expected: str
) -> None:
    for variable, given in {**KEYS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", name: value}.items():
        clean.setenv(variable, given)
    if name in ("S3_ENDPOINT_URL", "AWS_ENDPOINT"):
        clean.delenv("AWS_ENDPOINT_URL")
    with pytest.raises(errors.StoreConfigError) as raised:
        Store("s3://bucket", deadline_s=3, max_retries=0).list()
    message = str(raised.value)
    assert f"`{name}`" in message
    assert expected in message
    assert "password" not in message
    assert "cret" not in message


@pytest.mark.parametrize(
    ("uri", "variables", "name"),
    [
        ("gs://bucket", {"STORAGE_EMULATOR_HOST": "127.0.0.1:port"}, "STORAGE_EMULATOR_HOST"),
        (
            "gs://bucket",
            {"GOOGLE_BASE_URL": "127.0.0.1:9", "GOOGLE_SKIP_SIGNATURE": "true"},
            "GOOGLE_BASE_URL",
        ),
        (
            "az://container",
            {
                "AZURE_STORAGE_ACCOUNT_NAME": "a",
                "AZURE_STORAGE_ACCOUNT_KEY": "a2V5",
                "AZURE_STORAGE_ENDPOINT": "127.0.0.1:9",
            },
            "AZURE_STORAGE_ENDPOINT",
        ),
        (
            "az://container",
            {"AZURE_STORAGE_ACCOUNT_NAME": "a\n", "AZURE_STORAGE_ACCOUNT_KEY": "a2V5"},
            "AZURE_STORAGE_ACCOUNT_NAME",
        ),
        (
            "az://container",
            {"AZURE_STORAGE_CONNECTION_STRING": "AccountName=a;AccountKey=a2V5;BlobEndpoint=h:9"},
            "AZURE_STORAGE_ENDPOINT",
        ),
        (
            "az://container",
            {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "%secret"},
            "AZURE_STORAGE_ACCOUNT_KEY",
        ),
        ("az://container", {**AZURE_CLIENT, "AZURE_AUTHORITY_HOST": "h:9"}, "AZURE_AUTHORITY_HOST"),
        (
            "az://container",
            {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_MSI_ENDPOINT": "127.0.0.1:9"},
            "AZURE_MSI_ENDPOINT",
        ),
        (
            "az://container",
            {**AZURE_CLIENT, "AZURE_CLIENT_SECRET": "", "AZURE_FEDERATED_TOKEN_FILE": "/nowhere"},
            "AZURE_FEDERATED_TOKEN_FILE",
        ),
        ("oci://b@space", {**KEYS, "OCI_REGION": "a b"}, "OCI_REGION"),
        ("s3://bucket", {**WEB, "AWS_ENDPOINT_URL_STS": "127.0.0.1:9"}, "AWS_ENDPOINT_URL_STS"),
        (
            "s3://bucket",
            {**WEB, "AWS_WEB_IDENTITY_TOKEN_FILE": "/nowhere"},
            "AWS_WEB_IDENTITY_TOKEN_FILE",
        ),
        (
            "s3://bucket",
            {**WEB, "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "a b"},
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        ),
        # A file with line breaks, none of which a header can carry.
        ("s3://bucket", CONTAINER, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
        (
            "s3://bucket",
            {**CONTAINER, "AWS_CONTAINER_CREDENTIALS_FULL_URI": "foo bar"},
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        ),
        ("gs://bucket", {"STORAGE_EMULATOR_HOST": "127.0.0.1:9\udcff"}, "STORAGE_EMULATOR_HOST"),
        ("gs://bucket", {"GOOGLE_BEARER_TOKEN": "secret\n"}, "GOOGLE_BEARER_TOKEN"),
        (
            "gs://bucket",
            {"GOOGLE_APPLICATION_CREDENTIALS": "/etc/hostname"},
            "GOOGLE_APPLICATION_CREDENTIALS",
        ),
        ("s3://bucket", {**KEYS, "HTTPS_PROXY": "ftp://proxy"}, "HTTPS_PROXY"),
        ("http://127.0.0.1:9/x", {"http_proxy": "http://me:secret@"}, "http_proxy"),
    ],
)
def test_a_bad_setting_of_another_service_is_named(
    clean: pytest.MonkeyPatch,
    uri: str,
    variables: dict[str, str],
    name: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for variable, given in variables.items():
        clean.setenv(variable, given)
    with pytest.raises(errors.StoreConfigError, match=f"`{name}`") as raised:
        Store(uri, deadline_s=3, max_retries=0).get("k")
    assert "secret" not in str(raised.value)
    assert capfd.readouterr().err == ""


def test_settings_that_fit_into_no_request_are_an_error_and_no_panic(
    clean: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    account = {
        "private_key": "secret",
        "client_email": "a",
        "private_key_id": "k",
        "gcs_base_url": "127.0.0.1:9",
        "disable_oauth": True,
    }
    (tmp_path / "account.json").write_text(json.dumps(account))
    clean.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    with pytest.raises(
        errors.StoreConfigError, match=r"no request can be made.*`GOOGLE_SERVICE_ACCOUNT`"
    ) as raised:
        Store("gs://bucket", deadline_s=3, max_retries=0).list()
    assert "secret" not in str(raised.value)
    assert capfd.readouterr().err == ""


def test_the_endpoint_of_a_profile_is_checked(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("[default]\nendpoint_url = 127.0.0.1:9\n")
    for variable, given in {**KEYS, "AWS_CONFIG_FILE": str(tmp_path / "config")}.items():
        clean.setenv(variable, given)
    with pytest.raises(errors.StoreConfigError, match=r"`endpoint_url` is \"127.0.0.1:9\""):
        Store("s3://bucket", deadline_s=3).list()


def test_a_proxy_that_fails_is_named_without_its_login(s3d: Server, clean: pytest.MonkeyPatch) -> None:
    for variable, given in s3d.env.items():
        clean.setenv(variable, given)
    clean.setenv("HTTP_PROXY", "http://me:secret@127.0.0.1:9")
    store = Store(s3d.uri("proxied"), deadline_s=3, max_retries=0)
    with pytest.raises(errors.StoreError, match=r"the proxy `http://127.0.0.1:9` \(`HTTP_PROXY`\)") as error:
        store.list()
    assert "secret" not in str(error.value)
    # Over TLS, too, where the client asks the proxy for a tunnel.
    clean.setenv("HTTPS_PROXY", "127.0.0.1:9")
    store = Store(s3d.uri("proxied"), endpoint="https://127.0.0.1:8", deadline_s=3, max_retries=0)
    with pytest.raises(errors.StoreError, match=r"the proxy `http://127.0.0.1:9` \(`HTTPS_PROXY`\)"):
        store.list()


@pytest.mark.parametrize("everywhere", ["*", " * ", "localhost,*"])
def test_no_proxy_of_every_host_holds_for_addresses_too(
    s3d: Server, clean: pytest.MonkeyPatch, everywhere: str
) -> None:
    proxy = Proxy(s3d.endpoint)
    with serving(proxy):
        for variable, given in {**s3d.env, "HTTP_PROXY": proxy.address, "no_proxy": everywhere}.items():
            clean.setenv(variable, given)
        assert s3d.endpoint.startswith("http://127.0.0.1:")
        store = Store(s3d.uri("direct"))
        store.put("k", b"x")
        assert store.get("k") == b"x"
        assert proxy.seen == []


#: A process that reads with as many more threads as it is told. The superuser has no such limit, so it
#: becomes a user that runs nothing else.
FEW = """
import os, resource, sys, threading
from hocket.native import Store
if os.getuid() == 0:
    os.setgroups([])
    os.setresgid(54321, 54321, 54321)
    os.setresuid(54321, 54321, 54321)
tasks = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in os.listdir("/proc")
            if pid.isdigit() and os.stat(f"/proc/{pid}").st_uid == os.getuid())
most = tasks + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
store = Store(sys.argv[2])
print(store.get("k").decode())
assert [meta.key for meta in store.list()] == ["k"]
"""


@pytest.mark.parametrize("spare", [0, 1, 2, 4])
def test_few_threads_are_enough_and_none_is_an_error_that_names_the_limit(spare: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        Path(folder, "k").write_text("read")
        run = subprocess.run(
            [sys.executable, "-c", FEW, str(spare), folder], capture_output=True, text=True, timeout=60
        )
    if spare < 2:
        assert run.returncode == 1
        assert "expected at least 2 for I/O. Raise the limit of processes: `ulimit -u`" in run.stderr
        assert "panicked" not in run.stderr
    else:
        assert (run.returncode, run.stdout) == (0, "read\n"), run.stderr


#: A process that may open no more files than it has.
FULL = """
import os, resource, sys
from hocket.native import Store
store = Store(sys.argv[1])
store.get("k")
most = max(int(number) for number in os.listdir("/proc/self/fd"))
files = [open(os.devnull) for _ in range(most)]  # none is free below the last one
resource.setrlimit(resource.RLIMIT_NOFILE, (files[-1].fileno() + 1,) * 2)
store.get("k")
"""


def test_too_many_open_files_are_an_error_that_names_the_limit(tmp_path: Path) -> None:
    (tmp_path / "k").write_text("read")
    run = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "Too many open files" in run.stderr
    assert "raise the limit of open files (`ulimit -n`)" in run.stderr

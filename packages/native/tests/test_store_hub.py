"""Repositories of a hub of Hugging Face as stores, on a local server of its API."""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hocket.native import Store, errors
from support.hub import Hub, git_hash, uri

DATA = bytes(range(256)) * 4096
NAME = "datasets/owner/name"
README = b"# data\n"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Run a hub with one data set, and no token."""
    with Hub() as hub:
        for name, value in hub.clean_env(tmp_path).items():
            monkeypatch.setenv(name, value)
        files = {
            "README.md": README,
            "data/large.parquet": DATA,
            "data/a b#%?.txt": b"text",
            "empty.txt": b"",
        }
        hub.repository(NAME).commit(files)
        yield hub


def open_store(path: str = "", **options: object) -> Store:
    settings = {"backoff_ms": (1, 5), "deadline_s": 20.0} | options
    return Store(uri(NAME, path), **settings)  # type: ignore[arg-type]


def test_files_are_listed_with_their_sizes_and_tags_page_by_page(hub: Hub) -> None:
    hub.page_size = 2
    listed = open_store().list()
    assert [(meta.key, meta.size) for meta in listed] == [
        ("README.md", 7),
        ("data/a b#%?.txt", 4),
        ("data/large.parquet", len(DATA)),
        ("empty.txt", 0),
    ]
    assert listed[0].etag == f'"{git_hash(README)}"'
    assert [open_store().head(meta.key) for meta in listed] == listed
    dirs, files = open_store().list_dirs()
    assert (dirs, [meta.key for meta in files]) == (["data"], ["README.md", "empty.txt"])
    assert [meta.key for meta in open_store("data").list()] == ["a b#%?.txt", "large.parquet"]
    assert open_store().list("nowhere") == []
    assert not any(target.partition("?")[0].endswith("/") for _, target, _ in hub.seen)


def test_no_page_of_a_listing_is_left_out_in_silence(hub: Hub) -> None:
    hub.page_size = 1
    expected = [meta.key for meta in open_store().list()]
    hub.next_link = '<http://a/?x=1,2>; rel="first", <{}&x=1,2>; rel=next'
    assert [meta.key for meta in open_store().list()] == expected
    hub.next_link = '</next?page=2>; rel="next"'
    with pytest.raises(errors.StoreIOError, match="has a next page without a `cursor`"):
        open_store().list()
    hub.next_link = '<?cursor=99>; rel="next"'
    with pytest.raises(errors.StoreNotFoundError):
        open_store().list()


def test_files_are_read_whole_and_in_ranges(hub: Hub, tmp_path: Path) -> None:
    store = open_store(part_bytes=64 << 10)
    assert store.get("README.md") == README
    assert store.get("data/a b#%?.txt") == b"text"
    assert store.get("empty.txt") == b""
    assert store.get("data/large.parquet") == DATA
    assert store.get("data/large.parquet", start=5, end=70_000) == DATA[5:70_000]
    store.download("data/large.parquet", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == DATA
    with pytest.raises(errors.StoreIOError, match="does not lie within"):
        store.get("data/large.parquet", start=0, end=len(DATA) + 1)


def test_a_hub_that_ignores_ranges_of_small_files_is_read_all_the_same(hub: Hub) -> None:
    hub.ignores_ranges = True
    store = open_store()
    assert store.get("README.md", start=2, end=5) == b"dat"
    assert (store.get("README.md"), store.get("empty.txt")) == (README, b"")


def test_another_range_than_the_one_asked_for_is_refused(hub: Hub) -> None:
    hub.range_shift = 3
    with pytest.raises(errors.StoreTransientError, match="another range than the request"):
        open_store(max_retries=1).get("data/large.parquet", start=256, end=300)
    hub.range_shift = 0
    assert open_store().get("data/large.parquet", start=256, end=300) == DATA[256:300]


def test_the_address_of_a_large_file_is_asked_for_once_and_again_when_it_has_expired(hub: Hub) -> None:
    store = open_store(part_bytes=64 << 10)
    store.get("data/large.parquet", start=0, end=9)
    before = len(hub.seen)
    assert store.get("data/large.parquet") == DATA
    assert len(hub.seen) == before
    hub.expire_links()
    assert store.get("data/large.parquet", start=9, end=99) == DATA[9:99]
    assert len(hub.seen) == before + 1


def test_the_token_goes_to_the_hub_and_never_to_the_storage(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_member")
    hub.repository(NAME).is_private = True
    store = open_store()
    assert store.get("data/large.parquet") == DATA
    assert store.head("data/large.parquet").size == len(DATA)
    assert {headers["authorization"] for *_, headers in hub.seen} == {"Bearer hf_member"}
    assert hub.stored
    assert all("authorization" not in headers for *_, headers in hub.stored)
    assert b"hf_member" not in pickle.dumps(store)


def test_a_token_is_found_where_a_login_puts_it(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.repository(NAME).is_private = True
    with pytest.raises(errors.StorePermissionError, match="no token was sent: set `HF_TOKEN`"):
        open_store().get("README.md")
    (tmp_path / "token").write_text("hf_member\n")
    assert open_store().get("README.md") == README
    with pytest.raises(errors.StorePermissionError):
        open_store(anonymous=True).get("README.md")
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    with pytest.raises(errors.StorePermissionError):
        open_store().get("README.md")


def test_all_reads_are_of_the_commit_of_the_first_one(hub: Hub) -> None:
    store, repository = open_store(), hub.repository(NAME)
    first = repository.refs["main"]
    assert store.get("README.md") == README
    second = repository.commit({"README.md": b"new", "more.txt": b"more"})
    assert store.get("README.md") == README
    assert [meta.key for meta in store.list() if meta.key == "more.txt"] == []
    assert store.pinned_uri() == uri(NAME, revision=second)
    assert Store(uri(NAME, revision=second)).get("README.md") == b"new"
    assert Store(uri(NAME, revision=first)).get("README.md") == README
    assert open_store("data").pinned_uri() == uri(NAME, "data", revision=second)


def test_revisions_with_slashes_are_found(hub: Hub) -> None:
    repository = hub.repository(NAME)
    repository.commit({"README.md": b"pr"}, branch="refs/pr/1")
    repository.commit({"README.md": b"branch"}, branch="a/b")
    assert Store("hf://datasets/owner/name@refs/pr/1").get("README.md") == b"pr"
    assert Store("hf://datasets/owner/name@a%2Fb").get("README.md") == b"branch"


def test_a_renamed_repository_is_followed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_member")
    hub.moved["datasets/old/name"] = NAME
    store = Store("hf://datasets/old/name")
    assert store.get("data/large.parquet") == DATA
    assert [meta.key for meta in store.list("data")] == ["data/a b#%?.txt", "data/large.parquet"]


def test_models_need_no_kind(hub: Hub) -> None:
    hub.repository("models/owner/model").commit({"config.json": b"{}"})
    assert Store("hf://owner/model").get("config.json") == b"{}"
    assert Store("hf://models/owner/model").uri == "hf://owner/model"


@pytest.mark.parametrize(
    ("prepare", "place", "error", "words"),
    [
        ("private", "", errors.StoreNotFoundError, "does not exist, or is private"),
        ("gated", "", errors.StorePermissionError, "gated; ask for access at http://"),
        ("", "hf://datasets/owner/name@nowhere", errors.StoreNotFoundError, "no revision `nowhere`"),
        ("", "hf://datasets/owner/absent", errors.StoreNotFoundError, "datasets/owner/absent does not exist"),
        ("", "hf://owner/name", errors.StoreNotFoundError, "its kind"),
        ("no token", "hf://owner/name", errors.StorePermissionError, "its kind .* no token was sent"),
        ("wrong", "", errors.StorePermissionError, "refuses the token"),
    ],
)
def test_each_refusal_has_its_message(
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    prepare: str,
    place: str,
    error: type[Exception],
    words: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", {"wrong": "hf_wrong", "no token": ""}.get(prepare, "hf_member"))
    repository = hub.repository(NAME)
    if prepare == "private":
        hub.repositories["datasets/owner/hidden"] = hub.repositories.pop(NAME)
    repository.is_gated = prepare == "gated"
    with pytest.raises(error, match=words) as caught:
        Store(place or uri(NAME)).get("README.md")
    assert "hf_" not in str(caught.value)
    assert len(hub.seen) <= 2


def test_a_missing_file_is_not_a_missing_repository(hub: Hub) -> None:
    with pytest.raises(errors.StoreNotFoundError, match=r"name/absent.txt` does not exist"):
        open_store().get("absent.txt")


@pytest.mark.parametrize("header", ["Retry-After", "RateLimit"])
def test_a_rate_limit_is_waited_for_as_long_as_the_hub_asks(hub: Hub, header: str) -> None:
    value = "1" if header == "Retry-After" else '"api";r=0;t=1'
    hub.limits.append(("/resolve/", {header: value}))
    start = time.monotonic()
    assert open_store().get("README.md") == README
    assert time.monotonic() - start >= 1


def test_a_rate_limit_beyond_the_deadline_is_an_error_at_once(hub: Hub) -> None:
    hub.limits.append(("/resolve/", {"Retry-After": "3600"}))
    start = time.monotonic()
    with pytest.raises(errors.StoreTransientError, match="HTTP 429; the server asks for a pause of 3600 s"):
        open_store().get("README.md")
    assert time.monotonic() - start < 10


def test_a_repository_is_not_written(hub: Hub) -> None:
    store = open_store()
    for call in (lambda: store.put("x", b""), lambda: store.delete("README.md")):
        with pytest.raises(errors.StoreConfigError, match="a repository of a hub is read here"):
            call()


def test_requests_are_refused_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(errors.StorePermissionError, match="`HF_HUB_OFFLINE` is set"):
        open_store().get("README.md")
    assert hub.seen == []


def test_a_server_that_is_no_hub_is_named(hub: Hub) -> None:
    repository = hub.repository(NAME)
    repository.refs["main"] = "no commit"
    repository.commits["no commit"] = {}
    with pytest.raises(errors.StoreIOError, match=r"names the commit .* check `HF_ENDPOINT`"):
        open_store().get("README.md")
    assert len(hub.seen) == 1


@pytest.mark.parametrize("revision", [None, "0" * 40])
def test_a_server_without_the_api_is_no_empty_repository(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"{hub.endpoint}/elsewhere")
    with pytest.raises(errors.StoreIOError, match=r"HTTP 404 .* no response of a hub; check `HF_ENDPOINT`"):
        Store(uri(NAME, "data", revision=revision)).list()


def test_redirects_that_do_not_end_are_named(hub: Hub) -> None:
    hub.moved[NAME] = NAME
    with pytest.raises(errors.StoreIOError, match="more than 5 redirects; check `HF_ENDPOINT`"):
        open_store().get("README.md")


CLIENT = """
import tempfile
from pathlib import Path
from huggingface_hub import HfApi, HfFileSystem, hf_hub_download, snapshot_download
from huggingface_hub import errors

name = "owner/name"
files = HfFileSystem()
with files.open("hf://datasets/owner/name/data/large.parquet", "rb") as file:
    file.seek(100)
    print(list(file.read(3)))
print(files.glob("datasets/owner/name/**/*.parquet"))
with tempfile.TemporaryDirectory() as folder:
    copy = snapshot_download(name, repo_type="dataset", local_dir=folder)
    data = (Path(copy) / "data/large.parquet").read_bytes()
    print(data == bytes(range(256)) * 4096, (Path(copy) / "README.md").read_text())
for call in (
    lambda: HfApi().dataset_info("owner/absent"),
    lambda: HfApi().dataset_info(name, revision="nowhere"),
    lambda: hf_hub_download(name, "absent.txt", repo_type="dataset"),
    lambda: hf_hub_download("owner/gated", "a.txt", repo_type="dataset"),
):
    try:
        call()
    except errors.HfHubHTTPError as error:
        print(type(error).__name__)
"""


def test_the_server_of_these_tests_is_one_for_the_hubs_own_client(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    gated = hub.repository("datasets/owner/gated")
    gated.commit({"a.txt": b"x"})
    gated.is_gated = True
    hub.page_size = 2
    env = os.environ | hub.clean_env(tmp_path) | {"HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", CLIENT]
    done = subprocess.run(command, env=env, timeout=120, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "[100, 101, 102]",
        "['datasets/owner/name/data/large.parquet']",
        "True # data",
        "",
        "RepositoryNotFoundError",
        "RevisionNotFoundError",
        "RemoteEntryNotFoundError",
        "GatedRepoError",
    ], done.stderr

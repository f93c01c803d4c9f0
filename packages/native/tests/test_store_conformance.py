"""Every `Store` method behaves the same for local files, memory and each object-store service."""

import array
import os
import pickle
import threading
import time
import uuid
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.native import ObjectMeta, Store, errors
from support.s3d import Server
from support.servers import Remote

PART = 64 << 10


OTHERS = [pytest.param(name, marks=pytest.mark.stores) for name in ("minio", "azurite")]


@pytest.fixture(params=["local", "memory", "s3d", "gcs", *OTHERS])
def store(
    request: pytest.FixtureRequest, s3d: Server, gcs: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Store:
    prefix = uuid.uuid4().hex
    if request.param == "local":
        uri = str(tmp_path / "root")
    elif request.param == "memory":
        uri = f"memory://{prefix}/p"
    else:
        server: Server | Remote = request.getfixturevalue(request.param)
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        uri = server.uri(prefix)
    return Store(uri, part_bytes=PART, max_retries=2)


def test_put_get_head_delete(store: Store) -> None:
    etag = store.put("a/b.bin", b"hello")
    assert store.get("a/b.bin") == b"hello"
    meta = store.head("a/b.bin")
    assert (meta.key, meta.size, meta.etag) == ("a/b.bin", 5, etag)
    assert abs(meta.modified_ms / 1000 - time.time()) < 60
    store.put("a/b.bin", b"other")
    assert store.get("a/b.bin") == b"other"
    assert store.head("a/b.bin").etag != etag
    store.delete("a/b.bin")
    store.delete("a/b.bin")
    with pytest.raises(errors.StoreNotFoundError, match=r"a/b\.bin"):
        store.get("a/b.bin")
    with pytest.raises(FileNotFoundError, match=r"a/b\.bin"):
        store.head("a/b.bin")


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 5 * PART + 17])
def test_objects_of_every_size_round_trip(store: Store, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    store.put("k", data)
    assert store.get("k") == data
    meta = store.download("k", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data
    assert meta == store.head("k")
    assert meta.size == size
    uploaded = store.upload("again", tmp_path / "copy")
    assert (uploaded.key, uploaded.size, uploaded.etag) == ("again", size, store.head("again").etag)
    assert store.get("again") == data


def test_an_upload_in_parts_round_trips_and_replaces(store: Store, tmp_path: Path) -> None:
    data = os.urandom((17 << 20) + 3)  # three parts
    (tmp_path / "source").write_bytes(data)
    for _ in range(2):  # the second upload replaces the first
        meta = store.upload("k", tmp_path / "source")
        assert (meta.size, meta.etag) == (len(data), store.head("k").etag)
    store.download("k", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data


def test_a_download_replaces_a_longer_file(store: Store, tmp_path: Path) -> None:
    store.put("k", b"short")
    (tmp_path / "copy").write_bytes(b"x" * 100)
    store.download("k", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"short"


def test_ranges_are_read_and_invalid_ones_raise(store: Store) -> None:
    data = os.urandom(3 * PART + 5)
    store.put("k", data)
    size = len(data)
    for start, end in [(0, 1), (5, 5), (0, size), (PART - 1, 2 * PART + 1), (size - 1, size), (size, size)]:
        assert store.get("k", start=start, end=end) == data[start:end]
    assert store.get("k", start=size - 7) == data[-7:]
    assert store.get("k", end=7) == data[:7]
    for start, end in [(0, size + 1), (size, size + 1), (size + 5, size + 9)]:
        with pytest.raises(errors.StoreIOError, match=f"{start}..{end}"):
            store.get("k", start=start, end=end)
    with pytest.raises(errors.StoreConfigError, match="ends before it starts"):
        store.get("k", start=5, end=4)
    with pytest.raises(errors.StoreNotFoundError):
        store.get("missing", start=3, end=3)


def test_put_if_absent_raises_if_the_object_exists(store: Store) -> None:
    store.put("commit", b"first", if_absent=True)
    with pytest.raises(errors.StoreExistsError, match="commit"):
        store.put("commit", b"second", if_absent=True)
    assert store.get("commit") == b"first"
    assert [meta.key for meta in store.list()] == ["commit"]


def test_put_if_match_raises_if_the_object_has_changed(store: Store) -> None:
    first = store.put("k", b"one")
    second = store.put("k", b"two", if_match=first)
    assert second != first
    with pytest.raises(errors.StoreChangedError) as caught:
        store.put("k", b"three", if_match=first)
    assert str(first) in str(caught.value)
    assert str(second) in str(caught.value)
    assert store.get("k") == b"two"
    with pytest.raises(errors.StoreChangedError):
        store.put("missing", b"x", if_match=first)
    with pytest.raises(TypeError, match="not both"):
        store.put("k", b"x", if_absent=True, if_match=first)


def test_one_of_many_racing_creators_wins(store: Store) -> None:
    outcomes: list[str] = []

    def create(name: str) -> None:
        try:
            store.put("race", name.encode(), if_absent=True)
            outcomes.append(name)
        except errors.StoreExistsError:
            pass

    threads = [threading.Thread(target=create, args=(f"writer-{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(outcomes) == 1
    assert store.get("race") == outcomes[0].encode()


def test_one_of_many_racing_replacements_wins(store: Store) -> None:
    seen = store.put("race", b"before")
    outcomes: list[str] = []

    def replace(name: str) -> None:
        try:
            store.put("race", name.encode(), if_match=seen)
            outcomes.append(name)
        except errors.StoreChangedError:
            pass

    threads = [threading.Thread(target=replace, args=(f"writer-{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(outcomes) == 1
    assert store.get("race") == outcomes[0].encode()


def test_list_and_list_dirs(store: Store) -> None:
    assert store.list() == []
    assert store.list_dirs("nothing/here") == ([], [])
    for key in ["a/1", "a/b/2", "ab/3", "top", "ä é/100%/#1 ~x=+&"]:
        store.put(key, key.encode())
    assert [meta.key for meta in store.list()] == ["a/1", "a/b/2", "ab/3", "top", "ä é/100%/#1 ~x=+&"]
    assert [meta.key for meta in store.list("a")] == ["a/1", "a/b/2"]
    assert store.list("a/") == store.list("a")
    assert store.list("top") == []
    dirs, objects = store.list_dirs()
    assert (dirs, [meta.key for meta in objects]) == (["a", "ab", "ä é"], ["top"])
    dirs, objects = store.list_dirs("a")
    assert (dirs, [meta.key for meta in objects]) == (["a/b"], ["a/1"])
    for meta in store.list():
        head = store.head(meta.key)
        assert (meta.size, meta.etag) == (head.size, head.etag)
        assert abs(meta.modified_ms - head.modified_ms) < 1000  # HTTP headers have whole seconds
        assert store.get(meta.key) == meta.key.encode()
    store.delete("a/b/2")
    assert store.list_dirs("a")[0] == []


@pytest.mark.parametrize(
    "data",
    [
        b"bytes",
        bytearray(b"array"),
        memoryview(b"view")[1:],
        memoryview(b"strided")[::2],
        array.array("d", [1.5]),
    ],
    ids=lambda data: type(data).__name__,
)
def test_put_accepts_any_buffer(store: Store, data: bytes) -> None:
    store.put("k", data)
    assert store.get("k") == memoryview(data).tobytes()


def test_put_of_a_type_without_a_buffer_raises(store: Store) -> None:
    with pytest.raises(TypeError):
        store.put("k", "text")  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", "a\n", "a\0b"])
def test_an_invalid_key_raises_in_every_method(store: Store, key: str, tmp_path: Path) -> None:
    verbs = [
        lambda: store.get(key),
        lambda: store.head(key),
        lambda: store.put(key, b""),
        lambda: store.delete(key),
        lambda: store.download(key, tmp_path / "x"),
    ]
    for verb in verbs:
        with pytest.raises(errors.StoreConfigError, match="key"):
            verb()


def test_pickling_keeps_uri_and_options(store: Store) -> None:
    store.put("k", b"data")
    again = pickle.loads(pickle.dumps(store))
    assert again.uri == store.uri
    assert again.get("k") == b"data"
    assert again.__getnewargs_ex__() == store.__getnewargs_ex__()
    assert again.__getnewargs_ex__()[1]["part_bytes"] == PART
    meta = store.head("k")
    assert pickle.loads(pickle.dumps(meta)) == meta
    assert hash(pickle.loads(pickle.dumps(meta))) == hash(meta)
    assert meta != ObjectMeta("k", 5, meta.etag, meta.modified_ms)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "create", "delete"]), st.sampled_from("abc"), st.binary(max_size=9)
        ),
        max_size=12,
    ),
    st.integers(0, 2**62),
)
def test_memory_and_file_stores_behave_as_a_dict(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, bytes]], name: int
) -> None:
    stores = [Store(tmp_path_factory.mktemp("model")), Store(f"memory://model-{name}-{len(steps)}")]
    for store in stores:
        for meta in store.list():  # left from an earlier case of the same name
            store.delete(meta.key)
        model: dict[str, bytes] = {}
        for verb, key, data in steps:
            if verb == "put":
                store.put(f"dir/{key}", data)
                model[f"dir/{key}"] = data
            elif verb == "delete":
                store.delete(f"dir/{key}")
                model.pop(f"dir/{key}", None)
            elif f"dir/{key}" in model:
                with pytest.raises(errors.StoreExistsError):
                    store.put(f"dir/{key}", data, if_absent=True)
            else:
                store.put(f"dir/{key}", data, if_absent=True)
                model[f"dir/{key}"] = data
        assert {meta.key: store.get(meta.key) for meta in store.list()} == model
        assert [meta.size for meta in store.list()] == [len(model[key]) for key in sorted(model)]

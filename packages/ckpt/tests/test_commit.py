"""Commits of one name: exactly one writer wins, and every writer learns whether it won."""

import http.server
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import hocket.ckpt
from hocket.ckpt.cli.app import app
from hocket.ckpt.document.chunks import Chunk
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.document.records import TensorRecord
from hocket.ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, CheckpointUnfencedError
from hocket.ckpt.verbs.convert import convert
from hocket.ckpt.verbs.demo import write_demo
from hocket.ckpt.verbs.list import list_checkpoints
from hocket.ckpt.verbs.reshard import reshard
from hocket.native import Store, _native
from hocket.native.errors import StoreError, StoreTransientError
from support.sampling import cases

WRITERS = 4


def save_id(writer):
    return f"{writer:032x}"


def write(uri, writer):
    """Write a data file, and return its encoded manifest, ready to be committed."""
    array = np.full(1000, writer, np.int64)
    written = _native.ckpt_write_file(
        uri,
        f"data/{writer:08x}-r00000-000.safetensors",
        entries=[("t", "I64", array.shape, array.ctypes.data, array.nbytes)],
        metadata={},
    )
    chunk = Chunk(file=0, offset=0, length=array.nbytes, start=(0,), size=(1000,))
    manifest = Manifest(
        save_id=save_id(writer),
        step=1,
        created="2026-01-01T00:00:00.000000Z",
        version="0.1.0",
        writer="test",
        world_size=1,
        files=(written,),
        tensors={"t": TensorRecord(dtype="I64", shape=(1000,), path=("t",), chunks=(chunk,))},
    )
    return _native.ckpt_manifest_encode(manifest.to_document())


def commit(uri, manifest, writer):
    """Commit, and return whether this writer won."""
    try:
        _native.ckpt_commit(uri, manifest, save_id(writer))
    except CheckpointExistsError:
        return False
    return True


def check_winner(uri, won):
    assert sum(won) == 1
    checkpoint = hocket.ckpt.open(uri)
    assert checkpoint.manifest.save_id == save_id(won.index(True))
    assert (checkpoint["t"] == won.index(True)).all()


def race_of_threads(uri):
    manifests = [write(uri, writer) for writer in range(WRITERS)]
    barrier = threading.Barrier(WRITERS, timeout=30)

    def run(writer):
        barrier.wait()
        return commit(uri, manifests[writer], writer)

    with ThreadPoolExecutor(WRITERS) as pool:
        return list(pool.map(run, range(WRITERS)))


def test_one_of_several_threads_wins(tmp_path):
    for number in range(5):
        uri = str(tmp_path / f"run-{number}")
        check_winner(uri, race_of_threads(uri))


def test_the_winner_may_commit_again(tmp_path):
    uri = str(tmp_path / "run")
    manifest = write(uri, 0)
    assert commit(uri, manifest, 0)
    assert commit(uri, manifest, 0)
    assert not commit(uri, write(uri, 1), 1)
    with pytest.raises(ValueError, match=save_id(1)):
        _native.ckpt_commit(str(tmp_path / "other"), manifest, save_id(1))


def test_a_data_file_is_never_replaced(tmp_path):
    write(str(tmp_path), 0)
    with pytest.raises(CheckpointExistsError, match="never replaced"):
        write(str(tmp_path), 0)


def test_closing_a_writer_in_a_forked_child_keeps_the_parents_file(tmp_path):
    data = bytes(range(256)) * 4096  # 1 MiB, so the writer has threads, which a fork does not copy
    writer = _native.CkptStreamWriter(str(tmp_path), "data/x", size=2 * len(data))
    writer.write(data)
    child = os.fork()
    if child == 0:
        try:
            writer.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    writer.write(data)
    writer.finish()
    assert (tmp_path / "data/x").read_bytes() == 2 * data


def test_one_of_several_wins_on_an_object_store(server):
    uri = server.uri("commit/race")
    won = race_of_threads(uri)
    check_winner(uri, won)
    _native.ckpt_delete(server.uri("commit"), "race")
    # The files of the saves that lost the race are left to the collection of garbage.
    hocket.ckpt.collect_garbage(server.uri("commit"), min_age_s=0)
    with pytest.raises(hocket.ckpt.errors.CheckpointNotFoundError):
        hocket.ckpt.list_checkpoints(server.uri("commit"))


def test_a_commit_whose_reply_is_lost_succeeds(s3d_faults, monkeypatch):
    server = s3d_faults("kind=lost_reply,op=PutObject,key=*checkpoint.json.zst,times=1")
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    uri = server.uri("lost")
    manifest = write(uri, 0)
    assert commit(uri, manifest, 0)
    assert hocket.ckpt.open(uri).manifest.save_id == save_id(0)
    assert not commit(uri, write(uri, 1), 1)


def test_an_earlier_commit_of_another_save_wins_if_our_reply_is_lost(s3d_faults, monkeypatch):
    server = s3d_faults()
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    uri = server.uri("second")
    manifests = [write(uri, writer) for writer in range(2)]
    assert commit(uri, manifests[1], 1)
    server.set_faults("kind=lost_reply,op=PutObject,key=*checkpoint.json.zst,times=1")
    assert not commit(uri, manifests[0], 0)
    assert hocket.ckpt.open(uri).manifest.save_id == save_id(1)


LOST = "kind=lost_reply,op=PutObject,key=*checkpoint.json.zst,times=1"
CONFLICT = "kind=conflict,op=PutObject,key=*checkpoint.json.zst"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_conflict_is_retried_and_then_decided_by_the_committed_manifest(s3d_faults, monkeypatch):
    server = s3d_faults("kind=conflict,op=PutObject,key=*.hocket-probe-*,times=1")
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    first = server.uri("first")
    assert commit(first, write(first, 0), 0)  # the probe of the store survives a conflict
    # A few conflicts, as S3 has when two writes meet; in a full run also more conflicts than retries.
    for times in (2, 1_000_000)[: cases(full=2, sample=1)]:
        for name, rules, is_theirs in (
            ("nobody", [CONFLICT], False),
            ("theirs", [CONFLICT], True),
            ("ours", [LOST, CONFLICT], False),
            ("theirs-after-all", [LOST, CONFLICT], True),
        ):
            uri = server.uri(f"{name}-{times}")
            manifests = [write(uri, writer) for writer in range(2)]
            if is_theirs:
                assert commit(uri, manifests[1], 1)
            server.set_faults(*rules[:-1], f"{rules[-1]},times={times}")
            if name == "nobody" and times > 2:
                with pytest.raises(StoreTransientError, match="409, ConditionalRequestConflict"):
                    commit(uri, manifests[0], 0)
                with pytest.raises(CheckpointNotFoundError):
                    hocket.ckpt.open(uri)
                server.set_faults()
                assert commit(uri, manifests[0], 0)
            else:
                assert commit(uri, manifests[0], 0) is not is_theirs, name
                assert server.stats()["rules"][-1]["injected"] >= 2, name
            assert hocket.ckpt.open(uri).manifest.save_id == save_id(int(is_theirs)), name
            server.set_faults()


class Careless(http.server.BaseHTTPRequestHandler):
    """An object store that ignores the conditions of PUT requests."""

    def do_PUT(self):
        self.server.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200)

    def do_HEAD(self):
        found = self.server.objects.get(self.path)
        self._answer(404 if found is None else 200, found or b"")

    def do_GET(self):
        listing = (
            b"<ListBucketResult><Name>careless</Name><IsTruncated>false</IsTruncated></ListBucketResult>"
        )
        self._answer(200, listing)
        self.wfile.write(listing)

    def do_DELETE(self):
        self.server.objects.pop(self.path, None)
        self._answer(204)

    def _answer(self, status, content=b""):
        self.send_response(status)
        self.send_header("ETag", '"0"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def careless(monkeypatch):
    """Serve a `Careless` store as `s3://careless`."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Careless) as server:
        server.objects = {}
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                monkeypatch.setenv(name, "x")
            monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
            yield server
        finally:
            server.shutdown()
            thread.join(10)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_store_that_ignores_conditions_is_refused(careless, tmp_path):
    import torch.distributed.checkpoint as dcp  # imported here, because the other tests need no torch

    from hocket.ckpt.dcp import HocketWriter
    from hocket.ckpt.torch import CheckpointStore
    from hocket.ckpt.torch.functions import provide

    manifest = write(str(tmp_path), 0)
    with pytest.raises(CheckpointUnfencedError, match="unfenced=True"):
        _native.ckpt_commit("s3://careless/run", manifest, save_id(0))
    _native.ckpt_commit("s3://careless/run", manifest, save_id(0), unfenced=True)
    with pytest.raises(CheckpointUnfencedError, match="`CheckpointStore`"):
        CheckpointStore("s3://careless/saves").save({"n": 1}, step=1)
    with pytest.raises(CheckpointUnfencedError, match="`CheckpointStore`"):  # before the first save
        provide("s3://careless/saves", for_saving=True)
    provide("s3://careless/saves", for_saving=True, unfenced=True).save({"n": 1}, step=1)
    writer = HocketWriter("s3://careless/saves/dcp", unfenced=True)
    dcp.save({"n": 1}, storage_writer=writer, no_dist=True)
    names = {path.partition("/saves/")[2] for path in careless.objects if "/saves/" in path}
    assert names == {"step-1/checkpoint.json.zst", "dcp/checkpoint.json.zst"}


def test_conversions_and_reshards_refuse_a_store_that_ignores_conditions(careless, tmp_path, capsys):
    source = str(tmp_path / "demo")
    write_demo(source)

    def is_committed(name):
        return f"/careless/{name}/checkpoint.json.zst" in careless.objects

    # Before the source is looked for, and without a trace.
    for given in (source, tmp_path / "no source"):
        with pytest.raises(CheckpointUnfencedError, match="`convert`"):
            convert(given, "s3://careless/a", to="hocket")
    assert not any("/a/" in path for path in careless.objects)
    convert(source, "s3://careless/b", to="hocket", unfenced=True)
    with pytest.raises(CheckpointUnfencedError, match="`reshard`"):
        reshard(source, "s3://careless/c", ranks=2)
    assert not is_committed("c")
    reshard(source, "s3://careless/d", ranks=2, unfenced=True)
    verbs = {"e": ["convert", "--to", "hocket"], "f": ["reshard", "--ranks", "2"]}
    for name, (verb, *options) in verbs.items():
        for unfenced, code in ([], 4), (["--unfenced"], 0):
            with pytest.raises(SystemExit) as ended:
                app([verb, source, f"s3://careless/{name}-{code}", *options, *unfenced])
            assert (ended.value.code, is_committed(f"{name}-{code}")) == (code, code == 0)
            assert ("--unfenced" in capsys.readouterr().err) == (code != 0)
    assert is_committed("b")
    assert is_committed("d")


@pytest.mark.parametrize(
    ("fault", "answer"), [("no_conditions", "HTTP 501, NotImpl"), ("bad_condition", "HTTP 400")]
)
def test_a_store_that_rejects_conditions_takes_unfenced_commits_alone(s3d_faults, monkeypatch, fault, answer):
    server = s3d_faults(f"kind={fault}")
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    uri = server.uri("run")
    manifest = write(uri, 0)
    for replaces in (None, save_id(1)):
        server.reset()
        with pytest.raises(
            CheckpointUnfencedError, match=rf"rejects conditional writes \({answer}.*unfenced=True"
        ):
            _native.ckpt_commit(uri, manifest, save_id(0), replaces=replaces)
        requests = server.stats()["requests"]
        assert requests["PutObject"] == 2, requests  # the rejected one, and one without the condition
    with pytest.raises(CheckpointNotFoundError):
        hocket.ckpt.open(uri)
    _native.ckpt_commit(uri, manifest, save_id(0), unfenced=True)
    _native.ckpt_commit(uri, manifest, save_id(0), unfenced=True)
    second = write(uri, 1)
    with pytest.raises(CheckpointExistsError):
        _native.ckpt_commit(uri, second, save_id(1), unfenced=True)
    _native.ckpt_commit(uri, second, save_id(1), unfenced=True, replaces=save_id(0))
    assert hocket.ckpt.open(uri).manifest.save_id == save_id(1)
    assert [meta.key for meta in Store(server.uri()).list() if "probe" in meta.key] == []


def test_a_probe_counts_for_the_address_that_answered_it(s3d, careless, monkeypatch, tmp_path):
    manifest = write(str(tmp_path), 0)
    address = os.environ["AWS_ENDPOINT_URL"]
    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3d.endpoint)
    uri = s3d.uri(tmp_path.name)
    _native.ckpt_commit(uri, manifest, save_id(0))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", address)
    with pytest.raises(CheckpointUnfencedError, match="lets a conditional write replace"):
        _native.ckpt_commit(uri, manifest, save_id(0))


def test_checkpoints_behind_a_web_page_are_not_missing(s3d_faults, monkeypatch):
    server = s3d_faults()
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    assert commit(server.uri("run/one"), write(server.uri("run/one"), 0), 0)
    assert len(list_checkpoints(server.uri("run"))) == 1
    server.set_faults("kind=html,op=List*")
    with pytest.raises(StoreError, match="root element `ListBucketResult`"):
        list_checkpoints(server.uri("run"))

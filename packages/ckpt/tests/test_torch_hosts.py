"""Checkpoints of which each host has a part: any one host may be lost, and nothing damaged is loaded.

Each host is a folder here. Jobs follow one another, of as many ranks as their hosts have.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.distributed import HashStore  # noqa: E402

from hocket.ckpt.document.manifest import SaveSummary  # noqa: E402
from hocket.ckpt.errors import (  # noqa: E402
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointTimeoutError,
)
from hocket.ckpt.torch import CheckpointStore, provide  # noqa: E402
from hocket.ckpt.torch.ranks.coordinator import Coordinator  # noqa: E402
from hocket.ckpt.torch.ranks.file_server import (  # noqa: E402
    FileServer,
    fetch_bytes,
    fetch_file,
    new_token,
    route_to,
)
from hocket.ckpt.torch.ranks.host_folders import (  # noqa: E402
    FAILURE_DOMAIN,
    HostFolders,
    choose_sources,
)
from support.ranks import run_ranks  # noqa: E402


def tree(value: float, world_size: int) -> dict:
    """Return a state with a sharded tensor, a replicated one that ranks write in parts, and a small one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    rows = value + torch.arange(24 * 500.0).reshape(24, 500)
    return {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "whole": value * torch.ones(300, 100),
        "small": torch.tensor(value),
    }


def save(folders: list[str], steps: list[int]) -> list[str]:
    rank = torch.distributed.get_rank()
    with_large = {"own": bytes([rank]) * 100_000}
    store = provide(folders[rank], timeout_s=30, for_saving=True, per_host=True)
    for step in steps:
        store.save(tree(float(step), len(folders)), step=step, per_rank=with_large)
    names = [entry.name for entry in store.list()]
    store.close()
    return names


def load(folders: list[str]) -> tuple:
    """Return the step of what is found, whether it has the right bits, this rank's own value, the problem."""
    rank = torch.distributed.get_rank()
    store = provide(folders[rank], timeout_s=30, for_saving=True, per_host=True)
    found = [entry for entry in store.list() if entry.status == "committed"]
    if not found:
        problem = store.problem
        store.close()
        return None, None, None, problem
    (entry,) = found
    into = tree(-1.0, len(folders))
    expected = tree(float(entry.step), len(folders))
    try:
        loaded = store.load(entry.name, into)
    except CheckpointError as error:
        store.close()
        return entry.step, type(error).__name__, str(error), store.problem
    is_equal = all(torch.equal(_local(into[name]), _local(expected[name])) for name in into)
    own = None if loaded.per_rank is None else set(loaded.per_rank["own"])
    store.close()
    return entry.step, is_equal, own, store.problem


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def hosts(tmp_path: Path, *counts: int) -> list[str]:
    """Return the folder of each rank, for hosts with so many ranks."""
    return [str(tmp_path / f"host{host}") for host, count in enumerate(counts) for _ in range(count)]


def test_any_one_host_may_be_lost_and_one_may_come_new(tmp_path: Path) -> None:
    three = hosts(tmp_path, 1, 1, 1)
    assert run_ranks(save, 3, three, [1, 2], init="gloo") == [["step-2"]] * 3, "the newest alone is kept"
    for folder in three:
        data = list(Path(folder, "step-2", "data").iterdir())
        assert len(data) == 2, "the host's own part, and that of the one before"
    shutil.rmtree(three[1])
    two = [three[0], three[2]]
    for rank, one in enumerate(run_ranks(load, 2, two, init="gloo")):
        assert one == (2, True, None, ""), rank
    # A host that has come new has no part, and gets those that it needs.
    shutil.rmtree(tmp_path / "host1", ignore_errors=True)
    assert run_ranks(load, 3, three, init="gloo") == [(2, True, {rank}, "") for rank in range(3)]


def save_in_domains(folders: list[str], domains: list[str]) -> str:
    """Save a checkpoint on hosts in failure domains; return the store's caution, or the refusal."""
    rank = torch.distributed.get_rank()
    os.environ[FAILURE_DOMAIN] = domains[rank]
    try:
        store = provide(folders[rank], timeout_s=30, for_saving=True, per_host=True)
    except ValueError as error:
        return str(error)
    store.save(tree(3.0, len(folders)), step=3, per_rank={"own": bytes([rank]) * 100_000})
    caution = store.caution
    store.close()
    return caution


def test_a_whole_failure_domain_may_be_lost(tmp_path: Path) -> None:
    folders = hosts(tmp_path, 1, 1, 1, 1)
    domains = ["rack 1", "rack 1", "rack 2", "rack 2"]
    assert run_ranks(save_in_domains, 4, folders, domains, init="gloo") == [""] * 4
    for folder in folders:
        assert len(list(Path(folder, "step-3", "data").iterdir())) == 2, (
            "its own part, and one of the other rack"
        )
    for folder in folders[:2]:
        shutil.rmtree(folder)
    for step, _, _, problem in run_ranks(load, 2, folders[2:], init="gloo"):
        assert (step, problem) == (3, "")


@pytest.mark.parametrize(
    ("domains", "words"),
    [
        (["a", "a", "a", "b"], "3 of 4 hosts are in the failure domain `a`, so 2 of them have their partner"),
        (["a"] * 4, "4 of 4 hosts are in the failure domain `a`, so 4 of them"),
        (
            ["a", "b", "", "b"],
            "rank 2 on host .* has no `HOCKET_FAILURE_DOMAIN`, but rank 0 on host .* has `a`",
        ),
    ],
)
def test_a_failure_domain_that_cannot_be_honoured_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, domains: list[str], words: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store = HashStore()

    class Domains(HostFolders):
        def _exchange(self, key: str, own: object) -> list:
            own = [domains[self._coordinator.rank], own[1]] if key == "hosts/domains" else own
            return super()._exchange(key, own)

    def caution(rank: int) -> str:
        coordinator = Coordinator(store, rank=rank, world_size=4, nonce=b"")
        try:
            found = Domains(str(tmp_path / str(rank)), coordinator, timeout_s=20)
        except ValueError as error:
            return str(error)
        found.close()
        return found.shared_domain

    with ThreadPoolExecutor(4) as threads:
        told = list(threads.map(caution, range(4)))
    assert all(re.match(words, one) for one in told), told


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_partners_are_in_different_domains_unless_one_has_more_than_half(domains: list[str]) -> None:
    sources = choose_sources(domains)
    assert sorted(sources) == list(range(len(domains))), "each host keeps the parts of one host"
    alike = sum(domains[host] == domains[source] for host, source in enumerate(sources))
    largest = max(map(domains.count, domains))
    assert alike == max(0, 2 * largest - len(domains))
    if len(domains) > 1:
        assert all(host != source for host, source in enumerate(sources))
        names = [str(host) for host in range(len(domains))]
        assert choose_sources(names) == [(host - 1) % len(domains) for host in range(len(domains))]


def test_two_neighbours_lost_leave_nothing_that_could_be_loaded(tmp_path: Path) -> None:
    three = hosts(tmp_path, 1, 1, 1)
    run_ranks(save, 3, three, [4], init="gloo")
    (alone,) = run_ranks(load, 1, [three[2]], init="gloo")
    assert alone == (None, None, None, "the hosts that are left do not have all parts of a copy")
    assert list(Path(three[2]).iterdir()) == []


def test_a_save_that_one_host_has_not_committed_is_complete_on_the_others(tmp_path: Path) -> None:
    folders = hosts(tmp_path, 2, 1)
    run_ranks(save, 3, folders, [3], init="gloo")
    (tmp_path / "host1" / "step-3" / "checkpoint.json.zst").unlink()
    unfinished = tmp_path / "host0" / "step-4" / "data"
    unfinished.mkdir(parents=True)
    (unfinished / "part").write_bytes(bytes(100))
    (tmp_path / "host0" / "step-3" / "data" / ".left.part").write_bytes(bytes(100))
    assert run_ranks(load, 3, folders, init="gloo") == [(3, True, {rank}, "") for rank in range(3)]
    assert [path.name for path in (tmp_path / "host0").iterdir()] == ["step-3"]
    assert not (tmp_path / "host0" / "step-3" / "data" / ".left.part").exists()


class EndedFolders(HostFolders):
    """The folders of a rank that ends once the ranks know what the hosts have."""

    def _keep(self, key: str) -> None:
        raise ConnectionError("this rank has ended")


class ReportedFolders(HostFolders):
    """The folders of a rank that ends once it has reported that it has what was found."""

    def _keep(self, key: str) -> None:
        with contextlib.suppress(CheckpointError):
            super()._keep(key)
        raise ConnectionError("this rank has ended")


class CutFolders(HostFolders):
    """The folders of a rank that cannot copy what it lacks from a rank that has ended."""

    def _commit(self, name: str, save_id: str, rank: int) -> None:
        raise CheckpointError("the manifest could not be copied")


def open_folders(
    folders: list[Path], *kinds: type[HostFolders], timeout_s: float = 20
) -> list[HostFolders | Exception]:
    """Return what each host finds, or its error; a thread of this process stands for each."""
    store = HashStore()
    given = [*kinds, *[HostFolders] * (len(folders) - len(kinds))]

    def open_one(rank: int) -> HostFolders | Exception:
        coordinator = Coordinator(store, rank=rank, world_size=len(folders), nonce=b"")
        try:
            found = given[rank](str(folders[rank]), coordinator, timeout_s=timeout_s)
        except (CheckpointError, ConnectionError) as error:
            return error
        found.close()
        return found

    with ThreadPoolExecutor(len(folders)) as threads:
        return list(threads.map(open_one, range(len(folders))))


@pytest.mark.parametrize("kinds", [(HostFolders, EndedFolders), (CutFolders, ReportedFolders)])
def test_copies_stay_if_a_rank_ends_while_they_are_searched(
    kinds: tuple[type[HostFolders], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    CheckpointStore(first).save({"rows": torch.ones(300, 100)}, step=3)
    shutil.copytree(first, second)
    if CutFolders in kinds:
        (second / "step-3" / "checkpoint.json.zst").unlink()
    kept = sorted(tmp_path.glob("*/step-3/data/*"))
    found = open_folders([first, second, third], HostFolders, *kinds, timeout_s=0.5)
    assert [type(one) for one in found[:2]] == [CheckpointTimeoutError] * 2
    assert sorted(tmp_path.glob("*/step-3/data/*")) == kept
    assert len(kept) == 2
    assert [one.problem for one in open_folders([first, second])] == [""] * 2


def test_parts_of_a_save_stay_where_the_manifest_of_the_one_before_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    state = {"rows": torch.ones(300, 100)}
    CheckpointStore(first).save(state, step=3, name="copy")
    shutil.copytree(first, second)
    manifest = second / "copy" / "checkpoint.json.zst"
    old = manifest.read_bytes()
    CheckpointStore(second).save(state, step=3, name="copy", overwrite=True)
    shutil.copytree(second, third)
    newer = SaveSummary.read(third / "copy")
    # The first host has the newer manifest and no part; the others have parts and the older manifest.
    shutil.rmtree(first)
    shutil.copytree(third, first)
    shutil.rmtree(first / "copy" / "data")
    for late in (second, third):
        (late / "copy" / "checkpoint.json.zst").write_bytes(old)
    assert [one.problem for one in open_folders([first, second, third])] == [""] * 3
    for late in (second, third):
        assert SaveSummary.read(late / "copy") == newer
        assert (late / "copy" / newer.paths[0]).is_file()


def test_a_damaged_part_is_refused_by_its_digest_on_all_ranks(tmp_path: Path) -> None:
    two = hosts(tmp_path, 1, 1)
    run_ranks(save, 2, two, [5], init="gloo")
    for path in tmp_path.glob("host*/step-5/data/*r00001*"):
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
    for step, kind, text, _ in run_ranks(load, 2, two, init="gloo"):
        assert (step, kind) == (5, CheckpointCorruptError.__name__)
        assert "digest" in text


def test_a_file_server_gives_the_files_of_its_folder_to_those_who_know_the_secret(tmp_path: Path) -> None:
    (tmp_path / "served" / "below").mkdir(parents=True)
    (tmp_path / "served" / "below" / "file").write_bytes(bytes(range(256)) * 40_000)
    (tmp_path / "secret").write_text("not for others")
    (tmp_path / "served" / "link").symlink_to(tmp_path / "secret")
    token = new_token()
    server = FileServer(str(tmp_path / "served"), token, timeout_s=5, is_local=True)
    address = ("127.0.0.1", server.port)
    try:
        fetch_file(
            address, token, "below/file", tmp_path / "copy" / "file", timeout_s=5, num_bytes=10_240_000
        )
        assert (tmp_path / "copy" / "file").read_bytes() == bytes(range(256)) * 40_000
        with pytest.raises(CheckpointError, match="has 10240000 bytes, expected 7"):
            fetch_file(address, token, "below/file", tmp_path / "copy" / "other", timeout_s=5, num_bytes=7)
        for path in ("none", "../secret", "link", str(tmp_path / "secret"), "below"):
            with pytest.raises(CheckpointNotFoundError, match="does not exist"):
                fetch_bytes(address, token, path, timeout_s=5)
        with pytest.raises(CheckpointError, match="could not be copied"):
            fetch_bytes(address, bytes(32), "below/file", timeout_s=5)
        with socket.create_connection(address, timeout=5) as client:
            client.sendall(token + bytes([255] * 4))
            assert client.recv(1) == b"", "a path of 4 GB is refused"
        assert [path.name for path in (tmp_path / "copy").iterdir()] == ["file"]
    finally:
        server.close()
    with pytest.raises(CheckpointError, match="could not be copied"):
        fetch_bytes(address, token, "below/file", timeout_s=5)


def test_no_address_leads_to_a_host_without_a_name() -> None:
    assert route_to("127.0.0.1") == "127.0.0.1"
    assert route_to("") is None


def serve_without_descriptors(folder: str) -> bytes:
    """Return what a server answers to a client that came while its process could open no file."""
    token = new_token()
    server = FileServer(folder, token, timeout_s=5, is_local=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as silent, socket.socket() as client:
        client.settimeout(5)
        # The lowest number that is free is the next to be taken.
        free = os.dup(client.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        # A server that waits for a connection has a number for it already: the silent client keeps it.
        silent.connect(("127.0.0.1", server.port))
        client.connect(("127.0.0.1", server.port))
        client.sendall(token + (4).to_bytes(4, "big") + b"file")
        time.sleep(0.3)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        answer = client.recv(100)
    server.close()
    return answer


def test_a_file_server_goes_on_after_its_process_was_out_of_file_descriptors(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert run_ranks(serve_without_descriptors, 1, str(tmp_path)) == [bytes(8)]

"""Checkpoints of which every host keeps a part, in a folder of its own, and a copy of its neighbour's part.

The hosts of a job form a ring. A data file lies in the folder of the host whose rank wrote it, and in that of
its partner, a later host of the ring. Each folder also has the manifest. Any one host may be lost, or several
of which none is another's partner: the other folders together still have every file.

`HOCKET_FAILURE_DOMAIN` names what may fail with a host: its rack, its switch, its zone. Partners are in
different domains, so that a whole domain may be lost, unless one domain has more than half of the hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from os import environ
from pathlib import Path
from typing import Any

from hocket.ckpt.document.manifest import SaveSummary
from hocket.ckpt.document.manifest_builder import commit_over
from hocket.ckpt.errors import CheckpointError, CheckpointNotFoundError, CheckpointTimeoutError
from hocket.ckpt.torch.ranks.coordinator import Coordinator
from hocket.ckpt.torch.ranks.error_propagation import agree
from hocket.ckpt.torch.ranks.file_server import FileServer, fetch_bytes, fetch_file, new_token, route_to
from hocket.native import _native

__all__ = ["FAILURE_DOMAIN", "MEMORY_FILE", "HostFolders", "choose_sources"]

FAILURE_DOMAIN = "HOCKET_FAILURE_DOMAIN"
"""The variable with the failure domain of this host, on each host of the job or on none."""

MEMORY_FILE = ".memory-"
"""How the names of the files in a folder begin that saves fill; a checkpoint has them under other names."""

_DATA = "data"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class HostFolders:
    """The folders of the hosts of a job, and what the hosts copy from each other. Collective.

    Only the newest checkpoint of which the folders together have every file is kept.

    Args:
        folder: The folder of this rank's host. Ranks with the same folder and host name are on one host.
        coordinator: Connects the ranks.
        timeout_s: Seconds to wait for another rank.

    Attributes:
        problem: Why the checkpoints that were found cannot be used; empty if they can, or if there are none.
        shared_domain: Which failure domain cannot be lost as a whole, as a sentence; empty if each can, or if
            hosts have none.

    Raises:
        CheckpointError: A rank did not answer in time.
        ValueError: Only some of the hosts have a failure domain, or one has several.
    """

    def __init__(self, folder: str, coordinator: Coordinator, *, timeout_s: float) -> None:
        self._folder = Path(folder)
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._server: FileServer | None = None
        self._token = b""
        self.problem = ""
        self._found: dict[str, Any] | None = None
        own = f"{socket.gethostname()} {self._folder}"
        names = [str(name) for name in self._exchange("hosts/names", own)]
        hosts = list(dict.fromkeys(names))
        self._host_of = [hosts.index(name) for name in names]
        self._members = [[r for r, name in enumerate(names) if name == host] for host in hosts]
        self._host = self._host_of[coordinator.rank]
        self._number = self._members[self._host].index(coordinator.rank)
        domains = self._domains(hosts)
        self._source = choose_sources(domains)[self._host]
        self.shared_domain = _describe_shared(domains)
        self._addresses: list[tuple[str, int]] = []
        try:
            if len(hosts) > 1:
                self._serve()
            self._find()
        except BaseException:
            self.close()
            raise

    @property
    def is_lead(self) -> bool:
        """Whether this is the first rank of its host."""
        return self._number == 0

    def close(self) -> None:
        """Stop serving files."""
        if self._server is not None:
            self._server.close()

    def mirror(self, key: str, name: str, path: str | None) -> None:
        """Copy the data files of a save to the hosts' partners. Collective.

        Args:
            key: Identifies the save; the same on all ranks, and used once.
            name: The checkpoint's name.
            path: The file that this rank has written, relative to the checkpoint; None without one.

        Raises:
            CheckpointError: A file of the host whose partner this one is could not be copied here.
        """
        if len(self._members) == 1:
            return
        own = None if path is None else [path, (self._folder / name / path).stat().st_size]
        self._coordinator.post(f"{key}/file/{self._coordinator.rank}", json.dumps(own).encode())
        own_count = len(self._members[self._host])
        sources = self._members[self._source][self._number :: own_count]
        told = self._coordinator.collect(
            f"{key}/file", sources, timeout_s=self._timeout_s, what=f"its part of the copy `{name}`"
        )
        for rank, text in told.items():
            if (entry := json.loads(text)) is not None:
                self._fetch(rank, name, entry[0], num_bytes=entry[1])

    def settle(self, key: str, name: str, save_id: str) -> None:
        """Put the manifest that rank 0 has committed into every folder, and remove what is older. Collective.

        Raises:
            CheckpointError: A host could not do it.
        """
        error: BaseException | None = None
        older: list[Path] = []
        try:
            if self.is_lead:
                if self._host != self._host_of[0]:
                    self._commit(name, save_id, 0)
                # No rank begins another save before all have settled this one.
                older = self._others(name)
        except BaseException as caught:  # noqa: BLE001 - reported to the other ranks, then raised
            error = caught
        self._agree(f"{key}/settled", error, f"save of the copy `{name}`")
        _remove(older)

    def bring(self, name: str, paths: Iterable[str]) -> None:
        """Copy data files of the checkpoint that was found to this host, where it lacks them.

        Raises:
            CheckpointNotFoundError: No host has a file.
            CheckpointError: A file could not be copied.
        """
        for path in paths:
            if (self._folder / name / path).is_file():
                continue
            hosts = self._found["holders"].get(path) if self._found and self._found["name"] == name else None
            if not hosts:
                raise CheckpointNotFoundError(f"no host has `{path}` of the copy `{name}`")
            # Different hosts and ranks ask different ones.
            members = self._members[hosts[self._host % len(hosts)]]
            self._fetch(members[self._number % len(members)], name, path)

    def _domains(self, hosts: Sequence[str]) -> list[str]:
        """Return the failure domain of each host; without any, each host is one of its own. Collective.

        Raises:
            ValueError: Only some of the ranks have one, or those of one host have several.
        """
        own = [environ.get(FAILURE_DOMAIN, "").strip(), socket.gethostname()]
        told = {rank: (str(one[0]), one[1]) for rank, one in enumerate(self._exchange("hosts/domains", own))}
        given = {rank: name for rank, (name, _) in told.items() if name}
        if not given:
            return list(hosts)
        without = min(told.keys() - given, default=None)
        if without is not None:
            first = min(given)
            raise ValueError(
                f"rank {without} on host {told[without][1]} has no `{FAILURE_DOMAIN}`, but rank {first} on "
                f"host {told[first][1]} has `{given[first]}`. Set it on every host of the job, or on none"
            )
        for members in self._members:
            if len(names := sorted({given[rank] for rank in members})) > 1:
                raise ValueError(
                    f"the ranks of host {told[members[0]][1]} have several `{FAILURE_DOMAIN}`: "
                    f"{', '.join(f'`{name}`' for name in names)}. A host is in one failure domain"
                )
        return [given[members[0]] for members in self._members]

    def _serve(self) -> None:
        """Serve the files of this host, and exchange secret and addresses. Collective."""
        token = self._exchange("hosts/token", new_token().hex() if self._coordinator.is_rank_0 else "")[0]
        self._token = bytes.fromhex(token)
        self._folder.mkdir(parents=True, exist_ok=True)
        meeting = environ.get("MASTER_ADDR", "")
        self._server = FileServer(
            str(self._folder), self._token, timeout_s=self._timeout_s, is_local=meeting in _LOOPBACK
        )
        # The other hosts know that of rank 0 by the address at which all have met.
        host = meeting if self._host == self._host_of[0] else route_to(meeting)
        address = (host or socket.getfqdn(), self._server.port)
        self._addresses = [(str(one[0]), int(one[1])) for one in self._exchange("hosts/places", address)]

    def _find(self) -> None:
        """Find the newest checkpoint that is complete, and remove all others. Collective."""
        inventory = self._inventory() if self.is_lead else {}
        inventories = self._exchange("hosts/inventory", inventory)
        held = {self._host_of[rank]: found for rank, found in enumerate(inventories) if found}
        self._found = _newest_complete(held)
        has_any = any(one["step"] is not None for found in held.values() for one in found.values())
        if self._found is None and has_any:
            self.problem = "the hosts that are left do not have all parts of a copy"
        try:
            self._keep("hosts/found")
        except CheckpointTimeoutError:
            raise  # of a rank that is late or has ended, which says nothing about the copies
        except CheckpointError as failure:
            self.problem, self._found = str(failure), None
            # A rank that has ended may be why, and the copies are of use to the next attempt then.
            self._agree("hosts/problem", None, "search for copies")
            self._keep("hosts/none")

    def _keep(self, key: str) -> None:
        """Put the manifest of the checkpoint that was found into every folder, and remove all else.

        Collective.

        Raises:
            CheckpointError: A host could not do it.
        """
        found, error = self._found, None
        try:
            if self.is_lead:
                # Data files of what was found stay, also where an older manifest does not name them.
                children = list(self._folder.iterdir()) if self._folder.is_dir() else []
                _remove([child for child in children if found is None or child.name != found["name"]])
                if found is not None:
                    if self._inventory().get(found["name"], {}).get("save_id") != found["save_id"]:
                        (self._folder / found["name"]).mkdir(parents=True, exist_ok=True)
                        self._commit(found["name"], found["save_id"], self._members[found["manifest"]][0])
                    _remove(self._others(found["name"]))  # files that this manifest does not name
        except BaseException as caught:  # noqa: BLE001 - reported to the other ranks, then raised
            error = caught
        self._agree(key, error, "search for copies")

    def _inventory(self) -> dict[str, Any]:
        """Return the checkpoints in this host's folder by name, with the data files that are there."""
        found: dict[str, Any] = {}
        for child in self._folder.iterdir() if self._folder.is_dir() else ():
            if not child.is_dir():
                continue
            data = child / _DATA
            there = [f"{_DATA}/{file.name}" for file in (data.iterdir() if data.is_dir() else ())]
            one: dict[str, Any] = {"has": there, "step": None, "save_id": None, "needs": []}
            with contextlib.suppress(CheckpointError):  # unfinished, or damaged
                summary = SaveSummary.read(str(child))
                one |= {"step": summary.step, "save_id": summary.save_id, "needs": list(summary.paths)}
            found[child.name] = one
        return found

    def _others(self, name: str) -> list[Path]:
        """Return what this host's folder has beside a checkpoint and the files that its manifest names."""
        if not self._folder.is_dir():
            return []
        children = [child for child in self._folder.iterdir() if not child.name.startswith(MEMORY_FILE)]
        others = [child for child in children if child.name != name]
        data = self._folder / name / _DATA
        if name and data.is_dir():
            with contextlib.suppress(CheckpointNotFoundError):
                paths = SaveSummary.read(str(self._folder / name)).paths
                others += [file for file in data.iterdir() if f"{_DATA}/{file.name}" not in paths]
        return others

    def _commit(self, name: str, save_id: str, rank: int) -> None:
        """Commit the manifest of another rank's host here."""
        uri = str(self._folder / name)
        manifest = fetch_bytes(
            self._addresses[rank],
            self._token,
            f"{name}/{_native.CKPT_MANIFEST_NAME}",
            timeout_s=self._timeout_s,
        )
        replaced = None
        with contextlib.suppress(CheckpointNotFoundError):
            replaced = SaveSummary.read(uri)
        commit_over(uri, manifest, save_id, replaced)

    def _fetch(self, rank: int, name: str, path: str, *, num_bytes: int | None = None) -> None:
        fetch_file(
            self._addresses[rank],
            self._token,
            f"{name}/{path}",
            self._folder / name / path,
            timeout_s=self._timeout_s,
            num_bytes=num_bytes,
        )

    def _exchange(self, key: str, own: Any) -> list[Any]:
        """Return every rank's value, by rank. Collective."""
        coordinator = self._coordinator
        if coordinator.world_size == 1:
            return [own]
        if coordinator.is_rank_0:
            others = coordinator.collect(
                key, range(1, coordinator.world_size), timeout_s=self._timeout_s, what=f"`{key}`"
            )
            values = [own, *(json.loads(others[rank]) for rank in sorted(others))]
            coordinator.post(f"{key}/all", json.dumps(values).encode())
            return values
        coordinator.post(f"{key}/{coordinator.rank}", json.dumps(own).encode())
        text = coordinator.receive(f"{key}/all", timeout_s=2 * self._timeout_s, what=f"`{key}`")
        return list(json.loads(text))

    def _agree(self, key: str, error: BaseException | None, what: str) -> None:
        if self._coordinator.world_size == 1:
            if error is not None:
                raise error
            return
        agree(self._coordinator, key, error, timeout_s=self._timeout_s, what=what)


def choose_sources(domains: Sequence[str]) -> list[int]:
    """Return, for each host, the host whose data files it keeps beside its own.

    Each host keeps those of one other, which is in another failure domain unless one domain has more than
    half of the hosts; then as many as possible are.

    Args:
        domains: The failure domain of each host.
    """
    first = {name: host for host, name in reversed(list(enumerate(domains)))}
    # Hosts of one domain stand together. A step as long as the largest of these groups leaves every group.
    ring = sorted(range(len(domains)), key=lambda host: (first[domains[host]], host))
    step = max(Counter(domains).values())
    step = 1 if step == len(domains) else step
    sources = dict(zip(ring, ring[-step:] + ring[:-step], strict=True))
    return [sources[host] for host in range(len(domains))]


def _describe_shared(domains: Sequence[str]) -> str:
    """Return a sentence on the failure domain in which hosts and their partners are; empty without one."""
    sources = choose_sources(domains)
    shared = [host for host, source in enumerate(sources) if domains[host] == domains[source]]
    if len(domains) == 1 or not shared:
        return ""
    name = domains[shared[0]]
    return (
        f"{domains.count(name)} of {len(domains)} hosts are in the failure domain `{name}`, so {len(shared)} "
        "of them have their partner there, too: if that whole domain is lost, so are the copies in memory"
    )


def _newest_complete(held: dict[int, dict[str, Any]]) -> dict[str, Any] | None:
    """Return the newest checkpoint that is complete: its name, its save, and the hosts with each file."""
    best: dict[str, Any] | None = None
    for host, found in held.items():
        for name, one in found.items():
            if one["step"] is None or (best is not None and one["step"] <= best["step"]):
                continue
            holders = {
                path: [other for other, its in held.items() if path in its.get(name, {}).get("has", ())]
                for path in one["needs"]
            }
            if all(holders.values()):
                best = {**one, "name": name, "holders": holders, "manifest": host}
    return best


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)

"""Checks before the first collective: that machines reach each other, and that ranks were started alike.

Every check ends within `PREFLIGHT_S` seconds with a message that names host, port, interface and the
environment variables to set.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import Store, run  # type: ignore[attr-defined]  # public, and missing from its annotations

from hocket.dist.errors import AbsentRanksError, ConfigError, PreflightError
from hocket.dist.ranks.world import World

PREFLIGHT_S = 60.0
DATA_PATHS = "HOCKET_PREFLIGHT_PATHS"
"""A JSON list of paths that every rank must see; `hocket-launch --data` sets it."""

ETCD = ("etcd", "etcd-v2")
"""The back ends of torch's rendezvous that meet at etcd."""

_KEY = "hocket/preflight"
_PACKAGES = (
    "hocket-trainer-core",
    "hocket-algos",
    "hocket-dist",
    "hocket-ckpt",
    "hocket-stream",
    "hocket-native",
)
INTERFACES = "`GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME`"


def call_roll(store: Store, world: World, timeout_s: float) -> Store:
    """Wait until every rank has signed in at `store`, and compare how they were started.

    Args:
        store: A store that all ranks share.
        world: The place of this process.
        timeout_s: Seconds to wait; at most `PREFLIGHT_S` are used.

    Returns:
        The same store, for the process group.

    Raises:
        AbsentRanksError: Some ranks have not signed in; every present rank names them.
        PreflightError: Ranks run another script or other versions than rank 0, or do not see the data. The
            same message on every rank.
    """
    timeout_s = min(timeout_s, PREFLIGHT_S)
    facts_keys = [f"{_KEY}/present/{rank}" for rank in range(world.world_size)]
    store.set(facts_keys[world.rank], json.dumps(_facts()))
    if not _wait(store, facts_keys, timeout_s):
        absent = tuple(rank for rank, name in enumerate(facts_keys) if not store.check([name]))
        if absent:
            raise AbsentRanksError(_absent_message(absent, world, timeout_s), absent)
    verdict_keys = [f"{_KEY}/verdict/{rank}" for rank in range(world.world_size)]
    first = json.loads(store.get(facts_keys[0]))
    store.set(verdict_keys[world.rank], _difference(first, _facts(), world.rank))
    if not _wait(store, verdict_keys, timeout_s):
        absent = tuple(rank for rank, name in enumerate(verdict_keys) if not store.check([name]))
        if absent:
            raise AbsentRanksError(_absent_message(absent, world, timeout_s), absent)
    problems = [text for name in verdict_keys if (text := store.get(name).decode())]
    if problems:
        rest_note = f"\n… and {len(problems) - 8} more ranks" if len(problems) > 8 else ""
        raise PreflightError("ranks were started differently:\n" + "\n".join(problems[:8]) + rest_note)
    return store


def check_launcher(options: argparse.Namespace) -> None:
    """Check script, data, address and port before the agent starts.

    The paths of `--data` are checked here only in a job of one machine: with several, `call_roll` checks
    them, so that the message is the same on all machines.

    Args:
        options: The options of `hocket-launch`.

    Raises:
        ConfigError: The script, command or data does not exist, or the folder of logs cannot be created.
        AbsentRanksError: Machine 0 does not answer within `PREFLIGHT_S`, or `start_timeout` of the options.
        PreflightError: The address cannot be resolved or the port is in use.
    """
    script = options.training_script
    if options.no_python and shutil.which(script) is None:
        hint = ". It is a script of Python: leave `-c` out" if _is_python_file(script) else ""
        raise ConfigError(f"the command `{script}` is not on `PATH`{hint}")
    if options.module and _is_python_file(script):
        raise ConfigError(f"`-m` takes the name of a module, and `{script}` is a file. Leave `-m` out")
    if not options.module and not options.no_python and not options.run_path and not Path(script).is_file():
        is_python = Path(script).name.startswith("python")
        hint = "Leave it out: every rank runs Python" if is_python else "For a module, use `-m`"
        raise ConfigError(f"the script `{script}` is no file in {Path.cwd()}. {hint}")
    if options.log_dir is not None:
        try:
            Path(options.log_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"`--log-dir` is {options.log_dir!r}, which cannot be created: {error}"
            ) from None
    _, num_nodes = run.parse_min_max_nnodes(options.nnodes)
    if num_nodes == 1 and (missing := _missing_paths(options.data)):
        raise ConfigError(f"`--data` names {', '.join(missing)}, which does not exist on this machine")
    if options.rdzv_backend == "static" and options.master_port is None and num_nodes == 1:
        return
    if not is_held_by_machine_0(options):
        if options.rdzv_backend in ETCD and not options.standalone:
            _await_service(*rendezvous_address(options), options.start_timeout or PREFLIGHT_S)
        return
    host, port = rendezvous_address(options)
    if port == 0:
        return
    addresses = _resolve(host, port, options.start_timeout or 0)
    if options.node_rank == 0 and num_nodes >= 1 and _is_local(addresses):
        _check_free(host, port)
    elif options.node_rank:
        _await_machine_0(host, port, options.start_timeout or PREFLIGHT_S)


def _is_python_file(name: str) -> bool:
    return name.endswith(".py") and Path(name).is_file()


def is_held_by_machine_0(options: argparse.Namespace) -> bool:
    """Return whether the launchers meet at a store of machine 0, and not at a service such as etcd."""
    return options.rdzv_backend in ("static", "c10d")


def rendezvous_address(options: argparse.Namespace) -> tuple[str, int]:
    """Return the host and the port at which the launchers of several machines meet."""
    if not options.rdzv_endpoint:
        return options.master_addr, options.master_port or 29500
    host, _, port = options.rdzv_endpoint.rpartition(":")
    default_port = 2379 if options.rdzv_backend in ETCD else 29400
    return (host, int(port)) if host and port.isdecimal() else (options.rdzv_endpoint, default_port)


def own_address(host: str) -> str | None:
    """Return the address by which this machine reaches another; None if no interface does."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def describe_route(host: str) -> str:
    """Return the interface and the address by which this machine reaches another."""
    address = own_address(host)
    return "no interface reaches it" if address is None else f"interface {_interface_of(address)} ({address})"


def _facts() -> dict[str, object]:
    """Return the host, script, versions and missing paths of this rank."""
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path("-c")
    content = hashlib.sha256(script.read_bytes()).hexdigest()[:12] if script.is_file() else ""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    paths = json.loads(os.environ.get(DATA_PATHS, "[]"))
    return {
        "host": socket.gethostname(),
        "script": f"{script.name} {content}".strip(),
        "versions": versions,
        "missing": _missing_paths(paths),
    }


def _missing_paths(paths: Iterable[str]) -> list[str]:
    """Return the local paths that do not exist here; remote ones are left to the reader."""
    return [path for path in paths if "://" not in path and not Path(path).exists()]


def _difference(first: Mapping[str, object], own: Mapping[str, object], rank: int) -> str:
    """Describe the differences between this rank and rank 0; empty if there are none."""
    problems = [f"does not see {path}" for path in own["missing"]]  # type: ignore[attr-defined]
    if first["script"] != own["script"]:
        problems.append(f"runs the script `{own['script']}`, rank 0 `{first['script']}` (name and content)")
    versions: tuple[dict[str, str], dict[str, str]] = (first["versions"], own["versions"])  # type: ignore[assignment]
    for package in sorted({*versions[0], *versions[1]}):
        first_version, own_version = (installed.get(package, "absent") for installed in versions)
        if first_version != own_version:
            problems.append(f"has {package} {own_version}, rank 0 has {first_version}")
    return f"rank {rank} on {own['host']} " + "; ".join(problems) if problems else ""


def _wait(store: Store, names: list[str], timeout_s: float) -> bool:
    try:
        store.wait(names, timedelta(seconds=timeout_s))
    except RuntimeError:
        return False
    return True


def _absent_message(absent: tuple[int, ...], world: World, timeout_s: float) -> str:
    address, port = os.environ.get("MASTER_ADDR", "?"), os.environ.get("MASTER_PORT", "?")
    shown = ", ".join(map(str, absent[:16])) + (", …" if len(absent) > 16 else "")
    return (
        f"after {timeout_s:g} s rank{'s' if len(absent) > 1 else ''} {shown} of {world.world_size} had not "
        f"appeared (this is rank {world.rank} on {socket.gethostname()}, {describe_route(address)}). Ranks "
        f"meet at `MASTER_ADDR`:`MASTER_PORT` = {address}:{port}. Look at the logs of the absent ranks, and "
        f"whether their machines reach that port. On machines with several networks, set {INTERFACES} to the "
        "shared one"
    )


def _resolve(host: str, port: int, timeout_s: float) -> list[str]:
    """Return the addresses of a host; an engine may give it its name within `timeout_s` only."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return sorted({str(info[4][0]) for info in found})
        except OSError as error:
            if time.monotonic() > deadline:
                raise PreflightError(
                    f"the host `{host}` (`--master_addr`) cannot be resolved on {socket.gethostname()}: "
                    f"{error}. Use an address of machine 0 in numbers"
                ) from error
            time.sleep(0.5)


def _is_local(addresses: list[str]) -> bool:
    """Return whether one of these addresses is this machine's."""
    for address in addresses:
        with socket.socket(
            socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM
        ) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                continue
            return True
    return False


def _check_free(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise PreflightError(
                f"port {port} of {host} (`--master_port`) cannot be used: {error}. Another job may use it; "
                "choose another port, the same on all machines"
            ) from error


def await_listener(host: str, port: int, timeout_s: float) -> None:
    """Wait until a server listens at an address.

    A `TCPStore` of torch, given the same time, waits up to as long again before its second attempt.

    Raises:
        OSError: No server did within `timeout_s`; the reason is that of the last attempt.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=min(timeout_s, 5)).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def _await_machine_0(host: str, port: int, timeout_s: float) -> None:
    try:
        await_listener(host, port, timeout_s)
    except OSError as error:
        raise AbsentRanksError(
            f"{host}:{port} (`--master_addr`, `--master_port`) did not answer within {timeout_s:g} s: "
            f"{error}. This is {socket.gethostname()}, {describe_route(host)}. Is `hocket-launch` running on "
            "machine 0, and is the port open in its firewall? On machines with several networks, set "
            f"{INTERFACES}",
            (0,),
        ) from error


def _await_service(host: str, port: int, timeout_s: float) -> None:
    try:
        await_listener(host, port, timeout_s)
    except OSError as error:
        raise AbsentRanksError(
            f"{host}:{port} (`--rdzv-endpoint`), where the launchers are to meet, did not answer within "
            f"{timeout_s:g} s: {error}. This is {socket.gethostname()}, {describe_route(host)}. Is etcd "
            "running there, and is its port open in the firewall?"
        ) from error


def _interface_of(address: str) -> str:
    """Return the name of the interface with this IPv4 address."""
    if sys.platform != "linux":
        return "unknown"
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                # SIOCGIFADDR
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name[:15].encode()))
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return "unknown"

"""The `hocket-launch` command: torch's elastic agent with one command line for one machine and for many."""

import argparse
import contextlib
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import elastic_launch

from hocket.dist.errors import AbsentRanksError, ConfigError, DistError
from hocket.dist.launch.absent_machines import describe_absent_machines, notice_absent_machines
from hocket.dist.launch.agent_options import DEFAULT_PORT, missing_options
from hocket.dist.launch.attempts import shared_attempts
from hocket.dist.launch.completion import FLAGS, completion
from hocket.dist.launch.engines.job import ray_command
from hocket.dist.launch.engines.kubernetes import job_set
from hocket.dist.launch.engines.slurm import batch_script
from hocket.dist.launch.logs import RankLogs, check_format
from hocket.dist.launch.notices import set_variables
from hocket.dist.launch.options import parse
from hocket.dist.launch.restarts import memory_folders, restarts_without_progress
from hocket.dist.launch.verdicts.job_findings import JobFindings
from hocket.dist.launch.warm.starter import RankServer, Starter, warm_ranks
from hocket.dist.ranks import rank_command
from hocket.dist.ranks.addresses import is_rank
from hocket.dist.ranks.job_place import JobPlace, JobPlaceError, read_starter
from hocket.dist.ranks.preflight import DATA_PATHS, check_launcher
from hocket.dist.ranks.rank_command import LAUNCHER
from hocket.dist.ranks.world import export_world

STATUS_FILE = "HOCKET_STATUS_FILE"
"""The variable that names the JSON file in which the first rank of a machine records the last commit.

It has the checkpoint's name, the folder, and the batch, by which restarts without progress are counted:
`{"checkpoint": …, "folder": …, "batch": …}`.
"""


def main(argv: Sequence[str] | None = None, *, server: RankServer | str = "") -> int:
    """Run `hocket-launch`.

    Args:
        argv: The arguments after the command's name; `sys.argv[1:]` by default.
        server: The process from which ranks are forked, or the reason why there is none.

    Returns:
        The exit code: 0, that of the rank which failed first, or 128 + the signal that ended the job.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["plan"]:
        # It imports FSDP2, which takes a second that a launch has no use for.
        from hocket.dist.launch.plan import plan

        return plan(arguments[1:])
    if arguments[:1] and arguments[0].partition("=")[0] in FLAGS:
        return completion(arguments)
    options = parse(arguments)
    for name in ("stdout", "stderr"):
        if problem := check_format(f"--{name}", getattr(options, name), int(options.nproc_per_node)):
            print(f"hocket-launch: error: {problem}", file=sys.stderr)
            return 2
    if options.verbose:
        logging.basicConfig(level=logging.INFO)
    starter = Starter(server, options.preload)
    if options.job is not None:
        starter.close()
        return _submit(options)
    if options.cold or options.no_python or options.run_path:
        starter.close()
    try:
        if place := _place_of_task():
            _run_in_place(options, place)
        check_launcher(options)
    except (DistError, JobPlaceError) as error:
        print(f"hocket-launch: error: {error}", file=sys.stderr)
        return 1
    return _run(options, starter)


def _submit(options: argparse.Namespace) -> int:
    """Submit the job by the engine's own command, or print what would be submitted; return the exit code."""
    job, text = options.job, ""
    if options.on == "slurm":
        command, text = ["sbatch"], batch_script(job)
    elif options.on == "ray":
        command = ray_command(job)
    else:
        command, text = ["kubectl", "create", *job.engine_options, "-f", "-"], job_set(job)
    if options.prints_job:
        print(text or f"{shlex.join(command)}\n", end="")
        return 0
    if shutil.which(command[0]) is None:
        print(
            f"hocket-launch: error: `{command[0]}` was not found, by which a job is submitted. Submit from a "
            "machine that has it, or pass `--print` and take the text there",
            file=sys.stderr,
        )
        return 1
    return subprocess.run(command, input=text, text=True, check=False).returncode


def _run(options: argparse.Namespace, starter: Starter) -> int:
    """Start the ranks under torch's agent and report how they ended."""
    try:
        folder = None if options.log_dir is not None else tempfile.mkdtemp(prefix="hocket-launch-")
    except OSError as error:
        print(
            f"hocket-launch: error: no temporary folder can be created for the ranks' output: {error}. Set "
            "`TMPDIR` to a folder that can be written to, or pass `--log-dir`",
            file=sys.stderr,
        )
        return 1
    options.log_dir = options.log_dir or folder
    _set_environment(options)
    is_kept = False
    findings = JobFindings(options)
    try:
        _start(options, starter, findings)
    except DistError as error:
        print(f"hocket-launch: error: {error}", file=sys.stderr)
        return 1
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        is_kept = folder is None or int(options.nproc_per_node) > 1
        print(findings.report(rank, first, kept=is_kept), file=sys.stderr, flush=True)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as caught:
        checkpoint = _last_checkpoint()
        checkpoint_note = f"; the last committed checkpoint is {checkpoint}" if checkpoint else ""
        print(f"hocket-launch: ended all ranks after {caught.sigval.name}{checkpoint_note}", file=sys.stderr)
        return 128 + int(caught.sigval)
    finally:
        if folder is not None and not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def _start(options: argparse.Namespace, starter: Starter, findings: JobFindings) -> None:
    """Run the agent until all ranks have ended, as `torchrun` does, with our log files."""
    _, num_nodes = torchrun.parse_min_max_nnodes(options.nnodes)
    has_own_rendezvous = options.rdzv_endpoint or options.rdzv_backend not in ("static", "c10d")
    if options.standalone or (num_nodes == 1 and options.master_port is None and not has_own_rendezvous):
        options.rdzv_backend, options.rdzv_endpoint = "c10d", "localhost:0"
        options.rdzv_id = f"{os.getpid()}"
        # Otherwise the ranks meet under this machine's name, which does not resolve in many containers.
        options.local_addr = options.local_addr or "127.0.0.1"
    if options.master_port is None:
        options.master_port = DEFAULT_PORT
    if options.rdzv_backend == "static" and "timeout" not in options.rdzv_conf:
        options.rdzv_conf = f"{options.rdzv_conf},timeout={options.start_timeout or 60}".strip(",")
    config, command, arguments = _configure(options)
    logs = config.logs_specs
    if isinstance(command, str):
        starter.prepare([command, *arguments])
    try:
        with (
            findings.kept(logs),
            missing_options(options, findings),
            warm_ranks(starter),
            notice_absent_machines(options, logs),
            shared_attempts(options, logs),
            memory_folders(options),
            restarts_without_progress(options, Path(os.environ[STATUS_FILE]), findings),
        ):
            elastic_launch(config=config, entrypoint=command)(*arguments)
    except (DistStoreError, DistNetworkError, RendezvousError) as error:
        if (verdict := findings.conclude_without_host_0()) is not None:
            raise AbsentRanksError(verdict.text) from error
        raise AbsentRanksError(describe_absent_machines(options, logs, error)) from error


def _configure(options: argparse.Namespace) -> tuple[Any, Any, list[Any]]:
    """Return the agent's configuration with our log files, the command of a rank and its arguments."""
    try:
        config, command, arguments = torchrun.config_from_args(options)
    except ValueError as error:
        raise ConfigError(f"torchrun does not take these options: {error}") from error
    log_specs: Any = config.logs_specs
    if options.logs_specs is None:
        config.logs_specs = RankLogs(
            options.log_dir,
            local_world_size=config.nproc_per_node,
            stdout=options.stdout,
            stderr=options.stderr,
            redirects=log_specs._redirects,
            tee=log_specs._tee,
            local_ranks_filter=log_specs._local_ranks_filter,
        )
    if isinstance(command, str):
        command, arguments = sys.executable, ["-P", rank_command.__file__, command, *arguments]
    return config, command, arguments


def _set_environment(options: argparse.Namespace) -> None:
    """Set the variables that the ranks inherit."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[LAUNCHER] = str(os.getpid())
    set_variables(options)
    os.environ.setdefault(STATUS_FILE, str(Path(options.log_dir) / "status.json"))
    if options.data:
        os.environ[DATA_PATHS] = json.dumps(options.data)
    _, num_nodes = torchrun.parse_min_max_nnodes(options.nnodes)
    if num_nodes == 1 and sys.platform == "linux":
        # Otherwise gloo resolves this machine's name, which fails in some containers.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if options.flight_recorder:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ.setdefault("TORCH_FR_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(Path(options.log_dir) / "flight_recorder_"))


def _last_checkpoint() -> str | None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(json.loads(Path(os.environ[STATUS_FILE]).read_text())["checkpoint"])
    return None


def _place_of_task() -> JobPlace | None:
    """Return this process's place if a launcher was started for every rank, not for every host."""
    place = read_starter(os.environ)
    return place if place is not None and is_rank(place) else None


def _run_in_place(options: argparse.Namespace, place: JobPlace) -> None:
    """Replace this process by the script: all ranks are started already, so there is nothing to launch.

    Raises:
        ConfigError: An option asks for what only a launcher of several ranks can do.
    """
    count, starter = int(options.nproc_per_node), place.starter
    if options.has_own_count and count > 1:
        raise ConfigError(
            f"`-n` is {count}, and {starter} has started {place.world_size} launchers, several on a host. "
            "Leave `-n` out, and each of them becomes one rank; or start one launcher on each host"
        )
    if options.max_restarts:
        raise ConfigError(
            f"`--max-restarts` is {options.max_restarts}, and {starter} has started the ranks, which the "
            "launcher cannot start again. Start one launcher on each host"
        )
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    export_world()
    set_variables(options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.data:
        os.environ[DATA_PATHS] = json.dumps(options.data)
    command = [] if options.no_python else [sys.executable, "-u"]
    command += ["-m"] if options.module else []
    command += [options.training_script, *map(rank_command.expand, options.training_script_args)]
    os.execvp(command[0], command)

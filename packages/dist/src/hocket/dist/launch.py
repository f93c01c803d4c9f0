"""The `hocket-launch` command: torchrun, with defaults for one machine and a word on the rank that failed."""

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

_HELP = """\
usage: hocket-launch -n N [options] script.py [script's arguments]
       hocket-launch -n N [options] -m package.module [its arguments]

Start N processes of a training script, one a rank, and end when they have ended.

  -n, --nproc-per-node N   processes on this machine: a number, `gpu`, `cpu` or `auto` (default 1)
  -m, --module             the script is a module, as with `python -m`
  --log-dir DIR            keep the logs of all ranks but the machine's first there
  --max-restarts K         start all ranks anew, up to K times, when one fails (default 0)
  --shutdown-timeout S     seconds between a signal passed on and SIGKILL (default 30)
  --nnodes M, --node-rank R, --master-addr HOST, --master-port PORT
                           several machines: the same command on each, with its own R
  -h, --help               this text
  --help-torchrun          every option of torchrun; all are accepted

Each process finds its place in RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
The first rank of a machine writes to the terminal, the others to files; when a job fails, the first rank to
fail is named, the end of its log is shown, and the files are kept.

SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are passed on to every rank, and the command ends only
when they have. Its exit code is that of the rank which failed first (128 + n where signal n killed it), or
128 + n after it got signal n itself.

OMP_NUM_THREADS is 1 for each process unless you set it: N processes with as many threads as cores would slow
one another down.
"""
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
_LOG_TAIL_BYTES = 6000
# What a rank raises because another one has left.
_FOLLOWS = re.compile(
    r"\b(CollectiveError|DistBackendError|Connection closed by peer|Connection reset by peer)\b"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hocket-launch`.

    Args:
        argv: The arguments after the command's name; `sys.argv[1:]` by default.

    Returns:
        The exit code: 0, that of the rank which failed first, or 128 + the signal that ended the job.
    """
    options = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    logs = _set_defaults(options)
    try:
        torchrun.run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        _report(rank, first, log_dir=options.log_dir)
        logs = None  # kept
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as caught:
        print(f"hocket-launch: ended all ranks after {caught.sigval.name}", file=sys.stderr)
        return 128 + int(caught.sigval)
    finally:
        if logs is not None:
            shutil.rmtree(logs, ignore_errors=True)
    return 0


class _Parser(argparse.ArgumentParser):
    """Torchrun's arguments under our help."""

    def format_help(self) -> str:
        return _HELP

    def format_usage(self) -> str:
        return _HELP.partition("\n\n")[0] + "\n"


class _TorchrunHelp(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(argparse.ArgumentParser.format_help(parser), end="")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    theirs = torchrun.get_args_parser()
    parser = _Parser(prog="hocket-launch", parents=[theirs], add_help=False)
    parser.add_argument("-n", "--nproc", dest="nproc_per_node", default=argparse.SUPPRESS)
    parser.add_argument("--help-torchrun", nargs=0, action=_TorchrunHelp)
    return parser


def _set_defaults(options: argparse.Namespace) -> Path | None:
    """Fill in what was not asked for; return the folder of logs, if we made one."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if hasattr(options, "signals_to_handle") and options.signals_to_handle == "SIGTERM,SIGINT,SIGHUP,SIGQUIT":
        # torchrun itself would die of SIGUSR1, Slurm's usual warning, and leave its workers running.
        options.signals_to_handle = _SIGNALS
    _, num_machines = torchrun.parse_min_max_nnodes(options.nnodes)
    if num_machines == 1 and sys.platform == "linux":
        # Else gloo looks this machine's name up, which some containers cannot.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    local_world_size = torchrun.determine_local_world_size(options.nproc_per_node)
    options.nproc_per_node = str(local_world_size)
    asked = options.redirects != "0" or options.tee != "0"
    if asked or local_world_size == 1:
        return None
    # "3" is stdout and stderr; the machine's first rank is not in the list and keeps the terminal.
    options.redirects = ",".join(f"{local_rank}:3" for local_rank in range(1, local_world_size))
    if options.log_dir is not None:
        return None
    options.log_dir = tempfile.mkdtemp(prefix="hocket-launch-")
    return Path(options.log_dir)


def _report(rank: int, failure: ProcessFailure, *, log_dir: str | None) -> None:
    """Say on stderr which rank failed first, how, and the end of what it wrote."""
    code = failure.exitcode
    how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    lines = [f"hocket-launch: rank {rank} (pid {failure.pid}) ended first, {how}"]
    # A dict where the script recorded its error, whatever torch's annotation says.
    recorded: Any = failure.message
    trace = recorded.get("extraInfo", {}).get("py_callstack") if isinstance(recorded, dict) else None
    log = _stderr_of(failure.local_rank, log_dir)
    if trace:
        lines.append(trace.rstrip())
    elif log is not None:
        lines += [f"--- the end of {log}", _tail(log)]
    elif failure.local_rank == 0:
        lines.append("Its own words stand above.")
    if log_dir is not None:
        if log is None or _FOLLOWS.search(_tail(log)):
            lines += _causes(failure.local_rank, log_dir)
        lines.append(f"The logs of the ranks that do not write to the terminal are kept in {log_dir}")
    print("\n".join(lines), file=sys.stderr)


def _stderr_of(local_rank: int, log_dir: str | None) -> Path | None:
    """Return the file of what a rank wrote on stderr in its last attempt, if it wrote anything."""
    if log_dir is None:
        return None
    logs = [log for log in Path(log_dir).glob(f"*/attempt_*/{local_rank}/stderr.log") if log.stat().st_size]
    return max(logs, key=lambda log: log.stat().st_mtime, default=None)


def _causes(failed: int, log_dir: str) -> list[str]:
    """Return the end of the first other log that tells of an error of its rank's own.

    A rank that raises leaves the others with a broken collective, and one of those may be quicker to end.
    What the first rank wrote is on the terminal and not known here.
    """
    local_ranks = {int(log.parent.name) for log in Path(log_dir).glob("*/attempt_*/*/stderr.log")} - {failed}
    logs = [log for rank in sorted(local_ranks) if (log := _stderr_of(rank, log_dir)) is not None]
    logs.sort(key=lambda log: log.stat().st_mtime)
    for log in logs:
        end = _tail(log)
        if "Traceback (most recent call last)" in end and not _FOLLOWS.search(end):
            return [f"Another rank's error may be the cause; the end of {log}", end]
    return []


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
        return file.read().decode(errors="replace").strip()


if __name__ == "__main__":
    sys.exit(main())

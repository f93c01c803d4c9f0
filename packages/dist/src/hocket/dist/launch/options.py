"""The command line of `hocket-launch`: torchrun's options, Composer's, and ours."""

import argparse
import importlib.util
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn

import torch
from torch.distributed import run as torchrun

from hocket.dist.errors import ConfigError, WorldError
from hocket.dist.launch.agent_options import DEFAULT_SIGNALS, add_missing_options
from hocket.dist.launch.attempts import use_c10d, use_etcd
from hocket.dist.launch.engines.job import add_engine_options, check_engine_options, engine_job
from hocket.dist.option_names import OptionParser
from hocket.dist.ranks.addresses import launcher_options
from hocket.dist.ranks.job_place import JobPlaceError, read_starter
from hocket.dist.ranks.preflight import ETCD

HELP = """\
usage: hocket-launch -n N [options] script.py [script's arguments]
       hocket-launch -n N [options] -m package.module [its arguments]
       hocket-launch -n N [options] -c command [its arguments]
       hocket-launch plan --help

Start N processes of a training script, one a rank, and end when they have ended.

  -n, --nproc N            processes on this machine: a number, `gpu`, `cpu` or `auto` (default: one for each
                           GPU, 1 without GPUs)
  -m, --module_mode        the script is a module, as with `python -m`
  -c, --command_mode       the script is a command, run without Python
  --compat NAME            the script runs on `hocket.compat.NAME`, such as `composer`
  --preload NAME           a module that is imported once for all ranks, on top of torch and Hocket; may be
                           repeated
  --cold                   let each rank import everything itself
  -v, --verbose            log what the launcher does
  --version                print versions
  -h, --help               this text
  --help-torchrun          every option of torchrun; all are accepted
  --install-completion [bash|zsh|fish], --show-completion [bash|zsh|fish]
                           complete options in a shell, by default that of SHELL

Several machines: the same command on each with its own --node_rank, or through `srun`, which sets these.
  --nnodes M               number of machines; MIN:MAX starts again with the machines that are left
  --node_rank R            this machine, from 0
  --master_addr HOST, --master_port PORT
                           an address of machine 0 that the others reach, and a free port there
  --start-timeout S        seconds in which all machines have to start (default 60)
  --world_size W           processes on all machines (Composer); M is W / N
  --base_rank B            first rank of this machine (Composer); R is B / N
                           What is not given is read from WORLD_SIZE, BASE_RANK, NODE_RANK, MASTER_ADDR,
                           MASTER_PORT and LOCAL_WORLD_SIZE (N), where RANK is not set

On an engine: submit the job, or print it. Every other option is passed on to the launcher of each machine.
  --on ENGINE              slurm (`sbatch`), kubernetes (a JobSet) or ray (`ray job submit`)
  --print                  print what would be submitted
  --gpus G                 GPUs of each machine (default N; 0 for none)
  --cpus C                 CPUs of each machine (default: on Slurm all, else the engine's)
  --image IMAGE            Kubernetes: the container image, with the script
  --grace S                seconds between the notice and the end (default 120)
  --engine-options=TEXT    options of the engine's own command, such as "--partition=gpu --time=8:00:00"

Output: the first rank of a machine writes to the terminal, the others to files.
  --stdout FORMAT, --stderr FORMAT
                           names of those files, with the fields {rank}, {local_rank}, {world_size},
                           {node_rank}, {local_world_size}
  --log-dir DIR            keep the files of all ranks there

Faults:
  --max-restarts K         start all ranks anew, up to K times, when one fails (default 0)
  --shutdown-timeout S     seconds between SIGTERM and SIGKILL after the failure of a rank (default 30), and
                           at most 0.3 where that rank failed by itself
  --save-signals NAMES     signals on which the trainer saves and stops (default SIGTERM,SIGUSR1,SIGHUP)
  --grace S                seconds that ranks have to save after such a signal (default: those of
                           --shutdown-timeout, or until Slurm's time limit)
  --data PATH              a path that every rank must see before training; may be repeated
  --no-flight-recorder     do not record collectives

Each process finds its place in RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and
MASTER_PORT.
When a job fails, the rank that failed first is named with its traceback, the other ranks by name, and the
files are kept. SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are passed on to every rank once, and
the command ends when they have ended; SIGQUIT, or a second Ctrl-C, ends them at once. Its exit code is that
of the rank which failed first (128 + n where signal n killed it), or 128 + n after it received signal n
itself.

OMP_NUM_THREADS is 1 for each process unless you set it: N processes with as many threads as cores would slow
one another down.
"""
SIGNALS = f"{DEFAULT_SIGNALS},SIGUSR1,SIGUSR2"


class UsageError(Exception):
    """The options contradict one another."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments after the command's name and fill in the options that were not given.

    Exits with code 2 and a message if options contradict one another.
    """
    parser = make_parser()
    options = parser.parse_args(argv)
    options.has_own_count = options.nproc_per_node is not None
    try:
        check_engine_options(options)
        if options.on is None:
            _read_environment(options)
        _check_numbers(options)
        _resolve_nodes(options, argv)
        options.job = None if options.on is None else engine_job(options, argv)
        _resolve_compat(options)
    except (UsageError, ConfigError, WorldError, JobPlaceError) as error:
        parser.error(str(error))
    if options.signals_to_handle == DEFAULT_SIGNALS:
        # torchrun itself would die of SIGUSR1, Slurm's usual warning, and leave its workers running.
        options.signals_to_handle = ",".join(filter(None, [SIGNALS, options.save_signals]))
    return options


class _Parser(OptionParser):
    """Torchrun's arguments under our help."""

    note = "Options of the script follow the script"

    def format_help(self) -> str:
        return HELP

    def format_usage(self) -> str:
        return HELP.partition("\n\n")[0] + "\n"

    def error(self, message: str) -> NoReturn:
        if message == "argument --engine-options: expected one argument":
            message += ". Write it with an equals sign: `--engine-options='--partition=gpu'`"
        super().error(message)


class _TorchrunHelp(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(argparse.ArgumentParser.format_help(parser), end="")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of torchrun's options, Composer's, and ours."""
    torchrun_parser = torchrun.get_args_parser()
    parser = _Parser(prog="hocket-launch", parents=[torchrun_parser], add_help=False, allow_abbrev=False)
    # torchrun's defaults would hide which options were not given; `PET_…` are its variables for options.
    for name in ("nproc_per_node", "node_rank", "master_addr"):
        parser.set_defaults(**{name: os.environ.get(f"PET_{name.upper()}")})
    add_missing_options(parser)
    parser.add_argument("-n", "--nproc", dest="nproc_per_node", default=argparse.SUPPRESS)
    parser.add_argument("--module_mode", dest="module", action="store_true", default=argparse.SUPPRESS)
    parser.add_argument(
        "-c", "--command_mode", dest="no_python", action="store_true", default=argparse.SUPPRESS
    )
    parser.add_argument("--compat", metavar="NAME")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("--world_size", "--world-size", type=int)
    parser.add_argument("--base_rank", "--base-rank", type=int)
    parser.add_argument("--stdout")
    parser.add_argument("--stderr")
    parser.add_argument("--data", action="append", default=[])
    parser.add_argument("--preload", action="append", default=[])
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--save-signals")
    parser.add_argument("--grace", type=float)
    parser.add_argument("--start-timeout", type=int)
    parser.add_argument("--no-flight-recorder", dest="flight_recorder", action="store_false")
    add_engine_options(parser)
    versions = (
        f"hocket-dist {version('hocket-dist')}, torch {torch.__version__}, Python {sys.version.split()[0]}"
    )
    parser.add_argument("--version", action="version", version=versions)
    parser.add_argument("--help-torchrun", nargs=0, action=_TorchrunHelp)
    return parser


def _check_numbers(options: argparse.Namespace) -> None:
    """Refuse numbers for which torch's agent would print a traceback or no message at all."""
    for name, value, least, most in (
        ("--master_port", options.master_port, 0, 65535),
        ("--max-restarts", options.max_restarts, 0, None),
        ("--shutdown-timeout", options.shutdown_timeout, 0, None),
        ("--world_size", options.world_size, 1, None),
        ("--base_rank", options.base_rank, 0, None),
        ("--grace", options.grace, 0, None),
        ("--start-timeout", options.start_timeout, 1, None),
    ):
        if value is not None and (value < least or (most is not None and value > most)):
            expected = f"{least} or more" if most is None else f"{least} to {most}"
            raise UsageError(f"`{name}` is {value}, expected {expected}")
    if "" in options.data:
        raise UsageError("`--data` is empty, expected a path")
    for option, names in (
        ("--signals-to-handle", options.signals_to_handle),
        ("--save-signals", options.save_signals),
    ):
        for name in () if names is None else names.split(","):
            if name.strip() not in signal.Signals.__members__:
                raise UsageError(f"`{option}` has {name.strip()!r}, which is no signal of this system")


def _read_environment(options: argparse.Namespace) -> None:
    """Fill in options that were not given from the variables that Composer's launcher reads, too.

    With `RANK` set, only `LOCAL_WORLD_SIZE` is read: operators of Kubernetes set `RANK` to the number of the
    machine and `WORLD_SIZE` to the number of machines. The same holds in a step of Slurm and under `mpirun`,
    which count their own tasks.
    """
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "0")
    if options.nproc_per_node is None and local_world_size != "0":
        options.nproc_per_node = local_world_size
    if "RANK" in os.environ:
        return
    for name in () if _is_started_by_others() else ("world_size", "base_rank", "node_rank"):
        if getattr(options, name) is None:
            setattr(options, name, _read_number(name.upper()))


def _is_started_by_others() -> bool:
    return "SLURM_STEP_ID" in os.environ or read_starter(os.environ) is not None


def _read_address(options: argparse.Namespace) -> None:
    """Fill in the address of machine 0 likewise; a job of one machine chooses a free port instead."""
    if options.master_addr is None:
        options.master_addr = os.environ.get("MASTER_ADDR") or None
    if options.master_port is None:
        options.master_port = _read_number("MASTER_PORT", most=65535)


def _read_number(variable: str, most: int | None = None) -> int | None:
    text = os.environ.get(variable)
    if not text:
        return None
    if not text.isdecimal() or (most is not None and int(text) > most):
        expected = "from 0" if most is None else f"from 0 to {most}"
        raise UsageError(f"the variable `{variable}` is {text!r}, expected a whole number {expected}")
    return int(text)


def _count_processes(given: str | None) -> int:
    """Return the number of ranks on this machine."""
    try:
        count: int = torchrun.determine_local_world_size(given or str(max(torch.cuda.device_count(), 1)))
    except ValueError as error:
        raise UsageError(
            f"`-n` is {given!r}, expected a number of processes, `gpu`, `cpu` or `auto` ({error})"
        ) from None
    if count < 1:
        raise UsageError(f"`-n` is {given!r}, expected at least 1 process")
    return count


def _parse_nodes(text: str) -> tuple[int, int]:
    """Return the least and the greatest number of machines of `--nnodes`."""
    words = text.split(":")
    if (
        len(words) > 2
        or not all(word.isdecimal() for word in words)
        or not 1 <= int(words[0]) <= int(words[-1])
    ):
        raise UsageError(f"`--nnodes` is {text!r}, expected a number of machines from 1, or MIN:MAX")
    return int(words[0]), int(words[-1])


def _resolve_nodes(options: argparse.Namespace, argv: Sequence[str]) -> None:
    """Derive the numbers of processes and machines, and this machine's rank, from the given options."""
    count = _count_processes(options.nproc_per_node)
    options.nproc_per_node = str(count)
    if options.module and options.no_python:
        raise UsageError("`-m` and `-c` are both given: the script is a module or a command, not both")
    least, most = _parse_nodes(options.nnodes)
    is_open = options.nnodes == "1:1" or least < most
    told = launcher_options(os.environ) if is_open and not options.on else {}
    if told and (most == 1 or least <= int(told["nnodes"]) <= most):
        nodes = told.pop("nnodes")
        options.nnodes = nodes if most == 1 else options.nnodes
        for name, value in told.items():
            if getattr(options, name) is None:
                setattr(options, name, value if name == "master_addr" else int(value))
    if options.world_size is not None:
        _resolve_world_size(options, count, argv)
    least, most = _parse_nodes(options.nnodes)
    if options.standalone and most > 1:
        raise UsageError(
            f"`--standalone` is for one machine, and `--nnodes` is {options.nnodes}. Give one of them"
        )
    _resolve_node_rank(options, count, most)
    if most > 1:
        _read_address(options)
    if most > 1 and options.rdzv_backend == "static" and not options.rdzv_endpoint:
        if options.master_addr is None and options.node_rank:
            raise UsageError(
                f"`--nnodes {options.nnodes}` needs `--master_addr HOST`, an address of machine 0 that this "
                "machine reaches"
            )
        if least != most:
            use_c10d(options)
    elif options.rdzv_backend in ETCD and not options.standalone:
        use_etcd(options)
    options.node_rank = options.node_rank or 0
    options.master_addr = options.master_addr or "127.0.0.1"


def _resolve_world_size(options: argparse.Namespace, count: int, argv: Sequence[str]) -> None:
    size = options.world_size
    if options.nnodes == "1:1":
        if size % count:
            raise UsageError(
                f"`--world_size {size}` is no multiple of `-n {count}`. Say `--nnodes`, the number of "
                "machines, and on each its own `-n`"
            )
        options.nnodes = str(size // count)
    node_rank = options.node_rank or (options.base_rank or 0) // count
    if size == count and node_rank:
        suggestion = shlex.join(["hocket-launch", *_with_world_size(argv, count * (node_rank + 1))])
        raise UsageError(
            f"`--world_size {size}` with `-n {count}` is one machine, but this is machine {node_rank}. "
            f"`--world_size` counts the processes of all machines. Did you mean:\n    {suggestion}"
        )
    least, most = _parse_nodes(options.nnodes)
    if not least * count <= size <= most * count or size % count:
        raise UsageError(
            f"`--world_size {size}` contradicts `--nnodes {options.nnodes}` with `-n {count}`, which is "
            f"{most * count} processes. Leave `--world_size` out"
        )


def _resolve_compat(options: argparse.Namespace) -> None:
    """Have the module `hocket.compat.NAME` run the script, as `python -m` would."""
    if options.compat is None:
        return
    if options.no_python:
        raise UsageError("`--compat` runs a Python script or module, and `-c` is given. Give one of them")
    name = f"hocket.compat.{options.compat}"
    try:
        spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise UsageError(f"there is no `{name}` that runs scripts. Did you mean `--compat composer`?")
    script = ["-m", options.training_script] if options.module else [options.training_script]
    options.training_script_args = [*script, *options.training_script_args]
    options.training_script, options.module = name, True


def _with_world_size(argv: Sequence[str], size: int) -> list[str]:
    """Return the command line with another world size."""
    changed = list(argv)
    for index, word in enumerate(changed):
        if word in ("--world_size", "--world-size") and index + 1 < len(changed):
            changed[index + 1] = str(size)
        elif word.startswith(("--world_size=", "--world-size=")):
            changed[index] = f"--world_size={size}"
    # Without the option, the size came from the environment.
    return changed if changed != list(argv) else ["--world_size", str(size), *argv]


def _resolve_node_rank(options: argparse.Namespace, count: int, num_nodes: int) -> None:
    if options.base_rank is not None:
        if options.base_rank % count:
            raise UsageError(
                f"`--base_rank {options.base_rank}` is no multiple of `-n {count}`. Say `--node_rank` instead"
            )
        derived = options.base_rank // count
        if options.node_rank not in (None, derived):
            raise UsageError(
                f"`--base_rank {options.base_rank}` with `-n {count}` is machine {derived}, but "
                f"`--node_rank` is {options.node_rank}. Give only one of them, or `--nnodes` in place of "
                "`--world_size` where machines have unlike numbers of processes"
            )
        options.node_rank = derived
    if options.node_rank is not None and not 0 <= options.node_rank < num_nodes:
        raise UsageError(
            f"`--node_rank` is {options.node_rank}, expected 0 to {num_nodes - 1} of {num_nodes} machines"
        )

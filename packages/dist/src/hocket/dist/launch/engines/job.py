"""The job that `hocket-launch --on ENGINE` describes: machines, their processes, and the command of each."""

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hocket.dist.errors import ConfigError

ENGINES = ("slurm", "kubernetes", "ray")

_DEFAULT_GRACE_S = 120.0
_DEFAULT_SAVE_SIGNALS = "SIGTERM,SIGUSR1,SIGHUP"
# The options that the engine's job does not pass on to its launchers, with the number of their values.
_JOB_OPTIONS = {
    "--on": 1,
    "--print": 0,
    "--engine-options": 1,
    "--gpus": 1,
    "--cpus": 1,
    "--image": 1,
    "--grace": 1,
    "--nnodes": 1,
    "--world_size": 1,
    "--world-size": 1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineJob:
    """A job for an engine.

    Attributes:
        name: The job's name, of lower-case letters, digits and hyphens, a letter first.
        nodes: The number of machines, or MIN:MAX.
        processes: Processes on each machine; None for one on each GPU.
        gpus: GPUs of each machine.
        cpus: CPUs of each machine; None to leave them to the engine.
        image: The container image.
        grace_s: Seconds between a notice and the end.
        save_signals: Names of the signals on which the trainer saves, separated by commas.
        max_restarts: Restarts without progress.
        is_module: Whether the script is a module.
        engine_options: Options of the engine's own command.
        options: The launcher's options on each machine.
        script: The script and its arguments.
    """

    name: str
    nodes: str
    processes: int | None
    gpus: int
    cpus: int | None
    image: str | None
    grace_s: float
    save_signals: str
    max_restarts: int
    is_module: bool
    engine_options: list[str]
    options: list[str]
    script: list[str]


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of jobs on engines."""
    parser.add_argument("--on", choices=ENGINES)
    parser.add_argument("--print", dest="prints_job", action="store_true")
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--cpus", type=int)
    parser.add_argument("--image")
    parser.add_argument("--engine-options", default="")


def check_engine_options(options: argparse.Namespace) -> None:
    """Refuse options that contradict `--on`, before any is filled in.

    Raises:
        ConfigError: An option is given without the other that it needs, or is not for this engine.
    """
    if options.on is None:
        for name in ("prints_job", "gpus", "cpus", "image", "engine_options"):
            if getattr(options, name) not in (None, False, ""):
                option = "--print" if name == "prints_job" else f"--{name.replace('_', '-')}"
                raise ConfigError(f"`{option}` is for a job on an engine. Add `--on {'|'.join(ENGINES)}`")
        return
    for name in ("node_rank", "base_rank", "master_addr"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"`--{name}` is given, and `--on {options.on}` sets it on each machine. Leave it out"
            )
    for name, least in (("gpus", 0), ("cpus", 1)):
        if (value := getattr(options, name)) is not None and value < least:
            raise ConfigError(f"`--{name}` is {value}, expected {least} or more")
    if options.gpus is None and not str(options.nproc_per_node).isdecimal():
        raise ConfigError(
            f"`--on {options.on}` needs `-n N`, processes on each machine, of which each gets a GPU. Pass "
            "`--gpus G`, too, where a machine has another number of GPUs, such as 0"
        )
    if (options.on == "kubernetes") != (options.image is not None):
        problem = (
            "needs `--image`, a container image that has the script"
            if options.image is None
            else "has no `--image`"
        )
        raise ConfigError(f"`--on {options.on}` {problem}")
    if ":" in options.nnodes and options.nnodes != "1:1" and options.on != "slurm":
        raise ConfigError(
            f"`--nnodes` is {options.nnodes}, and `--on {options.on}` starts all machines "
            "together. Give one number"
        )
    if options.on == "ray":
        _check_ray(options)
    try:
        shlex.split(options.engine_options)
    except ValueError as error:
        raise ConfigError(
            f"`--engine-options` is {options.engine_options!r}, which no shell reads: {error}"
        ) from None


def _check_ray(options: argparse.Namespace) -> None:
    """Refuse what Ray's workers, which are no processes of a launcher, do not do."""
    if not str(options.nproc_per_node).isdecimal():
        raise ConfigError("`--on ray` needs `-n N`, workers of Ray on each machine")
    for name, value in (
        ("-c", options.no_python),
        ("--compat", options.compat),
        ("--save-signals", options.save_signals),
        ("--grace", options.grace),
        ("--data", options.data),
        ("--preload", options.preload),
    ):
        if value:
            raise ConfigError(
                f"`{name}` is an option of the launcher, and on Ray no launcher runs. Leave it out"
            )


def engine_job(options: argparse.Namespace, argv: Sequence[str]) -> EngineJob:
    """Return the job of a command line.

    Args:
        options: The parsed options.
        argv: The arguments after the command's name, as they were given.
    """
    own = list(argv[: len(argv) - len(options.training_script_args) - 1])
    least, _, most = str(options.nnodes).partition(":")
    is_module = options.module and options.compat is None
    stem = options.training_script.rpartition(".")[2] if is_module else Path(options.training_script).stem
    return EngineJob(
        name=re.sub(r"[^a-z0-9]+", "-", stem.lower()).lstrip("-0123456789")[:40].rstrip("-") or "train",
        nodes=least if most in ("", least) else options.nnodes,
        processes=int(options.nproc_per_node) if options.has_own_count else None,
        gpus=int(options.nproc_per_node) if options.gpus is None else options.gpus,
        cpus=options.cpus,
        image=options.image,
        grace_s=_DEFAULT_GRACE_S if options.grace is None else options.grace,
        save_signals=options.save_signals or _DEFAULT_SAVE_SIGNALS,
        max_restarts=options.max_restarts,
        is_module=options.module,
        engine_options=shlex.split(options.engine_options),
        options=_without_job_options(own),
        script=list(argv[len(own) :]),
    )


def ray_command(job: EngineJob) -> list[str]:
    """Return the command that submits a script to Ray, which runs it in a worker for each rank.

    Ray places the workers where their GPUs and CPUs are free; each is given its share of those of a machine.
    """
    assert job.processes is not None, "`check_engine_options` asks for it"
    workers = int(job.nodes) * job.processes
    resources = ["--gpus", f"{job.gpus / job.processes:g}"]
    resources += ["--cpus", f"{job.cpus / job.processes:g}"] if job.cpus else []
    program = ["python", "-m", "hocket.dist.ray", "--workers", str(workers), *resources]
    program += ["--max-failures", str(job.max_restarts), *(["-m"] if job.is_module else [])]
    return ["ray", "job", "submit", "--working-dir=.", *job.engine_options, "--", *program, *job.script]


def _without_job_options(words: Sequence[str]) -> list[str]:
    kept: list[str] = []
    skipped = 0
    for word in words:
        name, is_assigned, _ = word.partition("=")
        if skipped:
            skipped -= 1
        elif name in _JOB_OPTIONS:
            skipped = 0 if is_assigned else _JOB_OPTIONS[name]
        else:
            kept.append(word)
    return kept

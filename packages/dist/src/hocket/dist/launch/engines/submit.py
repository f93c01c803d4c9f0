"""The submission of a job to an engine, by the engine's own command."""

import shlex
import shutil
import subprocess

from hocket.dist.errors import ConfigError
from hocket.dist.launch.engines.job import EngineJob
from hocket.dist.launch.engines.kubernetes import job_set
from hocket.dist.launch.engines.slurm import batch_script


def submit(engine: str, job: EngineJob, *, prints: bool) -> int:
    """Submit a job, or print what would be submitted.

    Args:
        engine: One of `ENGINES`.
        job: The job.
        prints: Whether to print it only.

    Returns:
        The exit code of the engine's command.

    Raises:
        ConfigError: The engine's command is not installed here.
    """
    if engine == "slurm":
        command, text = ["sbatch"], batch_script(job)
    elif engine == "ray":
        command, text = _ray_job(job), ""
    else:
        command, text = ["kubectl", "create", *job.engine_options, "-f", "-"], job_set(job)
    if prints:
        print(text or f"{shlex.join(command)}\n", end="")
        return 0
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"`{command[0]}` was not found, by which a job is submitted. Submit from a machine that has it, "
            "or pass `--print` and take the text there"
        )
    return subprocess.run(command, input=text, text=True, check=False).returncode


def _ray_job(job: EngineJob) -> list[str]:
    """Return the command that submits a script to Ray, which runs it in a worker for each rank.

    The nodes of Ray are not told apart: it places the workers where their GPUs and CPUs are free. Each worker is
    given its share of those of a machine.
    """
    assert job.processes is not None, "`check_engine_options` asks for it"
    workers = int(job.nodes) * job.processes
    resources = ["--gpus", f"{job.gpus / job.processes:g}"]
    resources += ["--cpus", f"{job.cpus / job.processes:g}"] if job.cpus else []
    program = ["python", "-m", "hocket.dist.ray", "--workers", str(workers), *resources]
    program += ["--max-failures", str(job.max_restarts), *(["-m"] if job.is_module else [])]
    return ["ray", "job", "submit", "--working-dir=.", *job.engine_options, "--", *program, *job.script]

"""The jobs that `hocket-launch --on ENGINE` prints and submits."""

from __future__ import annotations

import json
import re
import shlex
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hocket.dist import ray
from hocket.dist.errors import PreflightError
from hocket.dist.launch import command as launch
from hocket.dist.launch import options as launch_options
from hocket.dist.ranks import preflight

SCHEMA = json.loads((Path(__file__).parent / "jobset.schema.json").read_text())
SLURM = ["--on", "slurm", "-n", "2"]
KUBERNETES = ["--on", "kubernetes", "-n", "8", "--image", "registry/train:1"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert launch.main([*arguments[:2], "--print", *arguments[2:]]) == 0
    return capsys.readouterr().out


def problems(value: Any, schema: dict[str, Any], place: str = "") -> list[str]:
    """Return where a manifest departs from a structural schema; Kubernetes refuses unknown fields, too."""
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, int | str) and not isinstance(value, bool) else [f"{place}: {value!r}"]
    types = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    expected = types[schema["type"]]
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        return [f"{place}: {value!r} is no {schema['type']}"]
    found = (
        [] if value in schema.get("enum", [value]) else [f"{place}: {value!r} is none of {schema['enum']}"]
    )
    if isinstance(value, list):
        return found + [text for item in value for text in problems(item, schema["items"], f"{place}[]")]
    if isinstance(value, dict):
        known, other = schema.get("properties", {}), schema.get("additionalProperties")
        found += [f"{place}.{name} is missing" for name in schema.get("required", []) if name not in value]
        for name, item in value.items():
            if name in known or other:
                found += problems(item, known.get(name, other), f"{place}.{name}")
            elif known:
                found.append(f"{place}.{name} is unknown")
    return found


def container_of(manifest: Any) -> Any:
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    return job["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("nodes", ["1", "4"])
def test_a_manifest_is_valid_by_the_published_schema(nodes: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--nnodes", nodes, "--cpus", "32", "--grace", "90", "--max-restarts", "2"]
    text = printed(capsys, *KUBERNETES, *more, "3 trains ü.py", "--lr", "1", "log-$RANK", "yes", "")
    manifest = yaml.safe_load(text)
    assert problems(manifest, SCHEMA) == []
    assert manifest["metadata"]["name"] == "trains"
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 100
    container = container_of(manifest)
    assert container["resources"] == {"limits": {"cpu": 32, "nvidia.com/gpu": 8}}
    assert container["command"][-6:] == ["3 trains ü.py", "--lr", "1", "log-$$RANK", "yes", ""]
    for wrong in ({"backoffLimits": 0}, {"backoffLimit": "0"}, {"completionMode": None}):
        job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
        changed = {**job, **wrong}
        assert problems(
            {**manifest, "spec": {"replicatedJobs": [{"name": "x", "template": {"spec": changed}}]}}, SCHEMA
        )


def test_the_launcher_of_each_pod_takes_the_options_of_the_manifest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--world_size=16", "--save-signals", "SIGTERM", "--module_mode", "my.job", "--on", "me"]
    container = container_of(yaml.safe_load(printed(capsys, *KUBERNETES, *arguments)))
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["command"]]
    assert words[0] == "hocket-launch"
    options = launch_options.parse(words[1:])
    assert (options.nnodes, options.node_rank, options.nproc_per_node) == ("2", 1, "8")
    assert (options.master_addr, options.master_port) == ("job-machine-0-0.job", 29500)
    assert (options.grace, options.start_timeout, options.save_signals) == (120, 900, "SIGTERM")
    assert (options.module, options.training_script) == (True, "my.job")
    assert options.training_script_args == ["--on", "me"]
    assert options.job is None


def test_a_batch_script_has_the_launchers_options_and_slurms(capsys: pytest.CaptureFixture[str]) -> None:
    engine = "--engine-options=--partition gpu --comment='two words' --time=8:00:00"
    more = ["--nnodes", "2:4", "--grace", "300", "--max-restarts", "3", "--save-signals", "SIGTERM,SIGUSR2"]
    text = printed(capsys, *SLURM, engine, *more, "job.py", "--name", "two words")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    directives = re.findall(r"^#SBATCH (.*)", text, re.M)
    assert directives == [
        "--job-name=job",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gpus-per-node=2",
        "--exclusive",
        "--requeue",
        "--open-mode=append",
        "--signal=USR2@300",
        "--no-kill",
        "--partition gpu",
        "'--comment=two words'",
        "--time=8:00:00",
    ]
    assert '[ "$code" -eq 140 ]' in text
    (line,) = re.findall(r"^srun .*", text, re.M)
    assert line.endswith(
        "--nnodes 2:4 -n 2 --max-restarts 3 --save-signals SIGTERM,SIGUSR2 job.py --name 'two words'"
    )


def test_a_job_of_ray_is_a_command_that_its_own_parser_takes(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--nnodes", "3", "--gpus", "8", "--cpus", "64", "--max-restarts", "2", "--module_mode"]
    engine = ["-n", "4", "--engine-options=--address=http://head:8265 --no-wait"]
    words = shlex.split(printed(capsys, "--on", "ray", *engine, *more, "my.job", "--name", "two words"))
    assert words[:6] == ["ray", "job", "submit", "--working-dir=.", "--address=http://head:8265", "--no-wait"]
    assert words[6:10] == ["--", "python", "-m", "hocket.dist.ray"]
    options = ray.parser().parse_args(words[10:])
    assert (options.workers, options.gpus, options.cpus, options.max_failures) == (12, 2, 16, 2)
    assert (options.module, options.script, options.arguments) == (True, "my.job", ["--name", "two words"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--on", "slurm", "x.py"], "`--on slurm` needs `-n N`"),
        ([*SLURM, "--node_rank", "1", "x.py"], "`--node_rank` is given, and `--on slurm` sets it"),
        ([*SLURM, "--gpus", "-1", "x.py"], "`--gpus` is -1, expected 0 or more"),
        ([*SLURM, "--image", "x", "x.py"], "`--on slurm` has no `--image`"),
        (["--on", "kubernetes", "-n", "1", "x.py"], "`--on kubernetes` needs `--image`"),
        ([*KUBERNETES, "--nnodes", "1:2", "x.py"], "`--nnodes` is 1:2, and `--on kubernetes` starts all"),
        (
            ["-n", "2", "--print", "x.py"],
            "`--print` is for a job on an engine. Add `--on slurm|kubernetes|ray`",
        ),
        (["--on", "ray", "-n", "2", "--grace", "9", "x.py"], "`--grace` is an option of the launcher"),
        (["--on", "ray", "--gpus", "2", "x.py"], "`--on ray` needs `-n N`"),
        ([*SLURM, "--engine-options", "--time=1", "x.py"], "Write it with an equals sign"),
        ([*SLURM, "--engine-options='", "x.py"], "which no shell reads"),
    ],
)
def test_options_that_a_job_cannot_have_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        launch.main(arguments)
    assert message in capsys.readouterr().err


def test_a_job_is_handed_to_the_engines_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch.main([*SLURM, "x.py"]) == 1
    assert "`sbatch` was not found" in capfd.readouterr().err
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    command = tmp_path / "kubectl"
    command.write_text('#!/bin/sh\necho "$@"\ncat\nexit 3\n')
    command.chmod(stat.S_IRWXU)
    assert launch.main([*KUBERNETES, "--engine-options=--namespace=team", "x.py"]) == 3
    arguments, text = capfd.readouterr().out.split("\n", 1)
    assert arguments == "create --namespace=team -f -"
    assert yaml.safe_load(text)["kind"] == "JobSet"


def test_a_login_shells_variables_are_not_those_of_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "WORLD_SIZE": "7",
        "NODE_RANK": "5",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "3",
    }.items():
        monkeypatch.setenv(name, value)
    assert "#SBATCH --nodes=1\n" in printed(capsys, *SLURM, "x.py")


def test_a_launcher_waits_for_the_name_and_the_address_of_machine_0(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ["--nnodes", "2", "--node_rank", "0", "--master_addr", "later.invalid", "--master_port", "0"]
    options = launch_options.parse([*place, "--start-timeout", "5", "-c", "true"])
    resolve, asked = socket.getaddrinfo, []

    def resolve_later(host: str, *arguments: Any, **keywords: Any) -> Any:
        asked.append(host)
        return resolve(host if len(asked) < 3 else "127.0.0.1", *arguments, **keywords)

    options.master_port = 29500
    monkeypatch.setattr(socket, "getaddrinfo", resolve_later)
    monkeypatch.setattr(preflight, "_check_free", lambda *_: None)
    preflight.check_launcher(options)
    assert asked == ["later.invalid"] * 3
    options.start_timeout, asked[:] = None, []
    with pytest.raises(PreflightError, match=r"`later.invalid` \(`--master_addr`\) cannot be resolved"):
        preflight.check_launcher(options)


PAGES = sorted((Path(__file__).parents[1] / "docs" / "engines").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_the_engines_pages_are_ones_that_the_launcher_takes(page: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.S)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    assert lines
    for words in lines:
        if "hocket-launch" in words:
            words = words[words.index("hocket-launch") + 1 :]
            words = words[: words.index(">")] if ">" in words else words
            options = launch_options.parse(words)
            assert options.training_script.endswith("train.py")
            assert (options.job is None) == ("--on" not in words)

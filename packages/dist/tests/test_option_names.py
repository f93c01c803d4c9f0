"""Misspelt options of `hocket-launch`: the message names the nearest; the script's options stay its own."""

from __future__ import annotations

import pytest

from hocket.dist.launch import options as launch_options
from hocket.dist.launch.plan import plan


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the message on arguments that are refused."""
    with pytest.raises(SystemExit) as end:
        launch_options.parse(arguments)
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1].removeprefix("hocket-launch: error: ")


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("--nproc_per_nod", "--nproc_per_node"),
        ("--nproc-per-nod", "--nproc-per-node"),
        ("--nprocs", "--nproc"),
        ("--np", "--nproc"),
        ("-N", "-n"),
        ("--nnode", "--nnodes"),
        ("--master_adr", "--master_addr"),
        ("--max-restart", "--max-restarts"),
        ("--start_timeout", "--start-timeout"),
        ("--verb", "--verbose"),
        ("--flight-recorder", "--no-flight-recorder"),
        ("--num_processes", "--nproc"),
        ("--num_machines", "--nnodes"),
        ("--main_process_ip", "--master_addr"),
        ("--machine-rank", "--node-rank"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest(capsys, given: str, near: str) -> None:
    expected = f"there is no option `{given}`; did you mean `{near}`? Options of the script follow the script"
    assert refusal(capsys, given, "2", "x.py") == expected


def test_a_value_after_an_equals_sign_is_kept(capsys) -> None:
    assert "did you mean `--nproc_per_node=2`?" in refusal(capsys, "--nproc_per_nod=2", "x.py")


def test_an_option_that_is_far_from_all_is_sent_to_the_help(capsys) -> None:
    expected = (
        "there is no option `--xyzzy`; `--help` lists the options. Options of the script follow the script"
    )
    assert refusal(capsys, "--xyzzy", "0.1", "x.py") == expected
    assert "there is no option `-q`; `--help` lists" in refusal(capsys, "-q", "x.py")


def test_a_misspelt_option_without_a_script_is_named(capsys) -> None:
    assert "did you mean `--help-torchrun`?" in refusal(capsys, "-n", "2", "--help-torch")
    assert refusal(capsys, "-n2", "--nnodes", "1", "--rdzv-conf=a=b").startswith(
        "the following arguments are"
    )


def test_options_after_the_script_belong_to_it(capsys) -> None:
    script = ["x.py", "--nproc_per_nod", "2", "-N", "--np=3"]
    assert launch_options.parse(["-n", "2", *script]).training_script_args == script[1:]
    assert launch_options.parse(["-n", "2", "--", *script]).training_script_args == script[1:]


def test_options_of_the_plan_are_answered_likewise(capsys) -> None:
    with pytest.raises(SystemExit):
        plan(["module:build", "--parallelism-confg", "{}"])
    assert "there is no option `--parallelism-confg`; did you mean `--parallelism-config`?\n" in (
        capsys.readouterr().err
    )

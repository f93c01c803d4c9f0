"""The options of `hocket-launch`, and the environment variables that replace missing ones."""

import tempfile
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

from hocket.dist.launch import command as launch
from hocket.dist.launch import options as launch_options
from hocket.dist.ranks import addresses
from support import launches


def test_composers_long_option_names_equal_the_short_ones() -> None:
    """Parse each option under all names that Composer's launcher has for it."""
    place = ["--world_size", "4", "--node_rank", "1", "--master_addr", "127.0.0.1", "--master_port", "5000"]
    files = ["--stdout", "{rank}.out", "--stderr", "{rank}.err"]
    long = ["--nproc", "2", "--verbose", "--module_mode", *place, *files, "job", "--lr", "1"]
    short = ["-n", "2", "-v", "-m", *place, *files, "job", "--lr", "1"]
    found = launch_options.parse(long)
    assert vars(found) == vars(launch_options.parse(short))
    assert (found.nproc_per_node, found.nnodes, found.module, found.verbose) == ("2", "2", True, True)
    assert found.training_script_args == ["--lr", "1"]
    assert launch_options.parse(["--command_mode", "ls"]).no_python
    assert (
        launch_options.parse(
            ["-n", "2", "--world_size", "4", "--base_rank", "2", *place[4:], "x.py"]
        ).node_rank
        == 1
    )


def test_settings_of_an_elastic_rendezvous_take_the_place_of_the_defaults() -> None:
    place = ["--nnodes", "1:2", "--node_rank", "0", "--master_addr", "127.0.0.1"]
    alive = {"keep_alive_interval": "2", "keep_alive_max_attempt": "3"}
    confs = ["", "last_call_timeout=3,timeout=70"]
    given = [launch_options.parse([*place, "--rdzv-conf", conf, "x.py"]).rdzv_conf for conf in confs]
    assert [_parse_rendezvous_config(conf) for conf in given] == [
        {"is_host": "1", "last_call_timeout": "10", **alive},
        {"is_host": "1", "last_call_timeout": "3", **alive, "timeout": "70"},
    ]


PLACE = {
    "WORLD_SIZE": "4",
    "NODE_RANK": "1",
    "MASTER_ADDR": "10.0.0.5",
    "MASTER_PORT": "5000",
    "LOCAL_WORLD_SIZE": "2",
}
"""The variables of a machine, as MosaicML's platform sets them."""


@pytest.mark.parametrize(
    ("environment", "arguments", "expected"),
    [
        (PLACE, [], ("2", "2", 1, "10.0.0.5", 5000)),
        ({**PLACE, "NODE_RANK": "", "BASE_RANK": "2"}, [], ("2", "2", 1, "10.0.0.5", 5000)),
        (PLACE, ["--node_rank", "0", "--master_port", "6000"], ("2", "2", 0, "10.0.0.5", 6000)),
        (PLACE, ["-n", "4"], ("4", "1", 0, "127.0.0.1", None)),
        ({**PLACE, "NODE_RANK": "0", "LOCAL_WORLD_SIZE": "0"}, ["-n", "4"], ("4", "1", 0, "127.0.0.1", None)),
        # Kubernetes operators count machines in `WORLD_SIZE` and `RANK`: this is the second of two.
        ({**PLACE, "WORLD_SIZE": "2", "RANK": "1"}, [], ("2", "1", 0, "127.0.0.1", None)),
        (
            {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "3", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "h"},
            [],
            ("3", "2", 1, "h", None),
        ),
    ],
)
def test_a_machines_rank_and_address_are_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], arguments: list[str], expected: tuple
) -> None:
    """Options take precedence; variables of Composer and torchrun replace missing ones."""
    if "-n" in arguments:
        environment = {**environment, "WORLD_SIZE": "4", "NODE_RANK": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = launch_options.parse([*arguments, "x.py"])
    assert (
        found.nproc_per_node,
        found.nnodes.removesuffix(":1"),
        found.node_rank,
        found.master_addr,
        found.master_port,
    ) == expected


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("WORLD_SIZE", "four", "`WORLD_SIZE` is 'four', expected a whole number from 0"),
        ("MASTER_PORT", "70000", "`MASTER_PORT` is '70000', expected a whole number from 0 to 65535"),
        ("NODE_RANK", "2", "`--node_rank` is 2, expected 0 to 1 of 2 machines"),
        ("WORLD_SIZE", "2", "Did you mean: hocket-launch --world_size 4 x.py"),
    ],
)
def test_an_invalid_variable_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    words: str,
) -> None:
    for name, kept in {**PLACE, variable: value}.items():
        monkeypatch.setenv(name, kept)
    with pytest.raises(SystemExit):
        launch_options.parse(["x.py"])
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "2"], "training_script"),
        (["-n", "0", "x.py"], "expected at least 1 process"),
        (["-m", "-c", "x"], "not both"),
        (["-n", "8", "--world_size", "12", "x.py"], "`--world_size 12` is no multiple of `-n 8`"),
        (
            ["-n", "8", "--world_size", "8", "--node_rank", "1", "x.py"],
            "hocket-launch -n 8 --world_size 16 --node_rank 1 x.py",
        ),
        (["-n", "8", "--world_size=8", "--base_rank", "8", "x.py"], "--world_size=16 --base_rank 8 x.py"),
        (["-n", "8", "--base_rank", "3", "x.py"], "`--base_rank 3` is no multiple of `-n 8`"),
        (
            ["-n", "4", "--world_size", "16", "--base_rank", "8", "--node_rank", "1", "x.py"],
            "is machine 2, but `--node_rank` is 1",
        ),
        (
            ["--nnodes", "2", "--node_rank", "2", "--master_addr", "h", "x.py"],
            "expected 0 to 1 of 2 machines",
        ),
        (["--nnodes", "2", "--node_rank", "1", "x.py"], "needs `--master_addr HOST`"),
        (["-n", "two", "x.py"], "`-n` is 'two', expected a number of processes"),
        (["--nnodes", "two", "x.py"], "`--nnodes` is 'two', expected a number of machines"),
        (["--nnodes", "0", "x.py"], "`--nnodes` is '0', expected a number of machines from 1"),
        (["--nnodes", "2:1", "x.py"], "`--nnodes` is '2:1', expected a number of machines"),
        (["-n", "8", "--world_size", "0", "x.py"], "`--world_size` is 0, expected 1 or more"),
        (
            ["-n", "8", "--nnodes", "3", "--world_size", "16", "--node_rank", "0", "x.py"],
            "`--world_size 16` contradicts `--nnodes 3` with `-n 8`, which is 24 processes",
        ),
        (["--master_port", "99999", "x.py"], "`--master_port` is 99999, expected 0 to 65535"),
        (["--max-restarts", "-1", "x.py"], "`--max-restarts` is -1, expected 0 or more"),
        (["--shutdown-timeout", "-1", "x.py"], "`--shutdown-timeout` is -1, expected 0 or more"),
        (["--signals-to-handle", "SIGTERM,FOO", "x.py"], "has 'FOO', which is no signal of this system"),
        (["--nnodes", "2", "--standalone", "x.py"], "`--standalone` is for one machine, and `--nnodes` is 2"),
        (["--data", "", "x.py"], "`--data` is empty, expected a path"),
    ],
)
def test_contradictory_options_raise(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.main(arguments)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_launcher_on_each_slurm_node_reads_its_rank_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**launches.SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}.items():
        monkeypatch.setenv(name, value)
    options = launch_options.parse(["-n", "4", "x.py"])
    assert (options.nnodes, options.node_rank, options.master_addr) == ("2", 1, "gpu003")
    assert options.master_port == addresses.job_port({"SLURM_JOB_ID": "41"})
    assert addresses.job_port({"SLURM_JOB_ID": "41", "SLURM_RESTART_COUNT": "1"}) == options.master_port + 1
    elastic = launch_options.parse(["-n", "4", "--nnodes", "1:3", "x.py"])
    assert (elastic.nnodes, elastic.node_rank, elastic.rdzv_backend) == ("1:3", 1, "c10d")
    assert elastic.rdzv_endpoint == f"gpu003:{options.master_port}"
    assert "is_host=0" in elastic.rdzv_conf


def test_a_slurm_step_without_a_host_list_raises(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**launches.SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_STEP_NODELIST")
    with pytest.raises(SystemExit):
        launch_options.parse(["-n", "4", "x.py"])
    assert "`SLURM_STEP_NODELIST` is not set. Set `MASTER_ADDR`" in capsys.readouterr().err


def test_help_has_our_options_and_torchruns(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-h", "--help"):
        with pytest.raises(SystemExit) as ended:
            launch.main([flag])
        assert ended.value.code == 0
        ours = capsys.readouterr().out
        assert ours.startswith("usage: hocket-launch -n N [options] script.py")
    with pytest.raises(SystemExit):
        launch.main(["--help-torchrun"])
    theirs = capsys.readouterr().out
    for flag in ("--rdzv-backend", "--max-restarts", "--tee", "--world_size", "--stdout"):
        assert flag in theirs


def test_without_a_temporary_folder_the_launcher_asks_for_a_log_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    assert launch.main(["-n", "1", "--cold", __file__]) == 1
    said = capsys.readouterr().err
    assert said.startswith("hocket-launch: error: no temporary folder")
    assert "`TMPDIR`" in said
    assert "`--log-dir`" in said

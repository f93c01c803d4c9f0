"""The place of a process in its job, as each program that starts processes tells it."""

import pytest

from hocket.dist.launch import command, options
from hocket.dist.ranks.addresses import is_rank, launcher_options, rendezvous_variables
from hocket.dist.ranks.job_place import JobPlaceError, choose_gpu, export_job_place, read_job_place
from support import launches

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
SLURM = {
    **launches.SLURM,
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, (5, 8, 1, 4)),
        (OPEN_MPI, (5, 8, 1, 4)),
        (
            {name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items()},
            (5, 8, 1, 4),
        ),
        ({"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}, (5, 8, 1, 4)),
        ({"PMI_RANK": "5", "PMI_SIZE": "8", "PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1"}, (5, 8, 1, None)),
        ({"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1"}, (5, 8, 1, None)),
        (SLURM, (5, 8, 1, 4)),
        # `mpirun` has started its daemons by `srun`, one on each host.
        ({**SLURM, **OPEN_MPI, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (5, 8, 1, 4)),
        # `srun --mpi=pmi2`, and a script that sets torch's variables from Slurm's: Slurm tells the rest.
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"}, (5, 8, 1, 4)),
        ({**SLURM, "RANK": "5", "WORLD_SIZE": "8"}, (5, 8, 1, 4)),
        (SAGEMAKER, (1, 2, 0, 1)),
        # The options of a run of one process.
        ({**SLURM, "RANK": "0", "WORLD_SIZE": "1"}, (0, 1, None, None)),
    ],
)
def test_the_place_is_read_from_each_starters_variables(env: dict[str, str], expected: tuple) -> None:
    place = read_job_place(env)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == expected


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1", "PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        # Shells of `salloc -n 8`, in the job and in a step of their own, and a batch script.
        {"SLURM_JOB_ID": "41", "SLURM_NTASKS": "8"},
        {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
        {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},
        {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
        {"PET_NNODES": "1:1", "PET_NPROC_PER_NODE": "1"},
    ],
)
def test_one_process_is_no_rank_of_a_job(env: dict[str, str]) -> None:
    assert read_job_place(env) is None


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "1"}, "`WORLD_SIZE` is not"),
        ({"WORLD_SIZE": "2"}, "`RANK` is not"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "`WORLD_SIZE` is ''"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "`WORLD_SIZE` is 'two'"),
        ({"LOCAL_RANK": "1"}, "`LOCAL_RANK` is '1' but `RANK`"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI .*`OMPI_COMM_WORLD_RANK` is not set"),
        ({"PMI_RANK": "0"}, "`PMI_SIZE` is not set"),
        ({"PMIX_RANK": "0"}, "PMIx .*`WORLD_SIZE` is not set"),
        ({"PALS_RANKID": "0"}, "PALS .* is not set"),
        ({name: value for name, value in SLURM.items() if name != "SLURM_PROCID"}, "`SLURM_PROCID` is not"),
        ({"SM_HOSTS": SAGEMAKER["SM_HOSTS"]}, "`SM_CURRENT_HOST` is not set"),
        ({"PET_NNODES": "2"}, "`PET_NNODES` is '2' but `RANK` is not set"),
        ({"PET_NPROC_PER_NODE": "auto"}, "`PET_NPROC_PER_NODE` is 'auto'"),
    ],
)
def test_one_process_of_several_that_is_not_told_which_is_refused(env: dict[str, str], words: str) -> None:
    with pytest.raises(JobPlaceError, match=words):
        read_job_place(env)


@pytest.mark.parametrize(
    ("env", "num_gpus", "expected"),
    [
        ({}, 4, 0),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, 4, 1),
        # Each process sees its own GPU, as with `--gpus-per-task`.
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, 1, 0),
        # Nothing tells the local rank: on one host with four GPUs, and on hosts with one.
        ({"RANK": "1", "WORLD_SIZE": "4"}, 4, 1),
        ({"RANK": "5", "WORLD_SIZE": "8"}, 4, 1),
        ({"RANK": "1", "WORLD_SIZE": "2"}, 1, 0),
        (OPEN_MPI, 4, 1),
    ],
)
def test_the_local_rank_chooses_the_gpu(env: dict[str, str], num_gpus: int, expected: int) -> None:
    assert choose_gpu(read_job_place(env), num_gpus) == expected


def test_more_ranks_than_gpus_on_a_host_are_refused() -> None:
    place = read_job_place({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"})
    with pytest.raises(JobPlaceError, match="`LOCAL_RANK` is 3, and this process sees 2 GPUs"):
        choose_gpu(place, 2)


def test_the_exported_variables_are_torchs() -> None:
    env = dict(OPEN_MPI)
    export_job_place(env)
    expected = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert {name: value for name, value in env.items() if name not in OPEN_MPI} == expected


@pytest.mark.parametrize(
    ("env", "host", "port"),
    [
        (SLURM, "gpu003", True),
        (SAGEMAKER, "algo-1", True),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "PMIX_NAMESPACE": "prterun-1"}, "127.0.0.1", True),
        (
            {**OPEN_MPI, "MASTER_ADDR": "10.0.0.7", "SLURM_JOB_NODELIST": "gpu7", "SLURM_JOB_ID": "3"},
            None,
            True,
        ),
        ({**OPEN_MPI, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "7"}, None, False),
        (OPEN_MPI, None, False),  # several hosts, and nothing tells the first
    ],
)
def test_ranks_meet_at_the_first_host(env: dict[str, str], host: str | None, port: bool) -> None:
    env = dict(env)
    export_job_place(env)
    found = rendezvous_variables(env)
    assert (found.get("MASTER_ADDR"), "MASTER_PORT" in found) == (host, port)


def test_one_launcher_on_each_host_is_told_from_one_for_each_rank() -> None:
    per_host = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    told = launcher_options({**per_host, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "7"})
    assert told == {"nnodes": "8", "node_rank": "5", "master_addr": "10.0.0.7", "master_port": "7"}
    assert launcher_options(SAGEMAKER)["master_addr"] == "algo-1"
    assert launcher_options(OPEN_MPI) == launcher_options({}) == {}
    place = read_job_place(OPEN_MPI)
    assert place is not None
    assert is_rank(place)


def test_mpirun_on_each_host_gives_the_launcher_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    per_host = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    for name, value in {**per_host, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "7"}.items():
        monkeypatch.setenv(name, value)
    found = options.parse(["-n", "4", "x.py"])
    assert (found.nproc_per_node, found.nnodes, found.node_rank, found.master_addr) == (
        "4",
        "8",
        5,
        "10.0.0.7",
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "2"], "`-n` is 2, and Open MPI has started 8 launchers, several on a host"),
        (["--max-restarts", "1"], "`--max-restarts` is 1, and Open MPI has started the ranks"),
    ],
)
def test_options_that_ranks_of_another_starter_cannot_follow_are_refused(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    assert command.main([*arguments, __file__]) == 1
    assert words in capsys.readouterr().err

"""The verdict on a failed job: the cause is told from its consequences, whichever launcher judges."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hocket.dist.launch.verdicts.findings import IN_BACKWARD, Finding
from hocket.dist.launch.verdicts.verdict import judge
from hocket.dist.ranks.stack_dump import find_activity, find_line, process_state, read_stack

T = 1_700_000_000.0


def _rank(rank: int, kind, **values) -> Finding:
    common = {"pid": 40 + rank, "host": f"h{rank}", "line": f"train.py:{rank}", "since": T + rank}
    return Finding(**{"rank": rank, "kind": kind, **common, **values})


WAITED = _rank(0, "waited", late=(1,), waited_s=8.0, how="with exit code 1", error="CollectiveError: x")
CASES = [
    (
        _rank(1, "failed", how="by SIGKILL", line=None),
        "failed first, by SIGKILL; on host h1 (its line",
        "dmesg",
    ),
    (
        _rank(1, "failed", how="by SIGABRT", error="ValueError: bad"),
        "failed first, by SIGABRT: `ValueError: bad`; on host h1 at train.py:1",
        "Correct the error",
    ),
    (
        _rank(1, "failed", how="with exit code 1", error="ValueError: bad"),
        "failed first, with exit code 1: `ValueError: bad`; on host h1 at train.py:1",
        "Correct the error",
    ),
    (_rank(1, "failed", how="x", error="torch.OutOfMemoryError: CUDA out of memory"), "failed", "microbatch"),
    (_rank(1, "stopped"), "was stopped, as by SIGSTOP; on host h1 at train.py:1", "Ctrl-Z"),
    (_rank(1, "ended"), "ended with exit code 0 while other ranks trained on", "equally many steps"),
    (_rank(1, "running"), "did not take part in a collective; on host h1 at train.py:1", "dist_timeout"),
]


@pytest.mark.parametrize(("cause", "words", "advice"), CASES, ids=[case[0].kind for case in CASES])
def test_a_cause_precedes_its_consequences(cause: Finding, words: str, advice: str) -> None:
    for findings in ([WAITED, cause], [cause, WAITED]):
        verdict = judge(findings, {})
        assert verdict.cause is cause
        assert verdict.text.startswith(f"rank 1 (pid 41) {words}")
        assert (
            "rank 0 on host h0 waited 8 s for it at train.py:0. Ended because of it: rank 0. " in verdict.text
        )
        assert advice in verdict.text
        assert "\n" not in verdict.text
        assert not verdict.text.endswith(".")


def test_a_hung_rank_is_told_from_ranks_that_run_since_they_wait_for_it() -> None:
    verdict = judge([WAITED, _rank(2, "running"), _rank(1, "running")], {})
    assert verdict.cause is not None
    assert verdict.cause.rank == 1


def test_a_rank_that_came_late_and_waits_is_not_named_beside_the_one_that_hangs() -> None:
    both_late = replace(WAITED, late=(1, 2))
    hangs, backward = _rank(2, "running"), _rank(1, "running", how=IN_BACKWARD)
    verdict = judge([both_late, _rank(1, "waiting"), hangs], {})
    assert verdict.text.startswith("rank 2 (pid 42) did not take part in a collective; on host h2")
    assert "Ended because of it: ranks 0, 1." in verdict.text
    verdict = judge([both_late, backward, hangs], {})
    assert verdict.text.startswith("rank 2 (pid 42) did not take part")
    assert "Late, too, but it may wait for that rank: rank 1 (pid 41), on host h1" in verdict.text
    verdict = judge([both_late, replace(hangs, kind="waiting"), _rank(1, "waiting")], {})
    assert "rank 1 (pid 41) did not take part in a collective in time: it is in another" in verdict.text


def test_a_known_error_precedes_an_end_for_an_unknown_reason_in_the_same_moment() -> None:
    unknown = _rank(0, "failed", how="with exit code 1", line=None)
    known = _rank(1, "failed", how="with an error", error="ValueError: bad")
    assert judge([unknown, known], {}).cause is known
    much_later = replace(known, since=T + 10)
    assert judge([unknown, much_later], {}).cause is unknown
    killed = replace(unknown, how="by SIGKILL")
    assert judge([killed, known], {}).cause is killed


def test_diverged_ranks_are_named_with_their_lines_and_collectives() -> None:
    ranks = [_rank(rank, "diverged", last=f"gloo:c{rank}", error="RuntimeError: gloo") for rank in (1, 0)]
    words = "rank 0 (pid 40), on host h0 at train.py:0, in gloo:c0; rank 1 (pid 41), on host h1"
    assert words in judge(ranks, {}).text
    took_for_late = replace(WAITED, last="gloo:c0")
    assert words in judge([ranks[0], took_for_late], {}).text


def test_a_rank_of_which_no_launcher_tells_is_on_a_lost_host() -> None:
    verdict = judge([WAITED], {1: "h1"})
    assert verdict.cause is None
    assert verdict.text.startswith("rank 1 on host h1 did not answer, nor did the launcher there, since ")
    assert "a cut link and a lost machine look alike" in verdict.text


def test_a_finding_survives_json() -> None:
    assert Finding.from_dict(json.loads(json.dumps(WAITED.as_dict()))) == WAITED


TRACE = """Traceback (most recent call last):
  File "/home/u/first.py", line 3, in first
ValueError: x

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/u/train.py", line 9, in <module>
  File "/home/u/train.py", line 7, in main
  File "/home/u/.venv/lib/python3.12/site-packages/torch/optim/adamw.py", line 1, in step
  File "/src/hocket/dist/parallelism.py", line 5, in wait
  File "<frozen runpy>", line 5, in run
RuntimeError: y
"""


def test_the_line_of_a_traceback_is_the_user_s() -> None:
    assert find_line(TRACE) == "/home/u/train.py:7 in `main`"
    only_library = TRACE.replace("/home/u/train.py", "/x/lib/python3.12/runpy.py")
    assert find_line(only_library.replace("/src/hocket/dist", "/x/site-packages/torch")) is not None
    assert find_line("no frames") is None


STACK = """Thread 0x1 (most recent call first):
  File "/home/u/train.py", line 3 in other

Current thread 0x2 (most recent call first):
{}  File "/home/u/train.py", line 9 in main
"""
LIBRARY = "/home/u/.venv/lib/python3.12/site-packages"


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([f"{LIBRARY}/torch/distributed/distributed_c10d.py all_reduce"], "collective"),
        (
            [
                f"{LIBRARY}/torch/_ops.py __call__",
                f"{LIBRARY}/torch/distributed/_functional_collectives.py w",
            ],
            "collective",
        ),
        (
            [f"{LIBRARY}/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py foreach_reduce"],
            "collective",
        ),
        ([f"{LIBRARY}/torch/distributed/pipelining/schedules.py _wait_batch_p2p"], "collective"),
        ([f"{LIBRARY}/torch/nn/parallel/distributed.py _pre_forward"], "collective"),
        (["/usr/lib/python3.12/threading.py wait", "/src/hocket/dist/ranks/diagnosis.py diag"], "collective"),
        ([f"{LIBRARY}/torch/autograd/graph.py _engine_run_backward"], "backward"),
        (["/usr/lib/python3.12/queue.py get"], "other"),
        (["/home/u/data.py load", f"{LIBRARY}/torch/distributed/distributed_c10d.py all_reduce"], "other"),
        ([f"{LIBRARY}/torch/nn/modules/linear.py forward"], "other"),
        ([], "other"),
    ],
)
def test_a_stack_tells_whether_its_rank_is_in_a_collective(frames: list[str], expected: str) -> None:
    lines = "".join('  File "{}", line 1 in {}\n'.format(*frame.split(" ")) for frame in frames)
    assert find_activity(STACK.format(lines)) == expected


SLEEPER = """
import pathlib, sys, time
from hocket.dist.ranks.stack_dump import write_on_request
write_on_request(pathlib.Path(sys.argv[1]))
def wait():
    print("ready", flush=True)
    time.sleep(60)
wait()
"""


def test_a_process_tells_its_line_also_while_it_is_stopped(tmp_path: Path) -> None:
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    with subprocess.Popen([sys.executable, script, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            expected = f"{script}:7 in `wait`"
            deadline = time.monotonic() + 10
            # It may not have gone on from the line that prints.
            while find_line(read_stack(process.pid, tmp_path, timeout_s=10)) != expected:
                assert time.monotonic() < deadline
            os.kill(process.pid, signal.SIGSTOP)
            while process_state(process.pid) != "T":
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert find_line(read_stack(process.pid, tmp_path, timeout_s=10)) == expected
            while process_state(process.pid) != "T":
                assert time.monotonic() < deadline, "the process was not stopped again"
                time.sleep(0.01)
        finally:
            process.kill()


def test_a_process_that_never_promised_to_tell_is_not_asked(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert read_stack(process.pid, tmp_path) == ""
        assert process.poll() is None
        process.kill()

"""Errors that only report the end of another rank, told apart by their type and not by their last lines."""

import traceback
from pathlib import Path

import pytest
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from hocket.ckpt.errors import CheckpointError, CheckpointTimeoutError
from hocket.ckpt.torch.ranks.error_propagation import pack_error, unpack_error
from hocket.dist.errors import AbsentRanksError, CollectiveError
from hocket.dist.ranks.failures import is_consequence, is_trace_of_consequence
from hocket.trainer.errors import RankFailedError
from support import launches

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:41555"
NOTES = ("raised by `SpeedMonitor` at `Event.BATCH_END`, ep0 ba3", "line two", "line three", "line four")


class LossError(CollectiveError):
    """A subclass, as a user's package may have one."""


def _raised(error: Exception, cause: Exception | None = None) -> Exception:
    """Raise and catch an error, with notes below it."""
    for note in NOTES:
        error.add_note(note)
    try:
        raise error from cause
    except Exception as caught:  # noqa: BLE001 - any error may end a rank
        return caught


CONSEQUENCES = [
    CollectiveError("an exchange failed"),
    RankFailedError("rank 1 failed"),
    AbsentRanksError("rank 1 did not appear"),
    DistBackendError("NCCL error"),
    DistNetworkError("the connection was reset"),
    DistStoreError("wait timeout after 300000ms, keys: /default_pg/0//1//cuda//0"),
    RuntimeError(GLOO),
    RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation"),
]
OWN = [
    ValueError("rank one failed"),
    ValueError("the answer of RankFailedError was expected"),
    ConnectionResetError("the database: Connection reset by peer"),
    BrokenPipeError("Broken pipe"),
    RuntimeError("the download failed: Connection reset by peer"),
    TimeoutError("Timed out waiting for the database"),
]


@pytest.mark.parametrize("error", CONSEQUENCES, ids=lambda error: type(error).__name__)
def test_an_error_of_a_peer_is_a_consequence_whatever_notes_follow_it(error: Exception) -> None:
    caught = _raised(error)
    assert is_consequence(caught)
    text = "".join(traceback.format_exception(caught))
    assert text.rstrip().endswith(NOTES[-1])
    assert is_trace_of_consequence(text)
    assert is_trace_of_consequence("".join(f"[rank0]: {line}\n" for line in text.splitlines()))


@pytest.mark.parametrize("error", OWN, ids=lambda error: f"{type(error).__name__}-{error}"[:40])
def test_a_rank_s_own_error_is_no_consequence_whatever_its_text_and_notes_name(error: Exception) -> None:
    error.add_note("and then: RankFailedError: rank 0 failed")
    caught = _raised(error)
    assert not is_consequence(caught)
    assert not is_trace_of_consequence("".join(traceback.format_exception(caught)))


def test_subclasses_and_the_errors_that_are_raised_from_one_are_consequences() -> None:
    assert is_consequence(_raised(LossError("the loss")))
    assert is_consequence(_raised(ValueError("no step"), CollectiveError("an exchange failed")))


def test_an_error_in_the_handler_of_a_consequence_is_one_and_a_hidden_cause_does_not_count() -> None:
    def fail(*, is_hidden: bool) -> Exception:
        try:
            try:
                raise RankFailedError("rank 1 failed")
            finally:
                raise OSError("the log cannot be closed") from None if is_hidden else CollectiveError("x")
        except OSError as error:
            return error

    def handle() -> Exception:
        try:
            try:
                raise RankFailedError("rank 1 failed")
            finally:
                {}["run"]
        except KeyError as error:
            return error

    for error, expected in ((handle(), True), (fail(is_hidden=False), True), (fail(is_hidden=True), False)):
        assert is_consequence(error) == expected
        text = "".join(traceback.format_exception(error))
        assert is_trace_of_consequence(text) == expected
    # An earlier traceback that did not lead to the last one.
    other = "".join(traceback.format_exception(_raised(CollectiveError("an exchange failed"))))
    assert not is_trace_of_consequence(f"{other}\n{text}")


def test_a_group_of_errors_is_a_consequence_if_each_of_them_is() -> None:
    peer, own = CollectiveError("an exchange failed"), ValueError("a bad sample")
    assert is_consequence(_raised(ExceptionGroup("tasks", [peer, ExceptionGroup("more", [peer])])))
    assert not is_consequence(_raised(ExceptionGroup("tasks", [peer, own])))


def test_an_error_that_names_late_ranks_is_a_consequence() -> None:
    late = CheckpointTimeoutError.of_ranks("rank 1 did not report", [1], 8.0)
    passed_on = unpack_error(pack_error(late, ranks=[0]), "the save")
    assert passed_on.hocket_diagnosis == {"late": [1], "waited_s": 8.0}
    assert is_consequence(_raised(late))
    assert is_consequence(_raised(CheckpointError("no outcome"), passed_on))
    assert not is_consequence(_raised(CheckpointTimeoutError("the previous save is still under way")))


@pytest.mark.slow
def test_the_launcher_names_the_rank_whose_error_has_no_notes(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(launches.NOTES_SCRIPT)
    done = launches.run_forked(tmp_path, "-n", "2", path, tmp_path)
    assert done.returncode == 1
    assert "hocket-launch: rank 1" in done.stderr, done.stderr
    assert done.stderr.count("ValueError: a bad sample") == 2, "in the verdict, and in the traceback"

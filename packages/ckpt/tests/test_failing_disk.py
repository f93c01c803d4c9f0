"""A disk that fails while `hocket-ckpt` writes: the error names the file, and no partial file remains."""

import errno
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from hocket.ckpt.verbs.demo import write_demo
from support.workers import worker

# A process that runs the command repeatedly, and sets in its environment which call fails.
WORK = """
import contextlib, io, json, os, sys
from hocket.ckpt.cli.app import app
for line in sys.stdin:
    request = json.loads(line)
    os.environ.update(request["env"])
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        try:
            app(request["args"])
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([code, error.getvalue()]), flush=True)
"""
DONE = 0
STORE_FAILED = 5


@pytest.fixture(scope="module")
def command(shim):
    """Run `hocket-ckpt` with a call that fails for a file; return its exit code and its messages."""
    if shim is None:
        pytest.skip("failing calls need `cc`, which is not installed")
    with worker(sys.executable, "-c", WORK, env={"LD_PRELOAD": shim}) as ask:

        def run(*args, fails="", of="", number=0):
            env = {"FAULT_CALL": fails, "FAULT_FILE": of, "FAULT_ERRNO": str(number)}
            return ask({"env": env, "args": [str(arg) for arg in args]})

        yield run


def files_under(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def check_left(folder, name):
    """Check that the failed file is gone and nothing is committed; finished files may stay for a rerun."""
    left = files_under(folder)
    assert not [path for path in left if name in path or path.rpartition("/")[2].startswith(".")], left
    assert "checkpoint.json.zst" not in left


WRITES = {
    "reshard": (["reshard", "--ranks", "3"], ["-r00001-000.safetensors", "checkpoint.json.zst"]),
    "hocket": (["convert", "--to", "hocket"], ["-r00000-000.safetensors", "checkpoint.json.zst"]),
    "zstd": (["convert", "--to", "hocket", "--compression", "zstd:1"], ["-r00000-000.blocks"]),
    "dcp": (["convert", "--to", "dcp"], [".distcp", ".metadata"]),
    "safetensors": (["convert", "--to", "safetensors"], [".safetensors"]),
    "torch": (["convert", "--to", "torch"], ["state.pt"]),
}


@pytest.mark.parametrize("form", WRITES)
def test_a_failed_write_names_its_file_and_a_second_run_succeeds(tmp_path, command, form):
    source = tmp_path / "demo"
    write_demo(str(source))
    (verb, *options), names = WRITES[form]

    def run(folder, **fails):
        target = folder / "state.pt" if form == "torch" else folder
        return target, command(verb, source, target, *options, **fails)

    whole, done = run(tmp_path / "whole")
    assert done == [DONE, ""]
    for place, name in enumerate(names):
        # A data file is written by one call at offset 0, its header, because it is small.
        write = "write" if name == "checkpoint.json.zst" else "header"
        for fails, number in ((write, errno.EIO), ("fsync", errno.EDQUOT)):
            folder = tmp_path / f"{place}-{fails}"
            target, (code, said) = run(folder, fails=fails, of=name, number=number)
            assert (code, name in said, f"(os error {number})" in said) == (STORE_FAILED, True, True), said
            check_left(folder, name)
            assert run(folder) == (target, [DONE, ""])
            assert command("verify", target) == [DONE, ""]
            assert command("diff", whole, target) == [DONE, ""]
            assert files_under(folder) == files_under(tmp_path / "whole")


def test_a_failed_write_in_a_thread_of_a_large_file_names_its_file(tmp_path, command):
    (tmp_path / "model").mkdir()
    save_file({"w": np.arange(3 << 20, dtype=np.float32)}, tmp_path / "model/model.safetensors")  # 12 MiB
    assert command("convert", tmp_path / "model", tmp_path / "demo", "--to", "hocket") == [DONE, ""]
    for form, ((verb, *options), (name, *_)) in WRITES.items():
        folder = tmp_path / form
        target = folder / name if form == "torch" else folder
        name = name.replace("-r00001-000", "-r00000-000")
        code, said = command(
            verb, tmp_path / "demo", target, *options, fails="data", of=name, number=errno.EIO
        )
        assert (code, name in said, f"(os error {errno.EIO})" in said) == (STORE_FAILED, True, True), said
        check_left(folder, name)
        assert command(verb, tmp_path / "demo", target, *options) == [DONE, ""]
        assert command("diff", tmp_path / "demo", target) == [DONE, ""]

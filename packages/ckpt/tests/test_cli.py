"""The `hocket-ckpt` command: its output, its exit codes, and the modules that it does not import."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.main import get_command

import hocket.ckpt
from hocket.ckpt.cli import statistics
from hocket.ckpt.cli.app import app
from hocket.ckpt.cli.exit_codes import ADVICE, OPTIONS, in_options_of, retry_notice
from hocket.ckpt.cli.tree import rows_of
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.document.records import TensorRecord, ValueRecord
from hocket.ckpt.verbs.convert import convert
from hocket.ckpt.verbs.demo import write_demo
from hocket.native import _native
from hocket.native.cli import progress
from hocket.native.cli.options import options_of
from hocket.native.cli.text import print_json

COMMAND = Path(sys.executable).with_name("hocket-ckpt")


def run(*args, env=None):
    """Run the command in a process of its own; return its exit code, stdout and stderr."""
    done = subprocess.run(
        [COMMAND, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **(env or {})},
    )
    return done.returncode, done.stdout, done.stderr


def call(capsys, *args):
    """Run the command in this process, without the start of an interpreter; return the same as `run`."""
    with pytest.raises(SystemExit) as ended:
        app([str(arg) for arg in args])
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "demo"
    code, out, _ = run("demo", folder)
    assert code == 0
    assert f"hocket-ckpt inspect {folder}" in out
    return folder


def test_inspect_shows_tensors_shards_and_values(demo):
    code, out, error = run("inspect", demo)
    assert (code, error) == (0, "")
    assert any("257×64" in line and line.endswith("0000111122223333") for line in out.splitlines())
    assert any("shares model.embed.weight" in line for line in out.splitlines())
    assert "blocks.0…3" in out
    assert ["best_loss", "inf"] in [line.split() for line in out.splitlines()]
    assert "\x1b" not in out
    assert "blocks.0…3" not in run("inspect", demo, "--all")[1]


def test_inspect_json_prints_the_manifest(demo, capsys):
    code, out, _ = call(capsys, "inspect", demo, "--json")
    document = json.loads(out)
    manifest = hocket.ckpt.open(str(demo)).manifest
    assert code == 0
    assert document["save_id"] == manifest.save_id
    assert document["tensors"].keys() == manifest.tensors.keys()
    embedding = document["tensors"]["model.embed.weight"]
    assert (embedding["dtype"], embedding["shape"], len(embedding["chunks"])) == ("BF16", [257, 64], 4)
    assert document["values"]["best_loss"] == {"$float": "inf"}


def test_inspect_of_one_tensor_shows_its_statistics(demo, capsys):
    array = hocket.ckpt.open(str(demo))["model.embed.weight"].astype("f4")
    code, out, _ = call(capsys, "inspect", demo, "--tensor", "model.embed.weight", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["statistics"]["max"] == array.max()
    assert document["statistics"]["items"] == sum(document["histogram"]["counts"]) == array.size
    code, out, _ = call(capsys, "inspect", demo, "--tensor", "model.embed.weight")
    assert "█" in out
    assert f"{array.max():.6g}" in out
    assert call(capsys, "inspect", demo, "--tensor", "optimizer.state.embed.weight.step")[0] == 0


def test_statistics_of_a_tensor_are_merged_from_pieces(tmp_path, capsys, monkeypatch):
    rng = np.random.default_rng(0)
    odd = rng.normal(3, 2, (40, 25)).astype("f4")
    odd[3, 3:6], odd[30, 1] = [np.nan, np.inf, -np.inf], 0
    tensors = {
        "odd": odd, "flags": rng.random(1000) < 0.3, "counts": rng.integers(-9, 1 << 40, (7, 11, 13)),
        "same": np.full(99, 7, "u1"), "none": np.empty((0, 3), "f2"), "nan": np.full(50, np.nan, "f8"),
    }  # fmt: skip
    save_file(tensors, tmp_path / "x.safetensors")
    read, sizes = hocket.ckpt.Checkpoint.part, []
    monkeypatch.setattr(statistics, "_PIECE_ITEMS", 64)
    monkeypatch.setattr(
        hocket.ckpt.Checkpoint, "part", lambda *args: sizes.append(args[2].num_items) or read(*args)
    )
    for name, array in tensors.items():
        code, out, _ = call(capsys, "inspect", tmp_path / "x.safetensors", "--tensor", name, "--json")
        found, bars = json.loads(out)["statistics"], json.loads(out)["histogram"]
        finite = array[np.isfinite(array)].astype("f8")
        assert (code, found["items"]) == (0, array.size)
        assert found.get("nan", 0) == np.isnan(array).sum()
        assert found.get("inf", 0) == np.isinf(array).sum()
        if finite.size:
            assert (found["min"], found["max"], found["zero"]) == (
                finite.min(), finite.max(), (finite == 0).sum()
            )  # fmt: skip
            np.testing.assert_allclose([found["mean"], found["std"]], [finite.mean(), finite.std()], 1e-12)
        if name in ("odd", "flags", "counts"):
            counts, edges = np.histogram(finite, 2 if name == "flags" else 12)
            assert (bars["counts"], bars["edges"]) == (counts.tolist(), edges.tolist())
        else:
            assert bars == {"counts": [], "edges": []}
    assert max(sizes) <= 64


def test_verify_names_the_corrupt_tensors(demo, tmp_path, capsys):
    code, out, _ = call(capsys, "verify", demo)
    assert code == 0
    assert "sound: 103 tensors; 4 files" in out
    bad = tmp_path / "bad"
    write_demo(str(bad))
    file = hocket.ckpt.open(str(bad)).manifest.files[2]
    with (bad / file["path"]).open("r+b") as data:
        data.seek(file["data_start"] + 5)
        data.write(b"\xff\xff\xff")
    code, out, error = call(capsys, "verify", bad)
    assert (code, error) == (1, "")
    assert f"BAD  {file['path']} at data offset 0" in out
    assert "corrupt: 1 flaw in" in out
    code, out, _ = call(capsys, "verify", bad, "--json")
    document = json.loads(out)
    assert code == 1
    assert not document["sound"]
    assert [(flaw["file"], flaw["offset"]) for flaw in document["flaws"]] == [(file["path"], 0)]
    assert set(document["bad_tensors"]) == set(document["flaws"][0]["tensors"])


def test_convert_and_diff_as_json(demo, tmp_path, capsys):
    converted = tmp_path / "hf"
    code, out, error = call(capsys, "convert", demo, converted, "--to", "safetensors", "--json")
    done, manifest = json.loads(out), hocket.ckpt.open(str(demo)).manifest
    assert (code, error) == (0, "")
    assert (done["format"], done["tensors"]) == ("hocket", len(manifest.tensors))
    assert done["files"] == len(list(converted.glob("*.safetensors")))
    assert done["num_bytes"] > 0
    assert "best_loss" in done["left_out"]
    code, out, error = call(capsys, "diff", demo, demo, "--json")
    same = json.loads(out)
    assert (code, error) == (0, "")
    assert (same["a"], same["b"], same["equal"]) == (str(demo), str(demo), True)
    assert same["equal_tensors"] == len(manifest.tensors)
    assert not any(same[part] for part in ("only_a", "only_b", "tensors", "values"))
    code, _, error = call(capsys, "convert", demo, tmp_path / "x", "--to", "dcp", "--include", "model.haed.*")
    assert (code, (tmp_path / "x").exists()) == (3, False)
    assert "`model.haed.*`, which matches none of its" in error
    assert "near: `model.head`" in error
    with pytest.raises(ValueError, match="`exclude` is 'model'; expected a list of globs"):
        convert(str(demo), str(tmp_path / "x"), to="dcp", exclude="model")
    narrowed = tmp_path / "bf16"
    options = ("--to", "safetensors", "--dtype", "BF16", "--exclude", "model.head.weight")
    assert call(capsys, "convert", demo, narrowed, *options)[0] == 0
    code, out, error = call(capsys, "diff", converted, narrowed, "--json")
    found = json.loads(out)
    assert (code, error) == (1, "")
    assert (found["formats"], found["equal"]) == (["safetensors", "safetensors"], False)
    assert (found["only_a"], found["only_b"]) == (["model.head.weight"], [])
    kinds = {tensor["kind"] for tensor in found["tensors"].values()}
    assert kinds == {"dtype"}
    wide = next(tensor for tensor in found["tensors"].values() if tensor["items"])
    assert wide["dtypes"] == ["F32", "BF16"]
    assert wide["largest_absolute"] > 0


def test_diff_of_a_part_under_other_names(demo, tmp_path, capsys):
    base = tmp_path / "base.safetensors"
    call(
        capsys, "convert", demo, base, "--to", "safetensors", "--dtype", "F32", "--include", "model.*.weight"
    )
    weights = {name: hocket.ckpt.open(base)[name] for name in hocket.ckpt.open(base).contents.tensors}
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    save_file({name.replace("model.", "net.", 1): array for name, array in weights.items()}, one)
    save_file({name: array + len(name) for name, array in weights.items()}, two)
    renamed = ("--rename", "model=net", "--include", "net.*")
    code, out, error = call(capsys, "diff", base, one, *renamed, "--json")
    assert (code, error, json.loads(out)["equal_tensors"]) == (0, "", len(weights))
    # Without the new names no tensor has a partner, and each side shows one of its own.
    code, out, error = call(capsys, "diff", base, one, "--include", "*.weight", "--limit", "1")
    assert (code, error) == (1, "")
    assert out.count("more (`--limit 0` shows all)") == 2
    code, out, error = call(capsys, "diff", base, two, "--include", "model.*", "--exclude", "model.head.*")
    taken = [name for name in weights if not name.startswith("model.head.")]
    assert (code, error) == (1, "")
    assert all(name in out for name in taken)
    longest = max(taken, key=len)
    told = next(line for line in out.splitlines() if line.startswith("tensors:"))
    assert told.startswith(
        f"tensors: {len(taken)} by values; largest absolute difference {len(longest)} in {longest}"
    )
    assert "more" not in out
    for options, expected in (
        (("--rename", "modle=net"), "`--rename` has `modle`, which matches none of its"),
        (("--rename", "model.head=model.embed"), "both become `model.embed.weight`"),
        (("--include", "model.haed.*"), "near: `model.head`"),
    ):
        code, out, error = call(capsys, "diff", base, two, *options)
        assert (code, out) in ((3, ""), (4, ""))
        assert expected in error


def test_an_exclude_that_matches_nothing_is_named(tmp_path, capsys):
    source, out = str(tmp_path / "source"), str(tmp_path / "out")
    write_demo(source)
    options = ["--to", "hocket", "--exclude", "optimisers.*", "--exclude", "optimizer.*"]
    code, said, _ = call(capsys, "convert", source, out, *options)
    assert code == 0
    assert "`--exclude` has `optimisers.*`, which matches none of its" in " ".join(said.split())
    assert "`optimizer.*`" not in said
    report = hocket.ckpt.convert(source, tmp_path / "again", to="hocket", exclude=["model.haed.*"])
    assert len(report.idle_exclude) == 1
    assert "near: `model.head`" in report.idle_exclude[0]


def test_ls_distinguishes_committed_partial_and_foreign(tmp_path, capsys):
    for name in ("one", "two", "three"):
        write_demo(str(tmp_path / name))
    (tmp_path / "two/checkpoint.json.zst").unlink()
    (tmp_path / "three/checkpoint.json.zst").write_bytes(b"junk")
    (tmp_path / "logs").mkdir()
    (tmp_path / "early/data").mkdir(parents=True)  # a save that was killed before its first file
    (tmp_path / "project/data").mkdir(parents=True)
    (tmp_path / "project/notes.txt").touch()
    code, out, _ = call(capsys, "ls", tmp_path)
    assert code == 0
    told = {line.split()[-1]: line.split()[0] for line in out.splitlines()[1:] if line.startswith(("c", "f"))}
    assert told["one"] == "committed"
    assert told["logs"] == "foreign"
    assert "partial" in next(line for line in out.splitlines() if line.endswith("  two"))
    assert "never finished" in out
    code, out, _ = call(capsys, "ls", tmp_path, "--json")
    status = {entry["name"]: entry["status"] for entry in json.loads(out)}
    assert status == {
        "one": "committed", "two": "partial", "early": "partial", "three": "foreign", "logs": "foreign",
        "project": "foreign",
    }  # fmt: skip
    assert call(capsys, "rm", tmp_path / "early")[0] == 0
    assert not (tmp_path / "early").exists()
    assert next(entry for entry in json.loads(out) if entry["name"] == "three")["problem"]


def test_control_characters_of_a_checkpoint_do_not_reach_the_terminal(tmp_path, capsys):
    evil = "a\x1b[2J\nb\x9b31m\u202e"
    manifest = Manifest(
        save_id="0" * 32, step=1, created="2026-01-01T00:00:00.000000Z", version=evil, writer=evil,
        world_size=1, mesh={evil: 1}, user={evil: evil},
        tensors={evil: TensorRecord(dtype="F32", shape=(0,), path=(evil,))},
        values={f"v{evil}": ValueRecord(path=(f"v{evil}",), value=evil)},
    )  # fmt: skip
    uri = str(tmp_path / "evil")
    _native.ckpt_commit(uri, _native.ckpt_manifest_encode(manifest.to_document()), "0" * 32)
    write_demo(str(tmp_path / "demo"))
    for arguments in (
        ["ls", tmp_path], ["inspect", uri], ["inspect", uri, "--json"], ["inspect", uri, "--tensor", evil],
        ["inspect", uri, "--tensor", f"x{evil}"], ["verify", uri], ["diff", uri, tmp_path / "demo"],
        ["convert", uri, tmp_path / "x", "--to", "safetensors"], ["rm", uri, "--dry-run"],
    ):  # fmt: skip
        _, out, error = call(capsys, *arguments)
        told = (out + error).replace("\n", "")
        assert told
        assert all(letter.isprintable() or letter == "\u202e" for letter in told), (arguments, told)
        assert "\u202e" not in told or "--json" in arguments
    assert r"a\x1b[2J\nb\x9b31m\u202e" in call(capsys, "inspect", uri)[1]


def test_what_a_long_run_keeps_in_user_is_shortened(tmp_path, capsys):
    uri = str(tmp_path / "long")
    for save_id, user in (("1" * 32, {"losses": b"\0" * 10_000, "fits": ["24ba"]}), ("2" * 32, "x" * 10_000)):
        manifest = Manifest(
            save_id=save_id, step=1, created="2026-01-01T00:00:00.000000Z", version="1", writer="me",
            world_size=1, mesh={}, user=user, tensors={}, values={},
        )  # fmt: skip
        _native.ckpt_commit(uri + save_id, _native.ckpt_manifest_encode(manifest.to_document()), save_id)
        _, out, _ = call(capsys, "inspect", uri + save_id)
        assert len(out) < 1000
        assert len(call(capsys, "inspect", uri + save_id, "--all")[1]) > 10_000
        if isinstance(user, dict):
            assert ["(user).fits", "['24ba']"] in [line.split() for line in out.splitlines()]


def test_version_is_printed(capsys):
    code, out, _ = call(capsys, "--version")
    assert (code, out) == (0, f"hocket-ckpt {_native.__version__}\n")


def test_errors_have_an_exit_code_and_one_line(demo, tmp_path, capsys):
    cases = [
        (2, ("inspect", "ftp://host/x")),
        (2, ("ls", demo)),
        (3, ("inspect", tmp_path / "nothing")),
        (3, ("ls", tmp_path / "nothing")),
        (3, ("inspect", demo, "--tensor", "model.nothing")),
        (4, ("demo", demo)),
    ]
    for expected, args in cases:
        code, out, error = call(capsys, *args)
        assert (code, out) == (expected, ""), args
        assert error.startswith("hocket-ckpt: ")
        assert error.count("\n") == 1
    assert call(capsys, "inspect")[0] == 2
    assert call(capsys, "inspect", demo, "--nonsense")[0] == 2
    partial = tmp_path / "partial"
    write_demo(str(partial))
    (partial / "checkpoint.json.zst").write_bytes(b"junk")
    assert call(capsys, "verify", partial)[0] == 1
    (partial / "checkpoint.json.zst").unlink()
    code, _, error = call(capsys, "verify", partial)
    assert code == 3
    assert "never committed" in error


def test_long_work_logs_its_progress_without_a_terminal(demo, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0)
    for verb, *options in (["convert", "--to", "dcp"], ["reshard", "--ranks", "2"]):
        code, out, error = call(capsys, verb, demo, tmp_path / verb, *options)
        assert (code, f"{verb}ing: " in error) == (0, True)
        assert f"{verb}ing: " not in out
        assert call(capsys, verb, demo, tmp_path / f"{verb}-json", *options, "--json")[2] == ""
    # A folder that cannot be created is exit code 5, a failure of the disk, and not 3, a missing key.
    code, _, error = call(capsys, "convert", demo, "/proc/no", "--to", "dcp")
    assert (code, "cannot create the folder" in error) == (5, True)


def test_a_store_without_credentials_is_exit_code_5():
    env = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    code, out, error = run("inspect", "s3://bucket/x", env=env)
    assert (code, out) == (5, "")
    assert error.count("\n") == 1


def test_commands_work_on_an_object_store(s3d, monkeypatch, capsys):
    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    uri = s3d.uri("cli/demo")
    assert call(capsys, "demo", uri)[0] == 0
    assert call(capsys, "verify", uri)[0] == 0
    assert "blocks.0…3" in call(capsys, "inspect", uri)[1]
    assert call(capsys, "inspect", uri, "--tensor", "model.head.weight")[0] == 0
    assert "committed" in call(capsys, "ls", s3d.uri("cli"))[1]
    assert call(capsys, "demo", uri)[0] == 4
    assert call(capsys, "inspect", s3d.uri("cli/none"))[0] == 3


def test_a_closed_pipe_is_no_error(demo):
    shell = f"{COMMAND} inspect {demo} --json | head -1"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("{\n", "")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_failing_stdout_is_reported_once(demo, options):
    outcomes = []
    reader, gone = os.pipe()
    os.close(reader)
    for stdout in (gone, os.open("/dev/full", os.O_WRONLY)):
        done = subprocess.run(
            [COMMAND, "ls", demo.parent, *options],
            stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
        os.close(stdout)
        outcomes.append((done.returncode, done.stderr))
    assert outcomes == [(0, ""), (5, "hocket-ckpt: [Errno 28] No space left on device\n")]


def test_a_terminal_without_the_characters_shows_escapes(demo, tmp_path):
    other = tmp_path / "größe→"
    shutil.copytree(demo, other)
    for command in (["inspect", other], ["diff", demo, other]):
        shown = {}
        for encoding in ("latin-1", "utf-8"):
            for options in ([], ["--json"]):
                done = subprocess.run(
                    [COMMAND, *command, *options],
                    env={**os.environ, "PYTHONIOENCODING": encoding},
                    capture_output=True, timeout=60, check=False,
                )  # fmt: skip
                assert done.returncode == 0, done.stderr
                text = done.stdout.decode(encoding)
                shown[encoding, bool(options)] = re.sub(r"\b[\d.]+ s\b", "0.0 s", text)  # the time it took
        escaped = "".join(c if c < "\u0100" else f"\\u{ord(c):04x}" for c in shown["utf-8", False])
        assert shown["latin-1", False] == escaped
        assert json.loads(shown["latin-1", True]) == json.loads(shown["utf-8", True])


def test_a_path_beyond_the_locale_is_refused_and_names_in_a_folder_are_shown(demo, tmp_path):
    shutil.copytree(demo, tmp_path / "ü")
    env = {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}
    code, out, error = run("ls", tmp_path / "ü", env=env)
    assert (code, out) == (2, "")
    assert re.search(r"\\xfc` has characters beyond `ascii`.* set `PYTHONUTF8=1` or `LC_ALL=C.UTF-8`", error)
    assert run("ls", tmp_path / "ü", env=env | {"PYTHONUTF8": "1"})[0] == run("ls", tmp_path / "ü")[0]
    assert run("ls", tmp_path, env=env)[1].splitlines()[-1].endswith(r"\xfc")
    assert [entry["name"] for entry in json.loads(run("ls", tmp_path, "--json", env=env)[1])] == ["ü"]


def test_neither_the_package_nor_the_command_imports_torch(demo, tmp_path):
    commands = [
        ["inspect", demo], ["verify", demo], ["ls", demo.parent],
        ["reshard", demo, tmp_path / "x", "--ranks", 2], ["rm", tmp_path / "x", "--dry-run"],
        ["gc", tmp_path],
    ]  # fmt: skip
    script = (
        "import sys, hocket.ckpt\n"
        "from hocket.ckpt.cli import main\n"
        f"for arguments in {[list(map(str, command)) for command in commands]!r}:\n"
        "    sys.argv = ['c', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code, arguments\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
    assert (tmp_path / "x/checkpoint.json.zst").exists()


def test_importing_the_package_imports_neither_rich_nor_typer():
    script = (
        "import sys, hocket.ckpt; print([name for name in ('rich', 'typer', 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_a_tree_folds_equal_neighbours_only():
    names = [f"h.{i}.{part}" for i in range(5) for part in ("a", "b")]
    folded = rows_of(names, lambda name: name.endswith("a") and name.startswith("h.3"))
    assert [row.label for row in folded] == ["h", "0…2", "a", "b", "3", "a", "b", "4", "a", "b"]
    assert len(next(row for row in folded if row.label == "0…2").inside) == 6
    assert [row.name for row in rows_of(names) if row.name] == names


def test_the_commands_and_the_snippets_of_the_readme_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    commands = re.findall(r"^hocket-ckpt .*$", readme, re.MULTILINE)
    assert len(commands) == 14
    for command in commands:
        assert call(capsys, *shlex.split(command, comments=True)[1:])[0] == 0, command
    snippets = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(snippets) == 3
    exec(compile("\n".join(snippets), "README.md", "exec"), {})


def test_retries_are_logged_while_the_store_fails(server, capsys):
    server.set_faults("kind=500,op=GetObject,times=3", "kind=500,op=HeadObject,times=3")
    with retry_notice(look_s=0.01, every_s=0.01):
        code, _, error = call(capsys, "inspect", server.uri("nothing"))
    server.set_faults()
    assert code == 3
    assert re.search(
        r"^hocket-ckpt: requests to the store fail; \d+ (retry|retries) so far$", error, re.MULTILINE
    )


def test_an_interrupted_conversion_leaves_no_empty_folder(demo, tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    for to in ("safetensors", "hocket", "dcp"):
        with pytest.raises(KeyboardInterrupt):
            convert(demo, tmp_path / "new" / to, to=to, on_progress=interrupt)
        assert not list(tmp_path.iterdir())
    (tmp_path / "own").mkdir()
    with pytest.raises(KeyboardInterrupt):
        convert(demo, tmp_path / "own", to="hocket", on_progress=interrupt)
    assert not list((tmp_path / "own").iterdir())


def test_inspect_shows_what_accelerate_saved_beside_the_model(tmp_path, capsys):
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl", "config.json"):
        (tmp_path / name).write_bytes(b"x" * 2048)
    code, out, _ = call(capsys, "inspect", tmp_path)
    assert code == 0
    beside = [line.split()[0] for line in out.partition("beside it")[2].splitlines()[1:]]
    assert beside == ["optimizer.bin", "random_states_0.pkl", "scheduler.bin"]
    _, out, _ = call(capsys, "inspect", tmp_path, "--json")
    assert json.loads(out)["beside"] == dict.fromkeys(beside, 2048)
    _, out, _ = call(capsys, "inspect", tmp_path / "model.safetensors")
    assert "beside it" not in out


def test_json_has_a_line_for_each_entry_of_its_first_two_levels(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"a": {"b": {"c": [1, {"d": None}]}, "é\x85": []}, "e": [], "f": [[1, 2], "x\n"]}
    print_json(document)
    out = capsys.readouterr().out
    assert json.loads(out) == document
    assert out == (
        '{\n  "a": {\n    "b": {"c": [1, {"d": null}]},\n    "é\\u0085": []\n  },\n'
        '  "e": [],\n  "f": [\n    [1, 2],\n    "x\\n"\n  ]\n}\n'
    )


VERBS = sorted(get_command(app).commands)


@pytest.mark.parametrize("verb", VERBS)
def test_messages_name_options_that_the_subcommand_has(verb):
    options = options_of(app, verb)
    expanded = re.escape("by `hocket-ckpt convert` with `--allow-expand` or `--exclude`")
    copied = re.escape("by `hocket-ckpt reshard --unfenced`")
    for message in [f"`{name}` is wrong" for name in OPTIONS] + [f"failed{item.phrase}" for item in ADVICE]:
        said = re.sub(f"{expanded}|{copied}", "", in_options_of(message, options))
        assert set(re.findall("--[a-z-]+", said)) <= options
        assert not re.search("`[a-z_]+=", said)
    assert set(OPTIONS.values()) <= {option for verb in VERBS for option in options_of(app, verb)}
    assert in_options_of("no tensor `step`", options) == "no tensor `step`"


def test_advice_names_no_argument_of_python(demo, tmp_path, capsys):
    torch = pytest.importorskip("torch")
    torch.save({"x": torch.zeros(1).expand(1 << 26)}, tmp_path / "x.pt")
    shutil.copy(tmp_path / "x.pt", tmp_path / "y.pt")
    for args, expected in [
        (
            ["convert", demo, tmp_path / "out", "--to", "dcp", "--memory", 1],
            "`--memory` is 1, `--max-shard-size`",
        ),
        (["convert", demo, tmp_path / "out", "--to", "dcp", "--step", 1], "`--step` and `--user` are"),
        (["reshard", demo, tmp_path / "out", "--ranks", 0], "`--ranks` is 0"),
        (["convert", tmp_path / "x.pt", tmp_path / "out", "--to", "hocket"], "Pass `--allow-expand`"),
        (["diff", tmp_path / "x.pt", tmp_path / "y.pt"], "by `hocket-ckpt convert` with `--allow-expand`"),
    ]:
        code, _, error = call(capsys, *args)
        assert code != 0
        assert expected in error
        assert not re.search("`[a-z_]+=", error)

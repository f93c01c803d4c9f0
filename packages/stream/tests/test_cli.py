"""The `hocket-stream` command: output and exit codes; it does not import torch or change data."""

from __future__ import annotations

import base64
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.native.cli import progress
from hocket.stream import JSONWriter, MDSWriter, StreamingDataset
from hocket.stream.verify import verify
from support.sampling import cases

COMMAND = Path(sys.executable).with_name("hocket-stream")


def listing(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_inspect_shows_the_data_set_and_changes_nothing(
    write: Callable[..., str], call: Callable[..., Any], compression: str | None
) -> None:
    folder = write(200, compression=compression)
    before = listing(folder)
    code, out, error = call("inspect", folder, "--sample", 120)
    assert (code, error) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["tokens", "ndarray:uint16:8", "16"] in lines
    assert ["text", "str", "varies"] in lines
    assert ["id:", "120"] in lines
    assert ["tokens:", "uint16", "(8,)", "[120,", "120,", "120,", "120,", "120,", "120,", "…]"] in lines
    assert listing(folder) == before
    assert "\x1b" not in out

    document = json.loads(call("inspect", folder, "--index-only", "--json")[1])
    dataset = StreamingDataset(local=folder, batch_size=1)
    assert document["samples"] == dataset.size == sum(shard["samples"] for shard in document["shards"])
    stored = sum(len(data) for name, data in before.items() if name != "index.json")
    assert document["stored_bytes"] == stored
    assert (document["raw_bytes"] == stored) == (compression is None)
    assert document["sample"] is None
    assert {tuple(shard["hashes"]) for shard in document["shards"]} == {("xxh3_64",)}


def test_inspect_json_prints_values_as_json(tmp_path: Path, call: Callable[..., Any]) -> None:
    values = {
        "a": 7,
        "b": bytes(range(100)),
        "c": np.arange(100, dtype=np.uint16).reshape(4, 25),
        "d": np.float32("nan"),
        "e": {"x": [1, None]},
        "f": "x" * 200,
    }
    columns = {"a": "int", "b": "bytes", "c": "ndarray", "d": "float32", "e": "json", "f": "str"}
    with MDSWriter(columns=columns, out=tmp_path) as writer:
        writer.write(values)
    found = json.loads(call("inspect", tmp_path, "--json")[1])["sample"]["values"]
    assert (found["a"], found["d"], found["e"], found["f"]) == (7, "nan", {"x": [1, None]}, "x" * 200)
    assert base64.b64decode(found["b"]["base64"]) == values["b"]
    assert (found["c"]["dtype"], found["c"]["shape"]) == ("uint16", [4, 25])
    assert found["c"]["values"] == np.arange(100).reshape(4, 25).tolist()


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path, call: Callable[..., Any]) -> None:
    with MDSWriter(columns={"a\x1b[2J": "str"}, out=tmp_path) as writer:
        writer.write({"a\x1b[2J": "\x9b31m\x07"})
    for verb in ("inspect", "stats", "verify"):
        code, out, error = call(verb, tmp_path)
        assert (code, error) == (0, "")
        assert all(mark.isprintable() or mark == "\n" for mark in out)
    assert r"a\x1b[2J" in call("inspect", tmp_path)[1]
    _, _, error = call("inspect", f"{tmp_path}/\x1b]0;title\x07")
    assert r"\x1b]0;title" in error
    assert "\x1b" not in error


def test_version(call: Callable[..., Any]) -> None:
    said = f"hocket-stream {importlib.metadata.version('hocket-stream')}\n"
    assert call("--version")[1] == said
    assert "--install-completion" in call("--help")[1]
    command = [sys.executable, "-m", "hocket.stream", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == said


def test_long_work_logs_its_progress_without_a_terminal(
    write: Callable[..., str], call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    (tmp_path / "x.jsonl").write_text('{"n": 1}\n' * 100)
    target = tmp_path / "out"
    _, out, error = call("convert", tmp_path / "x.jsonl", target, "--size-limit", "1kb")
    assert re.search(rf"{target}: \d+ of \d+ shards stored, \d\.\d MiB written\n", error)
    assert "shards stored" not in out
    assert re.search(r"verifying: [0-9.]+ K?i?B of [0-9.]+ KiB\n", call("verify", target)[2])
    assert call("verify", target, "--json")[2] == ""
    monkeypatch.undo()
    assert call("verify", target)[2] == ""  # too short to log progress


def test_an_interrupt_is_one_line(
    write: Callable[..., str], call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = write(9)

    def interrupt(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hocket.stream.cli.verify.verify", interrupt)
    code, _, error = call("verify", uri)
    assert (code, error) == (130, "hocket-stream: interrupted\n")


def test_inspect_shortens_long_values_and_never_unpickles(tmp_path: Path, call: Callable[..., Any]) -> None:
    columns = {"long": "str", "raw": "bytes", "object": "pkl"}
    with MDSWriter(columns=columns, out=tmp_path / "d") as writer:
        writer.write({"long": "y" * 500, "raw": b"z" * 500, "object": {"a": print}})
    _, out, _ = call("inspect", tmp_path / "d")
    assert "y" * 50 in out
    assert "y" * 61 not in out
    assert "(500 bytes)" in out
    assert "y" * 500 in call("inspect", tmp_path / "d", "--all")[1]
    assert call("verify", tmp_path / "d")[0] == 0


def test_a_sound_data_set_verifies(write: Callable[..., str], call: Callable[..., Any]) -> None:
    folder = write(150, compression="zstd")
    before = listing(folder)
    code, out, _ = call("verify", folder)
    assert code == 0
    assert out.splitlines()[-1].startswith("sound: ")
    assert listing(folder) == before
    # A local reader may have decompressed the shards, and the compressed files may be gone.
    list(StreamingDataset(local=folder, batch_size=8))
    for path in Path(folder).glob("*.zstd"):
        path.unlink()
    assert call("verify", folder)[0] == 0


@pytest.mark.slow
@settings(max_examples=cases(full=500, sample=25), deadline=None)
@given(data=st.data(), compression=st.sampled_from([None, "zstd", "gz"]))
def test_verify_names_exactly_the_shards_with_a_flipped_byte(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, compression: str | None
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    columns = {"x": "bytes"}
    with MDSWriter(
        columns=columns, out=folder, size_limit=300, hashes=["xxh3_64"], compression=compression
    ) as writer:
        for number in range(24):
            writer.write({"x": bytes([number]) * 30})
    files = sorted(path for path in folder.iterdir() if path.name != "index.json")
    hit = data.draw(st.sets(st.sampled_from(files), min_size=1))
    for path in hit:
        flip(path, data.draw(st.integers(0, 1 << 20)))
    bad = {shard.name for shard in verify(str(folder)).bad}
    assert bad == {path.name.removesuffix(f".{compression}") for path in hit}


def test_verify_names_each_problem(tmp_path: Path, call: Callable[..., Any]) -> None:
    with MDSWriter(columns={"x": "str"}, out=tmp_path, size_limit=600, hashes=None) as writer:
        for number in range(60):
            writer.write({"x": f"{number:060d}"})
    names = sorted(path.name for path in tmp_path.glob("*.mds"))
    assert len(names) >= 5
    (tmp_path / names[0]).unlink()
    os.truncate(tmp_path / names[1], 100)
    for name, place, value in ((names[2], 11, 0xFF), (names[3], -1, 0xFF)):
        data = bytearray((tmp_path / name).read_bytes())
        data[place] = value
        (tmp_path / name).write_bytes(data)
    code, out, _ = call("verify", tmp_path, "--json")
    document = json.loads(out)
    assert code == 1
    problems = {bad["name"]: bad["problem"] for bad in document["bad"]}
    assert list(problems) == names[:4]
    assert "was not found at" in problems[names[0]]
    assert f"`{tmp_path}/{names[1]}` has 100 bytes" in problems[names[1]]
    assert "offset" in problems[names[2]]
    assert "is not UTF-8" in problems[names[3]]
    code, out, _ = call("verify", tmp_path)
    assert [line.split()[1] for line in out.splitlines() if line.startswith("BAD")] == [
        f"{name}:" for name in names[:4]
    ]
    assert out.splitlines()[-1].startswith("corrupt: 4 of ")


@pytest.mark.parametrize("count", [1, 900_000_000, 10**12, 1 << 63, 1 << 64, -1])
def test_a_wrong_sample_count_in_the_index_is_exit_code_1(
    write: Callable[..., str], call: Callable[..., Any], count: int
) -> None:
    folder = write(20)
    path = Path(folder) / "index.json"
    index = json.loads(path.read_text())
    index["shards"][0]["samples"] = count
    if count == 900_000_000:
        index["shards"][0]["raw_data"]["bytes"] = 4_000_000_000  # large enough for the offset table
    path.write_text(json.dumps(index))
    for verb in ("inspect", "verify", "stats"):
        assert call(verb, folder)[0] == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_verify_of_a_gigabyte_names_the_bad_shards(tmp_path: Path) -> None:
    num_blocks = cases(full=1 << 10, sample=1 << 6)
    block = np.random.default_rng(0).bytes(1 << 20)
    with MDSWriter(columns={"x": "bytes"}, out=tmp_path, hashes=["xxh3_64"], size_limit="5mb") as writer:
        for _ in range(num_blocks):
            writer.write({"x": block})
    hit = ["shard.00003.mds", "shard.00011.mds"]
    for name in hit:
        flip(tmp_path / name, 1_234_567)
    assert [shard.name for shard in verify(str(tmp_path)).bad] == hit


def test_stats_count_every_value(write: Callable[..., str], call: Callable[..., Any]) -> None:
    folder = write(200, compression="zstd")
    document = json.loads(call("stats", folder, "--json")[1])
    columns = {column["name"]: column for column in document["columns"]}
    lengths = [number % 50 for number in range(200)]
    text = columns["text"]
    assert (text["num_values"], text["num_bytes"]) == (200, sum(lengths))
    assert (text["least_bytes"], text["most_bytes"]) == (0, 49)
    assert text["bins"][:7] == [sum(length.bit_length() == bits for length in lengths) for bits in range(7)]
    assert (columns["id"]["least"], columns["id"]["most"]) == (0, 199)
    assert columns["tokens"]["num_bytes"] == 200 * 16
    _, out, _ = call("stats", folder, "--shards", 2)
    assert out.startswith("2 of ")
    assert "text: values by size" in out
    assert call("stats", folder, "--shards", 0)[0] == 2


def test_commands_read_text_shards_and_merged_data_sets(
    tmp_path: Path, write: Callable[..., str], call: Callable[..., Any]
) -> None:
    columns = {"name": "str", "count": "int", "share": "float"}
    for part in ("a", "b"):
        with JSONWriter(
            columns=columns, out=tmp_path / "all" / part, size_limit=200, hashes=["md5"]
        ) as writer:
            for number in range(20):
                writer.write({"name": part, "count": number, "share": number / 4})
    code, out, _ = call("merge", tmp_path / "all")
    assert code == 0
    assert "2 folders" in out
    assert call("verify", tmp_path / "all")[0] == 0
    assert "share: 0.25" in call("inspect", tmp_path / "all", "--sample", 21)[1]
    document = json.loads(call("stats", tmp_path / "all", "--json")[1])
    assert [column["num_values"] for column in document["columns"]] == [40, 40, 40]
    merged = json.loads(
        call("merge", tmp_path / "all/a", tmp_path / "all/b", "--out", tmp_path / "all", "--json")[1]
    )
    assert (merged["folders"], merged["samples"]) == (["a", "b"], 40)
    flip(tmp_path / "all/a/shard.00001.json", 9)
    flip(tmp_path / "all/b/shard.00000.json.meta", 9)
    bad = json.loads(call("verify", tmp_path / "all", "--json")[1])["bad"]
    assert [shard["name"] for shard in bad] == ["a/shard.00001.json", "b/shard.00000.json"]
    assert call("merge", tmp_path / "all/a", tmp_path / "all/b")[0] == 2


def test_commands_accept_a_data_set_without_samples(tmp_path: Path, call: Callable[..., Any]) -> None:
    MDSWriter(columns={"x": "int"}, out=tmp_path).finish()
    for verb in ("inspect", "verify", "stats"):
        assert call(verb, tmp_path)[0] == 0
        assert json.loads(call(verb, tmp_path, "--json")[1])
    # Where a sample is larger than the limit, mosaicml-streaming writes an empty shard, and so does Hocket.
    with MDSWriter(columns={"x": "bytes"}, out=tmp_path, exist_ok=True, size_limit=500) as writer:
        writer.write({"x": bytes(1000)})
    assert call("verify", tmp_path)[0] == 0
    empty = tmp_path / "shard.00000.mds"
    os.truncate(empty, empty.stat().st_size - 1)
    assert [shard["name"] for shard in json.loads(call("verify", tmp_path, "--json")[1])["bad"]] == [
        empty.name
    ]


@pytest.mark.parametrize("verb", ["inspect", "verify", "stats"])
def test_exit_codes_for_missing_and_broken_data_sets(
    tmp_path: Path, call: Callable[..., Any], verb: str
) -> None:
    code, out, error = call(verb, tmp_path)
    assert (code, out) == (3, "")
    assert error.startswith("hocket-stream: there is no index at")
    (tmp_path / "index.json").write_text("{")
    assert call(verb, tmp_path)[0] == 1


def test_commands_work_on_an_object_store(
    s3d: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    write: Callable[..., str],
    call: Callable[..., Any],
) -> None:
    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    uri = s3d.uri(tmp_path.name)
    write(150, out=uri, compression="zstd")
    assert "id: 149" in call("inspect", uri, "--sample", 149)[1]
    assert call("verify", uri)[0] == 0
    assert call("verify", f"{uri}/nothing")[0] == 3
    (tmp_path / "x.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    assert call("convert", tmp_path / "x.jsonl", f"{uri}/new")[0] == 0
    assert call("convert", tmp_path / "x.jsonl", f"{uri}/new")[0] == 4
    assert call("convert", tmp_path / "y.jsonl", f"{uri}/other")[0] == 3
    assert "n: 2" in call("inspect", f"{uri}/new", "--sample", 1)[1]
    document = json.loads(call("bench", uri, "--json")[1])
    assert (document["samples"], document["whole_epoch"]) == (150, True)


def test_piped_output_is_complete_with_a_progress_bar_on_stderr(
    write: Callable[..., str],
) -> None:
    folder = write(100)
    flip(Path(folder) / "shard.00001.mds", 700)
    terminal, side = os.openpty()
    try:
        done = subprocess.run(
            [COMMAND, "verify", folder],
            stdout=subprocess.PIPE,
            stderr=side,
            text=True,
            timeout=60,
            check=False,
        )
        os.close(side)
        assert b"verifying" in os.read(terminal, 1 << 16)
    finally:
        os.close(terminal)
    assert done.returncode == 1
    starts = [line.split()[0] for line in done.stdout.splitlines()]
    assert starts == ["ok", "BAD", *["ok"] * (len(starts) - 3), "corrupt:"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_failing_stdout_is_reported_once(write: Callable[..., str], options: list[str]) -> None:
    folder = write(3)
    outcomes = []
    reader, gone = os.pipe()
    os.close(reader)
    for stdout in (gone, os.open("/dev/full", os.O_WRONLY)):
        done = subprocess.run(
            [COMMAND, "inspect", folder, *options],
            stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
        os.close(stdout)
        outcomes.append((done.returncode, done.stderr))
    assert outcomes == [(0, ""), (5, "hocket-stream: [Errno 28] No space left on device\n")]


# Codes of a sound and of a damaged data set, which is not sound because its problems cannot be shown.
SHOWN = {
    "stdout closed": (">&-", 0, 1),
    "stderr closed": ("2>&-", 1),
    "both closed": (">&- 2>&-", 1),
    "stderr full": ("2>/dev/full", 1),
    "stdout without a reader": (">&3", 1),
    "stderr without a reader": ("2>&3", 1),
}


@pytest.mark.parametrize("case", SHOWN)
def test_streams_that_take_nothing_do_not_change_the_exit_code(write: Callable[..., str], case: str) -> None:
    redirection, *codes = SHOWN[case]
    folder = write(3)
    reader, gone = os.pipe()
    os.close(reader)
    for code in codes:
        if code:
            flip(Path(folder) / "shard.00000.mds", 100)
        done = subprocess.run(
            ["bash", "-c", f'exec 3>&{gone}; "$0" verify "$1" {redirection}', COMMAND, folder],
            pass_fds=[gone],
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (code, b"")
    os.close(gone)


def test_values_are_shown_in_the_encoding_of_the_terminal(tmp_path: Path) -> None:
    with MDSWriter(columns={"x": "str"}, out=tmp_path / "d") as writer:
        writer.write({"x": "é→😀"})
    outputs = {}
    for options in ([], ["--json"]):
        done = subprocess.run(
            [COMMAND, "inspect", tmp_path / "d", "--sample", "0", *options],
            env={**os.environ, "PYTHONIOENCODING": "latin-1"},
            capture_output=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        outputs[bool(options)] = done.stdout.decode("latin-1")
    assert r"é\u2192\U0001f600" in outputs[False]
    assert "é→😀" in json.dumps(json.loads(outputs[True]), ensure_ascii=False)


def test_a_path_beyond_the_locale_is_refused_with_the_remedy(
    write: Callable[..., str], tmp_path: Path
) -> None:
    folder = write(3, name="größe")
    not_utf8 = os.fsdecode(os.fsencode(tmp_path) + b"/m\xfc")
    shutil.copytree(folder, not_utf8)
    ascii_locale = {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}
    remedy = [r"gr\xf6\xdfe", "` has characters beyond `ascii`", "`PYTHONUTF8=1` or `LC_ALL=C.UTF-8`"]
    calls: list[tuple[Any, Any, dict[str, str], int, list[str]]] = [
        (folder, tmp_path, ascii_locale, 2, remedy),
        (".", folder, ascii_locale, 2, remedy),
        (folder, tmp_path, ascii_locale | {"PYTHONUTF8": "1"}, 0, []),
        (b"l\xfc", tmp_path, {}, 2, [r"`l\xfc` is not UTF-8"]),
        (".", not_utf8, {}, 2, [r"/m\xfc` is not UTF-8, which paths have to be: rename it"]),
    ]
    for place, cwd, locale, code, said in calls:
        done = subprocess.run(
            [COMMAND, "inspect", place, "--json"],
            env={**os.environ, **locale}, cwd=cwd, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, bool(done.stderr)) == (code, bool(said)), done.stderr
        assert [part for part in said if part not in done.stderr] == []


def test_verify_imports_neither_torch_nor_pandas(write: Callable[..., str]) -> None:
    script = (
        "import sys; from hocket.stream.cli.app import app; "
        "app(sys.argv[1:], standalone_mode=False); print('torch' in sys.modules, 'pandas' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "verify", write(20)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False False"
    help_text = subprocess.run(
        [COMMAND, "--help"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "Exit codes: 0 success, 1 problems found" in help_text


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_temporary_folder_is_needed_only_for_shards_that_are_unpacked(
    write: Callable[..., str],
    call: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compression: str | None,
) -> None:
    folder = write(200, compression=compression)
    before = listing(folder)
    calls = [["inspect"], ["inspect", "--sample", "0"], ["verify"], ["stats"], ["bench"]]
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    for verb, *options in calls:
        code, _, error = call(verb, folder, *options)
        assert (code, "`TMPDIR`" in error) == ((0, False) if compression is None else (2, True)), error
    assert call("inspect", folder, "--index-only")[0] == 0
    assert call("bench", folder, "--local", tmp_path / "cache")[0] == 0
    assert listing(folder) == before

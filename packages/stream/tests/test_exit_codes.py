"""The options that the messages of `hocket-stream` name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from hocket.native.cli.options import REGION, options_of
from hocket.stream import MDSWriter
from hocket.stream.cli.app import app
from hocket.stream.cli.exit_codes import ADVICE, OPTIONS, in_options_of

VERBS = sorted(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("verb", VERBS)
def test_messages_name_options_that_the_subcommand_has(verb: str) -> None:
    options = options_of(app, verb)
    spoken = [f"`{name}` is wrong" for name in OPTIONS] + [
        f"failed{item.phrase}" for item in (*ADVICE, REGION)
    ]
    for message in spoken:
        said = in_options_of(message, options)
        assert set(re.findall("--[a-z-]+", said)) <= options
        assert not re.search("`[a-z_]+=", said)
    assert set(OPTIONS.values()) <= {option for verb in VERBS for option in options_of(app, verb)}
    assert in_options_of("column `epoch` is missing", options) == "column `epoch` is missing"


def test_advice_names_no_argument_of_python(tmp_path: Path, call: Callable[..., Any]) -> None:
    with MDSWriter(columns={"x": "pkl"}, out=tmp_path / "pkl") as pickles:
        pickles.write({"x": {1}})
    with MDSWriter(columns={"x": "str"}, out=tmp_path / "bad", hashes=[]) as texts:
        texts.write({"x": "abc"})
    shard = tmp_path / "bad/shard.00000.mds"
    data = bytearray(shard.read_bytes())
    data[-7:-3] = (1 << 20).to_bytes(4, "little")  # the size of the text
    shard.write_bytes(data)
    (tmp_path / "file").touch()
    calls: list[tuple[list[Any], str]] = [
        (["bench", tmp_path / "pkl"], "Read the data in Python"),
        (["inspect", tmp_path / "bad"], "write the data set again"),
        (["verify", tmp_path / "bad"], "write the data set again"),
        (["verify", tmp_path / "bad", "--json"], "write the data set again"),
        (["bench", tmp_path / "bad"], "write the data set again"),
        (["bench", write_zip(tmp_path), "--local", tmp_path / "file"], "as `--local`"),
        (["bench", tmp_path / "pkl", "--local", "s3://b/p"], "expected a local path"),
        (["stats", tmp_path / "bad", "--shards", 0], "`--shards` is 0"),
        (["simulate", tmp_path / "bad", "--nodes", 0], "`--nodes` is 0"),
        (["simulate", tmp_path / "bad", "--epoch-size", 9], "`--epoch-size` is given without `--weights`"),
        (["simulate", *[tmp_path / "bad"] * 2, "--weights", "bad=1"], "pass folders with different names"),
        (["convert", shard, tmp_path / "out", "--from", "jsonl", "--empty-as-nan"], "expected csv or tsv"),
    ]
    for args, expected in calls:
        code, out, error = call(*args)
        assert code != 0
        assert expected in out + error, (args, out, error)
        assert not re.search(r"`[a-z_]+=|`remote`|`local`", out + error), (args, out, error)


def write_zip(folder: Path) -> Path:
    with MDSWriter(columns={"x": "int"}, out=folder / "zip", compression="zstd") as writer:
        writer.write({"x": 1})
    return folder / "zip"


@pytest.mark.parametrize("options", [[], ["--empty-as-nan"]])
def test_convert_reads_empty_fields_as_nan_on_request(
    tmp_path: Path, call: Callable[..., Any], caplog: pytest.LogCaptureFixture, options: list[str]
) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n,3\n")
    assert call("convert", tmp_path / "x.csv", tmp_path / "out", *options)[0] == 0
    columns = json.loads(call("inspect", tmp_path / "out", "--index-only", "--json")[1])["columns"]
    assert columns[0]["encoding"] == ("float64" if options else "json")
    assert ("`--empty-as-nan`" in caplog.text) == (not options)

"""Text files of a source: compressed ones, JSON files, and the separators of CSV files."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from hocket.stream import StreamingDataset, convert
from hocket.stream.errors import ConfigError, SampleError

ROWS = [{"n": number, "text": f"é {number}"} for number in range(3000)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
TABLE = "n,text\n" + "".join(f"{row['n']},{row['text']}\n" for row in ROWS)


def zstd_frames(data: bytes) -> bytes:
    """Return several frames, as parallel compressors write them, with one that readers skip."""
    packer = zstandard.ZstdCompressor()
    half = len(data) // 2
    skipped = (0x184D2A50).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"
    return packer.compress(data[:half]) + skipped + packer.compress(data[half:])


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": lambda data: gzip.compress(data[:99]) + gzip.compress(data[99:]),
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstd_frames,
}


def read(folder: Path) -> list[dict[str, Any]]:
    return StreamingDataset(local=folder, batch_size=8)[:]


@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "json", "csv", "tsv"])
@pytest.mark.parametrize("packer", PACKERS)
def test_compressed_files_are_read_and_damaged_ones_named(tmp_path: Path, kind: str, packer: str) -> None:
    text = {"csv": TABLE, "tsv": TABLE.replace(",", "\t")}
    data = text[kind].encode() if kind in text else LINES
    path = tmp_path / f"x.{kind}.{packer.upper() if kind == 'csv' else packer}"
    whole = PACKERS[packer](data)
    path.write_bytes(whole)
    assert convert.convert(path, tmp_path / "out").columns == {"n": "int", "text": "str"}
    assert read(tmp_path / "out") == ROWS
    for broken in (whole[:-9], whole[: len(whole) // 2], b"none" + whole):
        path.write_bytes(broken)
        with pytest.raises(SampleError, match=rf"`{path}` is not a .* file, or is damaged"):
            convert.convert(path, tmp_path / "again")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}\n\n{"a": 2}\n', [1, 2]),
        ('\n[{"a": 1},\n {"a": 2}]\n', [1, 2]),
        ('[{"a": 1}, {"a": 2}]', [1, 2]),
        ('{\n  "a": 1\n}\n', [1]),
        ('{"a": 1}', [1]),
        ('\ufeff[{"a": 3}]', [3]),
    ],
)
def test_json_files_hold_lines_an_array_or_an_object(tmp_path: Path, text: str, expected: list[int]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.json").write_text(text)
    for source in (tmp_path / "in" / "x.json", tmp_path / "in"):
        done = convert.convert(source, tmp_path / f"out{source.suffix}")
        assert done.columns == {"a": "int"}
        assert [sample["a"] for sample in read(tmp_path / f"out{source.suffix}")] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n[2]\n', "line 2 is '\\[2\\]': expected a JSON object"),
        ('[{"a": 1}, 2]', "element 1 is '2': expected a JSON object"),
        ('{"a": 1}\n{"a":', "line 2 is not valid JSON"),
        ('{"a":\n1}{', "as a whole is not valid JSON"),
    ],
)
def test_invalid_json_files_raise(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(SampleError, match=rf"x.json` {message}"):
        convert.convert(tmp_path / "x.json", tmp_path / "out")


def test_json_beside_other_files_is_metadata(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "dataset_infos.json").write_text('{"b": 1}')
    assert convert.convert(tmp_path, tmp_path / "out").columns == {"a": "int"}
    assert "not read, such as `dataset_infos.json`" in caplog.text
    (tmp_path / "x.jsonl").rename(tmp_path / "x.csv")
    (tmp_path / "x.csv").write_text("c\n1\n")
    assert convert.convert(tmp_path, tmp_path / "csv").columns == {"c": "int"}


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_the_separator_of_a_csv_file_is_found(
    tmp_path: Path, separator: str, is_named: bool, quoting: Any
) -> None:
    rows = [["id", "text"], ["1", "a; b, c | d\te"], ["2", "1,5\nline"]]
    with (tmp_path / "x.csv").open("w", encoding="utf-8-sig", newline="") as file:
        if is_named:
            file.write(f"sep={separator}\r\n")
        csv.writer(file, delimiter=separator, quoting=quoting).writerows(rows)
    done = convert.convert(tmp_path / "x.csv", tmp_path / "out")
    assert done.columns == {"id": "int", "text": "str"}
    assert [[str(sample["id"]), sample["text"]] for sample in read(tmp_path / "out")] == rows[1:]


@pytest.mark.parametrize("head", ["text", '"one; two"', "a,b;c"])
def test_other_first_rows_are_separated_by_commas(tmp_path: Path, head: str) -> None:
    (tmp_path / "x.csv").write_text(f"{head}\n{','.join('1' for _ in head.split(','))}\n")
    assert list(convert.convert(tmp_path / "x.csv", tmp_path / "out").columns) == head.strip('"').split(",")


def test_a_missing_zstandard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    (tmp_path / "x.jsonl.zst").write_bytes(zstd_frames(LINES))
    with pytest.raises(ConfigError, match=r"pip install 'hocket-stream\[zstd\]'"):
        convert.convert(tmp_path / "x.jsonl.zst", tmp_path / "out")


@pytest.mark.parametrize(("read", "separator"), [(convert.from_csv, ","), (convert.from_tsv, "\t")])
def test_empty_numbers_become_nan_on_request_as_numpy_reads_them(
    tmp_path: Path, read: Callable[..., Any], separator: str
) -> None:
    rows = ["x,whole,text,none,wide", "1.5,3,a,,9007199254740993", ",  ,,,", "-2e3,7,c,,5"]
    path = tmp_path / f"data.{'csv' if separator == ',' else 'tsv'}"
    path.write_text("\n".join(row.replace(",", separator) for row in rows) + "\n")
    read(path, tmp_path / "out", empty_as_nan=True)
    samples = list(StreamingDataset(local=str(tmp_path / "out"), batch_size=1, shuffle=False))
    expected = np.genfromtxt(path, delimiter=separator, skip_header=1, usecols=(0, 1))
    np.testing.assert_array_equal([[one["x"], one["whole"]] for one in samples], expected)
    assert [one["text"] for one in samples] == ["a", "", "c"]
    assert [one["none"] for one in samples] == ["", "", ""]
    # A float64 cannot hold this integer, so the column stays exact.
    assert [one["wide"] for one in samples] == [9007199254740993, None, 5]


def test_a_setting_of_another_format_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"x": 1}\n')
    with pytest.raises(ConfigError, match="`empty_as_nan` does not apply to a source of format `jsonl`"):
        convert.convert(tmp_path / "data.jsonl", tmp_path / "out", empty_as_nan=True)
    assert not (tmp_path / "out").exists()


def test_a_given_column_of_floats_takes_empty_fields_as_nan_only_on_request(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("x,y\n1,2\n,3\n")
    columns = {"x": "float32", "y": "int"}
    with pytest.raises(SampleError, match="column `x`: '' is not float32"):
        convert.from_csv(tmp_path / "data.csv", tmp_path / "strict", columns=columns)
    convert.from_csv(tmp_path / "data.csv", tmp_path / "out", columns=columns, empty_as_nan=True)
    samples = list(StreamingDataset(local=str(tmp_path / "out"), batch_size=1, shuffle=False))
    assert np.isnan(samples[1]["x"])
    assert samples[1]["y"] == 3

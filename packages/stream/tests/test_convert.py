"""Conversion: every source is written as a data set and read back."""

from __future__ import annotations

import csv
import datetime as dt
import gzip
import io
import json
import sys
import tarfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hocket.stream import StreamingDataset, convert
from hocket.stream.cli.app import app
from hocket.stream.errors import ConfigError, DatasetExistsError, SampleError, SourceNotFoundError
from support.sampling import cases

GROUP = "needs `uv sync --group datasets`"


def read(folder: Path) -> list[dict[str, Any]]:
    dataset = StreamingDataset(local=folder, batch_size=8)
    return dataset[:]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
columns_of_one_type = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(
        [
            st.integers(-(1 << 63), (1 << 63) - 1),
            st.integers(-(1 << 70), 1 << 70),
            st.floats(allow_nan=False),
            st.text(st.characters(codec="utf-8")),
            st.integers(-9, 9) | st.floats(allow_nan=False),
            json_values,
        ]
    ),
    min_size=1,
).flatmap(lambda kinds: st.lists(st.fixed_dictionaries(kinds), min_size=1, max_size=8))


@pytest.mark.slow
@settings(max_examples=cases(full=1000, sample=60), deadline=None)
@given(samples=columns_of_one_type)
def test_json_lines_round_trip(
    tmp_path_factory: pytest.TempPathFactory, samples: list[dict[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("jsonl")
    (folder / "x.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    done = convert.from_jsonl(folder / "x.jsonl", folder / "out")
    assert done.num_samples == len(samples)
    assert read(folder / "out") == samples


def test_several_json_lines_files_are_converted_with_given_columns(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl").write_text('{"t": [1, 2], "n": 1}\n\n{"t": [3, 4], "n": 2, "only": "x"}\n')
    (source / "b.jsonl.gz").write_bytes(gzip.compress(b'{"t": [5, 6], "n": 3}\n'))
    done = convert.convert(source, tmp_path / "out", columns={"t": "ndarray:uint16:2", "n": "uint8"})
    assert done.columns == {"t": "ndarray:uint16:2", "n": "uint8", "only": "json"}
    found = read(tmp_path / "out")
    assert [sample["t"].tolist() for sample in found] == [[1, 2], [3, 4], [5, 6]]
    assert [sample["only"] for sample in found] == [None, "x", None]
    assert found[0]["t"].dtype == np.uint16
    whole = (source / "b.jsonl.gz").read_bytes()
    for broken in (whole[:-9], b"no gzip" + whole):
        (source / "b.jsonl.gz").write_bytes(broken)
        with pytest.raises(SampleError, match=r"b.jsonl.gz` is not a gzip file"):
            convert.convert(source, tmp_path / "again")


@pytest.mark.parametrize(
    ("text", "columns", "error", "message"),
    [
        ('{"a": 1}\n{"a": \n', {}, SampleError, "x.jsonl` line 2 is not valid JSON"),
        ("[1]\n", {}, SampleError, "expected a JSON object"),
        ("", {}, ConfigError, "no samples"),
        ('{"a": 1}\n{"a": 300}\n', {"a": "uint8"}, SampleError, "sample 1 of the source: column `a`"),
        ('{"a": [70000]}\n', {"a": "ndarray:uint16"}, SampleError, "sample 0.*changes as uint16"),
        ('{"a": 1}\n', {"b": "int"}, ConfigError, r"\['b'\].*\['a'\]"),
    ],
)
def test_invalid_json_lines_raise_and_leave_no_data_set(
    tmp_path: Path, text: str, columns: dict[str, str], error: type[Exception], message: str
) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(error, match=message):
        convert.from_jsonl(tmp_path / "x.jsonl", tmp_path / "out", columns=columns)
    assert not (tmp_path / "out" / "index.json").exists()


def test_unknown_formats_and_missing_or_remote_sources_raise(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("")
    with pytest.raises(ConfigError, match=r"no file with a known suffix.*jsonl, csv, tsv, parquet"):
        convert.convert(tmp_path, tmp_path / "out")
    with pytest.raises(SourceNotFoundError, match="does not exist"):
        convert.convert(tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(ConfigError, match="expected a local path"):
        convert.convert("s3://bucket/x.jsonl", tmp_path / "out")
    with pytest.raises(ConfigError, match="`format` is `xml`"):
        convert.convert(tmp_path, tmp_path / "out", format="xml")


def image_bytes(kind: str, number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (number + 1, 3), (number, 0, 0)).save(out, format=kind)
    return out.getvalue()


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def npy(array: np.ndarray[Any, Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_webdataset_round_trips(tmp_path: Path, suffix: str) -> None:
    files: dict[str, bytes] = {}
    for number in range(20):
        key = f"train/{number:04d}"
        files |= {
            f"{key}.jpg": image_bytes("JPEG", number),
            f"{key}.cls": b"%d" % number,
            f"{key}.txt": f"é {number}".encode(),
            f"{key}.json": json.dumps({"n": number}).encode(),
            f"{key}.npy": npy(np.full((2, number + 1), number, np.float32)),
            f"{key}.seg.png": image_bytes("PNG", number),
            f"{key}.pyd": b"\x80\x04.",
        }
    write_tar(tmp_path / f"a{suffix}", files)
    done = convert.convert(tmp_path / f"a{suffix}", tmp_path / "out")
    assert done.columns == {
        "__key__": "str", "jpg": "jpeg", "cls": "int", "txt": "str", "json": "json", "npy": "ndarray",
        "seg.png": "png", "pyd": "bytes",
    }  # fmt: skip
    found = read(tmp_path / "out")
    assert [sample["__key__"] for sample in found] == [f"train/{number:04d}" for number in range(20)]
    for number, sample in enumerate(found):
        assert (sample["cls"], sample["txt"], sample["json"]) == (number, f"é {number}", {"n": number})
        assert np.array_equal(sample["npy"], np.full((2, number + 1), number, np.float32))
        assert (sample["jpg"].size, sample["seg.png"].getpixel((0, 0))) == ((number + 1, 3), (number, 0, 0))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.txt": b"x", "a.cls": b"1", "b.txt": b"y"}, r"sample `b` has no \['cls'\]"),
        ({"a.cls": b"one"}, "`cls` of sample `a`.*expected `int`"),
        ({"a.npy": npy(np.array([{}], object))}, "`npy` of sample `a`.*allow_pickle"),
        ({"a.txt": b"\xff"}, "expected `str`"),
    ],
)
def test_invalid_tar_files_raise(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    write_tar(tmp_path / "a.tar", files)
    with pytest.raises(SampleError, match=message):
        convert.from_webdataset(tmp_path / "a.tar", tmp_path / "out")
    whole = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(b"no tar" + whole[6:])
    with pytest.raises(SampleError, match="not a tar file"):
        convert.from_webdataset(tmp_path / "a.tar", tmp_path / "out")


def test_an_image_folder_round_trips(tmp_path: Path) -> None:
    source = tmp_path / "images"
    for name, kind, number in [
        ("dog/1.jpg", "JPEG", 1),
        ("cat/2.png", "PNG", 2),
        ("cat/deep/3.png", "PNG", 3),
    ]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(image_bytes(kind, number))
    done = convert.convert(source, tmp_path / "out")
    assert done.columns == {"image": "jpeg", "path": "str", "class": "str", "label": "int"}
    found = read(tmp_path / "out")
    assert [(sample["path"], sample["class"], sample["label"]) for sample in found] == [
        ("cat/2.png", "cat", 0), ("cat/deep/3.png", "cat", 0), ("dog/1.jpg", "dog", 1)
    ]  # fmt: skip
    assert [sample["image"].size[0] for sample in found] == [3, 4, 2]
    done = convert.from_image_folder(source / "cat/deep", tmp_path / "flat")
    assert done.columns == {"image": "png", "path": "str"}
    (source / "cat" / "4.png").write_bytes(b"no image")
    with pytest.raises(SampleError, match=r"4.png` is not an image"):
        convert.from_image_folder(source, tmp_path / "again")
    (source / "beside.png").write_bytes(image_bytes("PNG", 1))
    with pytest.raises(ConfigError, match="beside folders"):
        convert.from_image_folder(source, tmp_path / "again")


@pytest.fixture
def table() -> Any:
    """Return a table with columns of all types and 2,500 rows, which are several record batches."""
    arrow = pytest.importorskip("pyarrow", reason=GROUP)
    rows = range(2500)
    day = dt.date(2020, 1, 1)
    return arrow.table(
        {
            "i8": arrow.array([row % 100 for row in rows], arrow.int8()),
            "u64": arrow.array([(1 << 63) + row for row in rows], arrow.uint64()),
            "f16": arrow.array(np.arange(2500, dtype=np.float16)),
            "f64": arrow.array([row / 3 for row in rows]),
            "text": [f"é{row}" for row in rows],
            "category": arrow.array([str(row % 3) for row in rows]).dictionary_encode(),
            "raw": [bytes([row % 256]) * (row % 5) for row in rows],
            "exact": [Decimal(row) / 100 for row in rows],
            "day": [day + dt.timedelta(row) for row in rows],
            "ragged": arrow.array([[row] * (row % 4 + 1) for row in rows], arrow.list_(arrow.int32())),
            "fixed": arrow.array([[row, -row] for row in rows], arrow.list_(arrow.float32(), 2)),
            "empty": arrow.array([[1] * (row % 2) for row in rows], arrow.list_(arrow.int32())),
            "maybe": [None if row % 7 == 0 else row for row in rows],
            "flag": [row % 2 == 0 for row in rows],
            "inner": [{"a": row, "b": ["x"]} for row in rows],
        }
    )


KINDS = {
    "i8": "int8", "u64": "uint64", "f16": "float16", "f64": "float64", "text": "str", "category": "str",
    "raw": "bytes", "exact": "str_decimal", "day": "str", "ragged": "ndarray:int32",
    "fixed": "ndarray:float32:2", "empty": "ndarray:int32", "maybe": "json", "flag": "json", "inner": "json",
}  # fmt: skip


def same_rows(found: list[dict[str, Any]], table: Any) -> None:
    expected = table.to_pylist()
    assert len(found) == len(expected)
    for got, row in zip(found, expected, strict=True):
        plain = {
            name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in got.items()
        }
        assert plain == row | {"day": row["day"].isoformat()}


def test_parquet_round_trips(tmp_path: Path, table: Any) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason=GROUP)
    (tmp_path / "in").mkdir()
    parquet.write_table(table.slice(0, 1700), tmp_path / "in" / "0.parquet")
    parquet.write_table(table.slice(1700), tmp_path / "in" / "1.parquet")
    done = convert.convert(tmp_path / "in", tmp_path / "out", size_limit="32kb")
    assert done.columns == KINDS
    same_rows(read(tmp_path / "out"), table)
    with pytest.raises(DatasetExistsError):
        convert.convert(tmp_path / "in", tmp_path / "out")
    done = convert.convert(
        tmp_path / "in", tmp_path / "again", columns={"ragged": "ndarray:uint16", "maybe": "json"}
    )
    assert read(tmp_path / "again")[2499]["ragged"].dtype == np.uint16
    (tmp_path / "in" / "2.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(ConfigError, match=r"2.parquet` cannot be read"):
        convert.convert(tmp_path / "in", tmp_path / "broken")


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow_round_trips(tmp_path: Path, table: Any, kind: str) -> None:
    arrow = pytest.importorskip("pyarrow", reason=GROUP)
    path = tmp_path / "x.arrow"
    make = arrow.ipc.new_file if kind == "file" else arrow.ipc.new_stream
    views = {
        "text": arrow.string_view(),
        "raw": arrow.binary_view(),
        "ragged": arrow.list_view(arrow.int32()),
    }
    for name, kind_of_view in views.items():
        column = arrow.array(table[name].to_pylist(), kind_of_view)
        table = table.set_column(table.schema.get_field_index(name), name, column)
    with make(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=600)
    assert convert.convert(path, tmp_path / "out").columns == KINDS
    same_rows(read(tmp_path / "out"), table)


def test_columns_with_empty_or_missing_lists_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arrow = pytest.importorskip("pyarrow", reason=GROUP)
    parquet = pytest.importorskip("pyarrow.parquet", reason=GROUP)
    rows = {"tokens": [[1, 2], [], [3]], "maybe": [[1], None, [2]], "never": [[], [], []]}
    parquet.write_table(
        arrow.table(rows, schema=arrow.schema([(name, arrow.list_(arrow.int16())) for name in rows])),
        tmp_path / "x.parquet",
    )
    done = convert.from_parquet(tmp_path / "x.parquet", tmp_path / "out")
    assert done.columns == {"tokens": "ndarray:int16", "maybe": "json", "never": "ndarray:int16"}
    found = read(tmp_path / "out")
    assert [sample["tokens"].tolist() for sample in found] == rows["tokens"]
    assert [sample["maybe"] for sample in found] == rows["maybe"]
    assert found[1]["tokens"].dtype == np.int16
    said = [record.getMessage().split(" becomes")[0] for record in caplog.records]
    assert "column `tokens` has 1 empty lists" in said[0]
    assert said[1:2] == ["column `maybe` has nulls and"]
    assert "column `never` has 3 empty lists" in said[2]
    caplog.clear()
    convert.from_parquet(tmp_path / "x.parquet", tmp_path / "json", columns=dict.fromkeys(rows, "json"))
    assert read(tmp_path / "json") == arrow.table(rows).to_pylist()
    assert not caplog.records


def test_columns_without_a_matching_encoding_raise(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason=GROUP)
    parquet = pytest.importorskip("pyarrow.parquet", reason=GROUP)
    for values, message in [
        ([b"x", None], "`x` is of type binary and has nulls"),
        ([dt.timedelta(1)], "duration.*no encoding supports"),
    ]:
        parquet.write_table(arrow.table({"x": values}), tmp_path / "x.parquet")
        with pytest.raises(ConfigError, match=message):
            convert.from_parquet(tmp_path / "x.parquet", tmp_path / "out")


def test_a_column_that_is_empty_in_one_file_is_converted_and_other_differences_are_named(
    tmp_path: Path,
) -> None:
    arrow = pytest.importorskip("pyarrow", reason=GROUP)
    parquet = pytest.importorskip("pyarrow.parquet", reason=GROUP)
    source = tmp_path / "source"
    source.mkdir()
    for name, note in (("a", [None, None]), ("b", ["text", None]), ("c", [None, None])):
        parquet.write_table(arrow.table({"id": [1, 2], "note": note}), source / f"{name}.parquet")
    assert convert.from_parquet(source, tmp_path / "out").columns == {"id": "int64", "note": "json"}
    assert [sample["note"] for sample in read(tmp_path / "out")] == [None, None, "text", None, None, None]
    parquet.write_table(arrow.table({"id": [1.5], "note": ["text"]}), source / "b.parquet")
    with pytest.raises(ConfigError, match=r"b\.parquet`: column `id` is double in .* and int64 in another"):
        convert.from_parquet(source, tmp_path / "refused")


def test_a_folder_saved_by_hugging_face_datasets_round_trips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason=GROUP)
    files = [{"bytes": image_bytes("PNG", number), "path": None} for number in range(12)]
    data = {
        "image": files,
        "label": [number % 2 for number in range(12)],
        "text": [str(n) for n in range(12)],
    }
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["a", "b"]),
            "text": datasets.Value("string"),
        }
    )
    saved = datasets.Dataset.from_dict(data, features=features).select(range(11, -1, -1))
    saved.save_to_disk(tmp_path / "one", num_shards=2)
    done = convert.convert(tmp_path / "one", tmp_path / "out")
    assert done.columns == {"image": "png", "label": "int64", "text": "str"}
    found = read(tmp_path / "out")
    assert [int(sample["text"]) for sample in found] == list(range(11, -1, -1))
    assert [sample["image"].size[0] - 1 for sample in found] == list(range(11, -1, -1))
    datasets.DatasetDict(train=saved, test=saved).save_to_disk(tmp_path / "two")
    with pytest.raises(ConfigError, match=r"splits \['test', 'train'\]"):
        convert.convert(tmp_path / "two", tmp_path / "out2")
    with pytest.raises(ConfigError, match="not a folder of `save_to_disk`"):
        convert.from_hugging_face(tmp_path / "out", tmp_path / "out2")
    assert convert.convert(tmp_path / "two" / "train", tmp_path / "out2").num_samples == 12


@pytest.mark.parametrize("shape", [(2, 3), (None, 3)])
def test_arrays_of_several_dims_keep_their_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int | None, int]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason=GROUP)
    numbers = np.arange(60, dtype=np.float32)
    rows = [number % 3 + 1 if shape[0] is None else 2 for number in range(10)]
    data = [numbers[number : number + 3 * count].reshape(count, 3) for number, count in enumerate(rows)]
    features = datasets.Features({"x": datasets.Array2D(shape, "float32")})
    saved = datasets.Dataset.from_dict({"x": data}, features=features).select(range(1, 10))
    saved.save_to_disk(tmp_path / "in")
    done = convert.convert(tmp_path / "in", tmp_path / "out")
    assert done.columns == {"x": "ndarray:float32" + (":2,3" if shape[0] else "")}
    found = read(tmp_path / "out")
    assert [sample["x"].tolist() for sample in found] == [array.tolist() for array in data[1:]]


CSV = """id,price,text,zip,maybe,big,list\r
1,0.5,"a ""quoted"", one\r
over two lines",01234,,18446744073709551616,"[1, 2]"\r
-2,3,,00000,7,-1,[3]\r
"""


def test_csv_files_round_trip(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.csv").write_bytes(b"\xef\xbb\xbf" + CSV.encode())
    (source / "b.csv.gz").write_bytes(
        gzip.compress(b"text,id,price,zip,maybe,big,list\nb,3,1e3,1,8,0,[]\n\n")
    )
    done = convert.convert(source, tmp_path / "out", columns={"list": "ndarray:uint8"})
    assert done.columns == {
        "id": "int", "price": "float64", "text": "str", "zip": "str", "maybe": "json", "big": "str_int",
        "list": "ndarray:uint8",
    }  # fmt: skip
    found = read(tmp_path / "out")
    assert [sample.pop("list").tolist() for sample in found] == [[1, 2], [3], []]
    names = ["id", "price", "text", "zip", "maybe", "big"]
    assert [[sample[name] for name in names] for sample in found] == [
        [1, 0.5, 'a "quoted", one\r\nover two lines', "01234", None, 1 << 64],
        [-2, 3.0, "", "00000", 7, -1],
        [3, 1000.0, "b", "1", 8, 0],
    ]
    assert "column `maybe` has empty fields beside numbers" in caplog.text
    (tmp_path / "x.tsv").write_text("a\tb\n1\tx,y\n2\tz\n")
    assert convert.convert(tmp_path / "x.tsv", tmp_path / "tsv").columns == {"a": "int", "b": "str"}
    assert read(tmp_path / "tsv") == [{"a": 1, "b": "x,y"}, {"a": 2, "b": "z"}]


@pytest.mark.parametrize(
    ("text", "columns", "error", "message"),
    [
        ("a,b\n1\n", {}, SampleError, "x.csv` line 2 has 1 fields: expected 2"),
        ("a,a\n1,2\n", {}, ConfigError, "expected each name once"),
        ('a\n"1" 2\n', {}, SampleError, "x.csv` is not valid"),
        ("a\n\udcff\n", {}, SampleError, "x.csv` is not UTF-8"),
        ("a\n", {}, ConfigError, "no samples"),
        ("a,b\n1,2\nx,3\n", {"a": "int"}, SampleError, "sample 1 of the source: column `a`: 'x' is not int"),
        ("a\n300\n", {"a": "uint8"}, SampleError, "sample 0.*column `a`"),
        ("a\n7\n", {"a": "ndarray:uint8"}, SampleError, "expected a JSON list"),
    ],
)
def test_invalid_csv_files_raise(
    tmp_path: Path, text: str, columns: dict[str, str], error: type[Exception], message: str
) -> None:
    (tmp_path / "x.csv").write_text(text, errors="surrogateescape")
    limit = csv.field_size_limit()
    with pytest.raises(error, match=message):
        convert.from_csv(tmp_path / "x.csv", tmp_path / "out", columns=columns)
    assert not (tmp_path / "out" / "index.json").exists()
    assert csv.field_size_limit() == limit


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"pip install 'hocket-stream\[pyarrow\]'"):
        convert.convert(tmp_path / "x.parquet", tmp_path / "out")


def test_the_convert_command_writes_the_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text("".join(f'{{"n": {n}, "t": [{n}]}}\n' for n in range(100)))

    def call(*args: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            app(["convert", str(tmp_path / "x.jsonl"), str(tmp_path / "out"), *args])
        return ended.value.code, *capsys.readouterr()

    code, out, _ = call("--columns", "t=ndarray:int16:1", "--compression", "zstd:3", "--hashes", "sha1,xxh64",
                        "--size-limit", "1kb", "--json")  # fmt: skip
    document = json.loads(out)
    assert (code, document["num_samples"]) == (0, 100)
    assert document["columns"] == {"n": "int", "t": "ndarray:int16:1"}
    entry = json.loads((tmp_path / "out" / "index.json").read_text())["shards"][0]
    assert (entry["compression"], entry["hashes"], entry["size_limit"]) == ("zstd:3", ["sha1", "xxh64"], 1024)
    code, _, error = call()
    assert code == 4
    assert "holds a data set" in error
    assert "give `--exist-ok` to replace it" in error
    code, out, _ = call("--exist-ok")
    assert code == 0
    assert out.startswith("written: ")
    assert call("--exist-ok", "--columns", "t")[0] == 2
    code, _, error = call("--exist-ok", "--from", "xml")
    assert code == 2
    assert "`--from` is `xml`" in error
    assert call("--exist-ok", "--columns", "t=int")[0] == 1


def test_every_format_has_a_public_function() -> None:
    functions: dict[str, Callable[..., Any]] = convert.FORMATS
    assert all(getattr(convert, function.__name__) is function for function in functions.values())

"""Values of Arrow columns in data sets are those that pyarrow, pandas and NumPy give."""

from __future__ import annotations

import base64
import datetime as dt
import io
import subprocess
import sys
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hocket.stream import StreamingDataset, convert
from hocket.stream.errors import ConfigError, SampleError

arrow = pytest.importorskip("pyarrow", reason="needs `uv sync --group datasets`")


def run(folder: Path, table: Any, **options: Any) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Convert a table; return the encodings and the samples."""
    with arrow.ipc.new_file(folder / "x.arrow", table.schema) as writer:
        writer.write_table(table)
    done = convert.from_arrow(folder / "x.arrow", folder / "out", exist_ok=True, **options)
    return done.columns, StreamingDataset(local=folder / "out", batch_size=8)[:]


def extension(kind: Any, storage: Any) -> Any:
    return arrow.ExtensionArray.from_storage(kind, storage)


def image_bytes(size: tuple[int, int], kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size).save(out, format=kind)
    return out.getvalue()


def test_extension_types_have_the_values_of_their_storage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = [uuid.uuid4(), uuid.uuid4()]
    columns = {
        "id": extension(arrow.uuid(), arrow.array([one.bytes for one in ids], arrow.binary(16))),
        "opaque": extension(
            arrow.opaque(arrow.binary(), "shape", "geo"), arrow.array([b"\xff\x00", b"{"], arrow.binary())
        ),
        "text": extension(arrow.json_(), arrow.array(['{"a": 1}', "[]"])),
        "flag": extension(arrow.bool8(), arrow.array([1, 0], arrow.int8())),
        "inner": arrow.StructArray.from_arrays(
            [extension(arrow.uuid(), arrow.array([one.bytes for one in ids], arrow.binary(16)))], ["id"]
        ),
        "runs": arrow.RunEndEncodedArray.from_arrays([2], arrow.array(["a"])),
    }
    table = arrow.table(columns)
    kinds, found = run(tmp_path, table)
    assert kinds == {
        "id": "str", "opaque": "bytes", "text": "str", "flag": "int8", "inner": "json", "runs": "str"
    }  # fmt: skip
    expected = table.to_pylist()
    assert [
        {**row, "id": str(row["id"]), "inner": {"id": str(row["inner"]["id"])}} for row in expected
    ] == found
    said = [record.getMessage().partition(" is of type ")[0] for record in caplog.records]
    assert said == ["column `opaque`", "column `text`", "column `flag`"]
    kinds, found = run(tmp_path, table.select(["id"]), columns={"id": "bytes"})
    assert [sample["id"] for sample in found] == [one.bytes for one in ids]


@pytest.mark.parametrize("encoding", ["json", "str", "ndarray", "ndarray:uint8", "int", "jpeg", "list[png]"])
def test_binary_in_a_column_of_another_encoding_raises(tmp_path: Path, encoding: str) -> None:
    table = arrow.table({"x": [b"\xff\x00\xff"]})
    with pytest.raises(SampleError, match="sample 0 of the source: column `x`"):
        run(tmp_path, table, columns={"x": encoding})
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.parametrize("permutation", [None, [1, 0]])
def test_tensors_have_their_own_order_of_dims(tmp_path: Path, permutation: list[int] | None) -> None:
    kind = arrow.fixed_shape_tensor(arrow.int32(), [2, 3], permutation=permutation)
    storage = arrow.array([list(range(6)), list(range(6, 12))], arrow.list_(arrow.int32(), 6))
    tensors = extension(kind, storage)
    kinds, found = run(tmp_path, arrow.table({"x": tensors}))
    expected = tensors.to_numpy_ndarray()
    assert kinds == {"x": "ndarray:int32:2,3" if permutation is None else "ndarray:int32:3,2"}
    assert np.array_equal([sample["x"] for sample in found], expected)
    storage = arrow.array([list(range(6)), None], arrow.list_(arrow.int32(), 6))
    kinds, found = run(tmp_path, arrow.table({"x": extension(kind, storage)}))
    assert [sample["x"] for sample in found] == [expected[0].tolist(), None]


COUNTS = [0, 1, -1, 1_000, 1_500_000_000_123_456_789, 1_499_999_999_000_000_000, None]


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin", "+05:30"])
def test_timestamps_keep_nanoseconds_as_pandas_writes_them(tmp_path: Path, zone: str | None) -> None:
    pytest.importorskip("pandas")
    times = arrow.array(COUNTS, arrow.timestamp("ns", zone))
    expected = [None if time is None else time.isoformat() for time in times.to_pylist()]
    _, found = run(tmp_path, arrow.table({"x": times}))
    assert [sample["x"] for sample in found] == expected


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_times_are_written_as_python_writes_them(tmp_path: Path, unit: str, zone: str | None) -> None:
    small = [0, 1, 999_999, 86_399]
    narrow = unit != "us"
    table = arrow.table(
        {
            "stamp": arrow.array([*small, -1], arrow.timestamp(unit, zone)),
            "time": arrow.array(
                [*small[:2], 2, 1000, 5], arrow.time32(unit) if narrow else arrow.time64(unit)
            ),
            "date": arrow.array([0, -1, 18_000, 2_932_896, -719_162], arrow.int32()).cast(arrow.date32()),
            "ms": arrow.array([0, -86_400_000, 86_400_000, 0, 0], arrow.date64()),
            "category": arrow.array([dt.date(2020, 1, 1)] * 5).dictionary_encode(),
        }
    )
    expected = [{name: value.isoformat() for name, value in row.items()} for row in table.to_pylist()]
    assert run(tmp_path, table) == (dict.fromkeys(table.column_names, "str"), expected)


def test_times_that_python_lacks_are_written_as_numpy_writes_them(tmp_path: Path) -> None:
    seconds = [253_402_300_800, -62_135_596_801, 10**15]
    table = arrow.table(
        {
            "stamp": arrow.array(seconds, arrow.timestamp("s")),
            "date": arrow.array([2_932_897, -719_163, 1 << 30], arrow.int32()).cast(arrow.date32()),
            "time": arrow.array([1, 86_399_999_999_999, 1_000], arrow.time64("ns")),
            "inner": arrow.array([[1], [-1], []], arrow.list_(arrow.timestamp("ns"))),
        }
    )
    _, found = run(tmp_path, table)
    stamps = np.array(seconds, "datetime64[s]")
    assert [sample["stamp"] for sample in found] == np.datetime_as_string(stamps).tolist()
    days = np.array([2_932_897, -719_163, 1 << 30], "datetime64[D]")
    assert [sample["date"] for sample in found] == np.datetime_as_string(days).tolist()
    assert [sample["time"] for sample in found] == [
        "00:00:00.000000001",
        "23:59:59.999999999",
        "00:00:00.000001",
    ]
    assert [np.array(sample["inner"], "datetime64[ns]").astype(int).tolist() for sample in found] == [
        [1],
        [-1],
        [],
    ]
    far = arrow.table({"x": arrow.array(seconds, arrow.timestamp("s", "Europe/Berlin"))})
    with pytest.raises(SampleError, match=r"10000-01-01T00:00:00 in UTC has no known local time.*cast"):
        run(tmp_path, far)


def test_nanoseconds_need_no_pandas(tmp_path: Path) -> None:
    times = {
        "stamp": arrow.array([1], arrow.timestamp("ns")),
        "time": arrow.array([1], arrow.time64("ns")),
        "inner": arrow.array([{"x": 1}], arrow.struct([("x", arrow.timestamp("ns", "UTC"))])),
    }
    with arrow.ipc.new_file(tmp_path / "x.arrow", arrow.table(times).schema) as writer:
        writer.write_table(arrow.table(times))
    script = (
        "import sys\n"
        "class NoPandas:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'pandas': raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, NoPandas())\n"
        "from hocket.stream import convert, StreamingDataset\n"
        "convert.from_arrow('x.arrow', 'out')\n"
        "print(StreamingDataset(local='out', batch_size=1)[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for text in ("1970-01-01T00:00:00.000000001'", "'00:00:00.000000001'", "00:00:00.000000001+00:00'"):
        assert text in done.stdout


def test_values_within_structs_and_lists_become_json(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    day, price = dt.datetime(2020, 1, 2, 3, 4, 5, 6), Decimal("1.10")
    kind = arrow.struct(
        [
            ("when", arrow.timestamp("us")),
            ("price", arrow.decimal128(6, 2)),
            ("data", arrow.large_binary()),
            ("days", arrow.list_(arrow.date32())),
            ("prices", arrow.map_(arrow.string(), arrow.decimal128(6, 2))),
            ("half", arrow.float16()),
        ]
    )
    row = {
        "when": day, "price": price, "data": b"\xff\x00", "days": [day.date(), None], "prices": {"a": price},
        "half": 1.5,
    }  # fmt: skip
    table = arrow.table(
        {
            "x": arrow.array([row, None, dict.fromkeys(row), row], kind).slice(0, 3),
            "prices": arrow.array([[price], None, []], arrow.list_(arrow.decimal128(6, 2))),
            "pairs": arrow.array(
                [[("a", 1)], [], [("b", 2), ("c", 3)]], arrow.map_(arrow.string(), arrow.int8())
            ),
        }
    )
    kinds, found = run(tmp_path, table)
    assert kinds == {"x": "json", "prices": "json", "pairs": "json"}
    assert [sample["x"] for sample in found] == [
        {
            "when": day.isoformat(),
            "price": "1.10",
            "data": base64.b64encode(b"\xff\x00").decode(),
            "days": ["2020-01-02", None],
            "prices": [["a", "1.10"]],
            "half": 1.5,
        },
        None,
        dict.fromkeys(row),
    ]
    assert [sample["prices"] for sample in found] == [["1.10"], None, []]
    assert [sample["pairs"] for sample in found] == [[["a", 1]], [], [["b", 2], ["c", 3]]]
    assert "column `x` becomes `json`, with its binary values (x.data) as text in Base64" in caplog.text
    with pytest.raises(ConfigError, match=r"column `x.gap` is of type duration.*cast it, or drop it"):
        run(tmp_path, arrow.table({"x": [{"gap": dt.timedelta(1)}]}))


@pytest.mark.parametrize("second", ["PNG", "JPEG"])
def test_images_of_hub_parquet_files_stay_unchanged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, second: str
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    files = [image_bytes((3, 2)), image_bytes((4, 2), second)]
    image = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    items = [{"bytes": data, "path": f"{number}.png"} for number, data in enumerate(files)]
    table = arrow.table(
        {
            "image": arrow.array(items, image),
            "images": arrow.array([items, []], arrow.list_(image)),
            "sound": arrow.array([{"bytes": b"RIFF0000WAVE", "path": None}] * 2, image),
        }
    )
    parquet.write_table(table, tmp_path / "x.parquet")
    done = convert.from_parquet(tmp_path / "x.parquet", tmp_path / "out")
    kind = second.lower()
    assert done.columns == {"image": kind, "images": f"list[{kind}]", "sound": "bytes"}
    found = StreamingDataset(local=tmp_path / "out", batch_size=2)[:]
    assert [sample["image"].size for sample in found] == [(3, 2), (4, 2)]
    assert [[one.size for one in sample["images"]] for sample in found] == [[(3, 2), (4, 2)], []]
    assert [sample["sound"] for sample in found] == [b"RIFF0000WAVE"] * 2
    columns = {"image": "bytes", "images": "json", "sound": "json"}
    convert.from_parquet(tmp_path / "x.parquet", tmp_path / "raw", columns=columns)
    raw = StreamingDataset(local=tmp_path / "raw", batch_size=2)[:]
    assert [sample["image"] for sample in raw] == files
    assert [base64.b64decode(item["bytes"]) for item in raw[0]["images"]] == files
    said = [record.getMessage() for record in caplog.records]
    assert [message.partition(" has ")[0] for message in said] == ["column `image`", "column `images`"]
    lone = arrow.table({"image": arrow.array([{"bytes": None, "path": "x.png"}], image)})
    with pytest.raises(ConfigError, match="`image` has files or images without bytes"):
        run(tmp_path, lone)


def test_an_image_given_as_pil_is_decoded(tmp_path: Path) -> None:
    kinds, found = run(tmp_path, arrow.table({"x": [image_bytes((3, 2))]}), columns={"x": "pil"})
    assert (kinds, found[0]["x"].size) == ({"x": "pil"}, (3, 2))

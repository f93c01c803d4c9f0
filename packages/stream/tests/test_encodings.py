"""Column encodings: values round-trip, and invalid values, bytes and names raise typed errors."""

from __future__ import annotations

import math
import pickle
import uuid
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.stream import MDSWriter, StreamingDataset
from hocket.stream.encodings import resolve_encoding
from hocket.stream.errors import ConfigError, SampleError, ShardCorruptError

INTS = ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]
SCALARS = [*INTS, "float16", "float32", "float64"]


def decode_one(encoding: str, data: bytes) -> Any:
    way = resolve_encoding(encoding)
    offsets = None if way.width else np.array([0, len(data)], np.uint64)
    return way.item(way.decode(memoryview(data), offsets), 0)


def round_trip(encoding: str, value: Any) -> Any:
    return decode_one(encoding, resolve_encoding(encoding).encode(value))


@given(st.integers(-(2**63), 2**63 - 1))
def test_int_round_trips(value: int) -> None:
    back = round_trip("int", value)
    assert back == value
    assert type(back) is int


@given(st.text())
def test_str_round_trips(value: str) -> None:
    assert round_trip("str", value) == value


@given(st.sampled_from(SCALARS).flatmap(lambda name: hnp.from_dtype(np.dtype(name))))
def test_numpy_scalars_round_trip(value: np.generic) -> None:
    back = round_trip(value.dtype.name, value)
    assert back.dtype == value.dtype
    assert back.tobytes() == value.tobytes() or math.isnan(value)


arrays = st.sampled_from(SCALARS).flatmap(
    lambda name: hnp.arrays(name, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))
)


@given(arrays)
def test_arrays_round_trip(value: np.ndarray[Any, Any]) -> None:
    shape = ",".join(map(str, value.shape))
    shaped = [f"ndarray:{value.dtype.name}:{shape}"] if value.size else []  # no fixed shape has a dim of 0
    for encoding in ("ndarray", f"ndarray:{value.dtype.name}", *shaped):
        back = round_trip(encoding, value)
        assert back.dtype == value.dtype
        assert back.shape == value.shape
        assert back.tobytes() == value.tobytes()


@given(st.integers())
def test_str_int_round_trips(value: int) -> None:
    assert round_trip("str_int", value) == value


@given(st.floats(allow_nan=False))
def test_str_float_round_trips(value: float) -> None:
    assert round_trip("str_float", value) == value


@given(st.decimals(allow_nan=False))
def test_str_decimal_round_trips(value: Decimal) -> None:
    back = round_trip("str_decimal", value)
    assert str(back) == str(value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_json_values_round_trip(value: Any) -> None:
    assert round_trip("json", value) == value


@given(json_values)
def test_pickles_round_trip_if_unsafe_types_are_allowed(value: Any) -> None:
    way = resolve_encoding("pkl", allow_unsafe_types=True)
    data = way.encode(value)
    assert way.item(way.decode(memoryview(data), np.array([0, len(data)], np.uint64)), 0) == value


TRIED = ["ndarray", "ndarray:int64", "ndarray:uint8", "str", "str_int", "str_float", "str_decimal", "json"]


@given(st.binary(max_size=40), st.sampled_from(TRIED))
def test_decoding_arbitrary_bytes_raises_only_a_typed_error(data: bytes, encoding: str) -> None:
    told = None
    try:
        decode_one(encoding, data)
    except ShardCorruptError as error:
        told = str(error)
    assert told is None or "restore the shard" in told


def outcome(encoding: str, values: list[bytes], *, together: bool) -> Any:
    """Return what a batch of encoded values is decoded to, all at once or one by one, or the error."""
    data, edges = b"".join(values), np.cumsum([0, *map(len, values)]).astype(np.uint64)
    way = resolve_encoding(encoding)
    try:
        decoded = (
            way.decode(memoryview(data), edges) if together else [decode_one(encoding, v) for v in values]
        )
    except ShardCorruptError as error:
        return str(error)
    return [(one.dtype, one.shape, one.tobytes()) if encoding != "str" else one for one in decoded]


@given(
    st.lists(st.integers(0, 300), min_size=33, max_size=40),
    # Of a head, whose upper bits are the number of dims, or of a dim.
    st.none() | st.tuples(st.integers(0, 32), st.integers(0, 3), st.sampled_from([0, 4, 8, 9, 255])),
    st.booleans(),
)
def test_a_batch_of_arrays_is_decoded_as_each_of_them(
    lengths: list[int], change: tuple[int, int, int] | None, is_long: bool
) -> None:
    arrays = [np.arange(length + (70_000 if is_long and not at else 0)) for at, length in enumerate(lengths)]
    values = [resolve_encoding("ndarray:int64").encode(array) for array in arrays]
    if change is not None:
        number, place, byte = change
        changed = bytearray(values[number])
        changed[place % len(changed)] = byte
        values[number] = bytes(changed)
    outcomes = [outcome("ndarray:int64", values, together=together) for together in (True, False)]
    assert outcomes[0] == outcomes[1]
    if change is None:
        assert outcomes[0] == [(array.dtype, array.shape, array.tobytes()) for array in arrays]


@pytest.mark.parametrize("place", [0, 20, 40])
def test_a_value_without_bytes_in_a_batch_of_arrays_is_corrupt(place: int) -> None:
    values = [resolve_encoding("ndarray:int64").encode(np.arange(3))] * 40
    values.insert(place, b"")
    outcomes = [outcome("ndarray:int64", values, together=together) for together in (True, False)]
    assert outcomes[0] == outcomes[1]
    assert "restore the shard" in outcomes[0]


@given(st.lists(st.text(max_size=5) | st.binary(max_size=3), max_size=5))
def test_a_batch_of_strings_is_decoded_as_each_of_them(texts: list[str | bytes]) -> None:
    values = [text if isinstance(text, bytes) else text.encode() for text in texts]
    assert outcome("str", values, together=True) == outcome("str", values, together=False)


def test_dims_beyond_numpys_limit_raise_a_typed_error() -> None:
    dims = np.array([0, 1 << 63, 1 << 63], "<u8").tobytes()
    with pytest.raises(ShardCorruptError, match="NumPy allows"):
        decode_one("ndarray:uint8", bytes([3 << 2 | 3]) + dims)


@pytest.mark.parametrize(
    ("encoding", "value"),
    [
        ("int", "5"),
        ("int", 2**63),
        ("int", 1.5),
        ("uint8", -1),
        ("uint8", np.int64(256)),
        ("float16", 1e6),
        ("str", 5),
        ("bytes", "text"),
        ("ndarray", [1, 2]),
        ("ndarray", np.float32(1)),
        ("ndarray", np.zeros(2, bool)),
        ("ndarray:uint8", np.zeros(2, np.int8)),
        ("ndarray:uint8:2", np.zeros(3, np.uint8)),
        ("str", "\ud800"),
        ("str_int", 1.0),
        ("str_float", 1),
        ("str_decimal", 1.0),
        ("json", {1, 2}),
        ("json", [[]] * 3 + [object()]),
        ("pkl", lambda: None),
        ("jpeg", 5),
        ("list[pil]", 5),
    ],
)
def test_a_value_of_another_type_raises_with_its_column(tmp_path: Path, encoding: str, value: object) -> None:
    writer = MDSWriter(columns={"x": encoding}, out=tmp_path)
    with pytest.raises(SampleError, match=r"column `x`.*expected"):
        writer.write({"x": value})


def test_a_sample_without_a_column_raises_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="no `y`"):
        MDSWriter(columns={"x": "int", "y": "int"}, out=tmp_path).write({"x": 1})


def test_bytes_are_stored_unencoded_if_their_size_fits(tmp_path: Path) -> None:
    with MDSWriter(columns={"x": "int", "y": "str"}, out=tmp_path) as writer:
        writer.write({"x": bytes([7]) + bytes(7), "y": b"done"})
        with pytest.raises(SampleError, match="3 bytes: expected 8"):
            writer.write({"x": b"abc", "y": ""})
    assert list(StreamingDataset(local=tmp_path, batch_size=1)) == [{"x": 7, "y": "done"}]


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("str", b"\xff"),
        ("str_int", b"five"),
        ("json", b"\x00{"),
        ("ndarray", uuid.UUID(int=1 << 100).bytes),
        ("ndarray:float32", bytes(7)),
        ("pkl", b"\x80"),
        ("pkl", pickle.dumps(5) + b"more"),
        ("jpeg", b"RIFF but no image"),
        ("png", b""),
        ("pil", bytes(20)),
        ("list[png]", bytes(7)),
    ],
)
def test_bytes_that_the_encoding_cannot_read_raise_while_writing(
    tmp_path: Path, encoding: str, data: bytes
) -> None:
    columns = {"id": "int", "x": encoding}
    values = [data, [data]] if encoding.startswith("list") else [data]
    with MDSWriter(columns=columns, out=tmp_path, hashes=None) as writer:
        for value in values:
            with pytest.raises(SampleError, match=r"column `x`: .*the encoding is `bytes`"):
                writer.write({"id": 1, "x": value})
            with pytest.raises(SampleError, match="column `x`"):
                writer.write(MappingProxyType({"id": 1, "x": value}))


@given(st.sampled_from([*TRIED, "str_float", "pkl", "jpeg", "list[jpeg]", "bytes"]), st.binary(max_size=20))
def test_bytes_that_are_written_can_be_read(encoding: str, data: bytes) -> None:
    way = resolve_encoding(encoding, allow_unsafe_types=True)
    try:
        stored = way.store(data)
    except SampleError:
        return
    assert stored == data
    if encoding not in ("pkl", "jpeg"):  # a pickle is not run to check it, nor an image decoded
        way.decode(memoryview(data), np.array([0, len(data)], np.uint64))


@pytest.mark.parametrize("encoding", ["ndarray", "ndarray:float32", "ndarray:float32:3", "json"])
def test_masked_elements_are_not_replaced_by_others(tmp_path: Path, encoding: str) -> None:
    masked = np.ma.masked_array(np.arange(3, dtype=np.float32), mask=[False, True, False])
    whole = np.ma.masked_array(np.arange(3, dtype=np.float32))
    with MDSWriter(columns={"x": encoding}, out=tmp_path) as writer:
        writer.write({"x": whole})
        if encoding == "json":
            writer.write({"x": masked})
        else:
            with pytest.raises(SampleError, match=r"column `x`: the array has 1 masked.*`filled`"):
                writer.write({"x": masked})
    found = [sample["x"] for sample in StreamingDataset(local=tmp_path, batch_size=1)]
    assert np.array_equal(found[0], whole.data)
    assert found[1:] == ([masked.tolist()] if encoding == "json" else [])


@pytest.mark.parametrize(
    "encoding",
    [
        "avif",
        "list[json]",
        "list[]",
        "list[jpeg",
        "ndarray:bool",
        "ndarray:uint8:0",
        "ndarray:uint8:a",
        "nonsense",
    ],
)
def test_an_unknown_encoding_raises_with_the_known_ones(encoding: str) -> None:
    with pytest.raises(ConfigError, match=r"expected"):
        resolve_encoding(encoding)


def test_pickle_raises_unless_unsafe_types_are_allowed() -> None:
    with pytest.raises(ConfigError, match="allow_unsafe_types"):
        resolve_encoding("pkl")
    assert resolve_encoding("pkl", allow_unsafe_types=True).encode({1}) == pickle.dumps({1})

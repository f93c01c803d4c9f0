"""The canonical JSON of values: equal values have equal text, and types round-trip."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.ckpt.document.values import canonical, from_canonical
from hocket.ckpt.errors import CheckpointStateError

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(
    scalars,
    lambda child: (
        st.lists(child, max_size=4)
        | st.lists(child, max_size=4).map(tuple)
        | st.dictionaries(
            st.text(max_size=4) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)), child
        )
    ),
    max_leaves=12,
)


@given(values)
def test_values_round_trip_with_their_types(value):
    back = from_canonical(canonical(value, "x"))
    assert back == value
    assert canonical(back, "x") == canonical(value, "x")


def test_the_order_of_keys_does_not_change_the_text():
    keys = [2, 10, -1, 2**60, 2**70, "10", "a", (1, 2), b"x", None, True, 0.5]
    mapping = {key: str(key) for key in keys}
    assert canonical(mapping, "x") == canonical({key: str(key) for key in reversed(keys)}, "x")
    assert list(from_canonical(canonical({10: 1, 9: 2}, "x"))) == [9, 10]
    assert canonical({"a": 1, "b": (2, 3)}, "x") == canonical({"b": (2, 3), "a": 1}, "x")
    assert canonical((1, 2), "x") != canonical([1, 2], "x")
    assert canonical(1, "x") != canonical(True, "x")


@pytest.mark.parametrize(
    "value", [math.inf, -math.inf, 2**53 + 1, -(2**80), b"\x00\xff", {1: {2: 3}}, {"$a": 1}]
)
def test_values_outside_json_round_trip(value):
    assert from_canonical(canonical(value, "x")) == value


def test_nan_round_trips():
    assert math.isnan(from_canonical(canonical(math.nan, "x")))


@pytest.mark.parametrize("value", [object(), {1, 2}, (1, [object()]), "\ud800"])
def test_unsupported_values_raise_with_their_name(value):
    with pytest.raises(CheckpointStateError, match=r"`scheduler\.x`"):
        canonical(value, "scheduler.x")


def test_an_integer_beyond_the_readers_limit_raises():
    assert from_canonical(canonical(-(2**8192) + 1, "x")) == -(2**8192) + 1
    with pytest.raises(CheckpointStateError, match=r"`seed` .* 16610 bits at `\[1\]`; expected at most 8192"):
        canonical([1, 10**5000], "seed")


def test_a_value_that_contains_itself_raises():
    value = []
    value.append((value,))
    with pytest.raises(CheckpointStateError, match="holds itself"):
        canonical(value, "x")

"""Values have one canonical text, equal where they are equal."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.ckpt.errors import CheckpointStateError
from hocket.ckpt.values import canonical, from_canonical

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
def test_a_value_comes_back_with_its_types(value):
    back = from_canonical(canonical(value, "x"))
    assert back == value
    assert canonical(back, "x") == canonical(value, "x")


def test_the_order_of_keys_does_not_count():
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
def test_what_json_cannot_say_is_said_all_the_same(value):
    assert from_canonical(canonical(value, "x")) == value


def test_not_a_number_stays_one():
    assert math.isnan(from_canonical(canonical(math.nan, "x")))


@pytest.mark.parametrize("value", [object(), {1, 2}, (1, [object()]), "\ud800"])
def test_anything_else_is_refused_by_name(value):
    with pytest.raises(CheckpointStateError, match=r"`scheduler\.x`"):
        canonical(value, "scheduler.x")


def test_an_integer_that_no_reader_would_take_is_refused():
    assert from_canonical(canonical(-(2**8192) + 1, "x")) == -(2**8192) + 1
    with pytest.raises(CheckpointStateError, match=r"`seed` .* 16610 bits at `\[1\]`; expected at most 8192"):
        canonical([1, 10**5000], "seed")


def test_a_value_that_holds_itself_is_refused():
    value = []
    value.append((value,))
    with pytest.raises(CheckpointStateError, match="holds itself"):
        canonical(value, "x")
